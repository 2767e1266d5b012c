"""TOML in, typed configuration out, with errors a person can act on.

The files, bottom to top: `values` (one value, its type and its range), `sources` (what the user wrote),
`build` (that over a base), `load` (all together, and TOML out). `settings` holds our own sections. Nothing
here imports torchtitan.
"""
