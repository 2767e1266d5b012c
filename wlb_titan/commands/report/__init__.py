"""The output of `dryrun` and `rehearse`."""
