"""Models: which of them train here, and what is changed in them.

Read `load` first: from a file to a configuration; then `bases` and `adoption`.
"""
