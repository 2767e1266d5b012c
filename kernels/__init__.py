"""Variable-length causal attention over segments: one op, Triton kernels on CUDA, plain PyTorch on the CPU.

>>> import torch
>>> from wlb_titan.kernels import varlen_attention
>>> q, k, v = (torch.randn(6, 2, 64) for _ in range(3))
>>> # Two documents of 4 and 2 tokens, packed one after the other.
>>> segments = torch.tensor([[0, 4, 0, 4], [4, 2, 4, 2]], dtype=torch.int32)
>>> varlen_attention(q, k, v, segments).shape
torch.Size([6, 2, 64])
"""

from .op import varlen_attention

__all__ = ["varlen_attention"]
