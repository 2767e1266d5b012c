"""What docs/extending.md describes, as a package that wlb_titan finds by its entry points."""
