"""The subcommands of `wlb-titan`: thin. `main.py` has their table, `command_line.py` what they share, and
`lone_ranks.py` what `dryrun` and `rehearse` share."""
