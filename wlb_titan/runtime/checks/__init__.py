"""Checks before anything starts. Read `config` first."""
