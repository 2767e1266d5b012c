"""The subcommands of `wlb-titan`: thin. `main.py` has their table, `command_line.py` what they share,
`lone_ranks.py` what `dryrun` and `rehearse` share, `page.py` and `templates/` the pages and texts they write."""
