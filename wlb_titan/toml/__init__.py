"""TOML to dataclasses, for any of them: nothing here knows what the settings mean.

`values.py` converts and prints single values, `sources.py` reads files and the command line into one tree
with each value's origin, and `build.py` makes dataclasses of it, with errors that name file, line and key.
Read them in that order.
"""
