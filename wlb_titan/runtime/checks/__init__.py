"""Checks: what is refused before anything starts.

Read `config` first.
"""
