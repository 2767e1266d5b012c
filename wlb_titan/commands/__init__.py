"""The subcommands of `wlb-titan`: thin. `main.py` has their table, `command_line.py` what they share,
`lone_ranks.py` what `dryrun` and `rehearse` share, and `templates/` the texts that they write."""
