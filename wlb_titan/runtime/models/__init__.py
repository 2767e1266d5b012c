"""Models that train here, and what is changed in them. Read `load` first, then `bases` and `adoption`."""
