"""Dimensions of parallelism: what the ranks along a mesh axis divide, where they lie, and what that costs.

`dimension.py` has the class that a dimension of your own derives from, and torchtitan's; `degrees.py` a job's
degrees, the places of its ranks, and the user's dimensions among them. docs/extending.md adds one, step by
step.
"""
