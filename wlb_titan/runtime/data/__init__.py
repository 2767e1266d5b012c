"""From planned micro-batches to tensors.

Read `corpus` first, then `dataloader` and `inputs`.
"""
