"""Variable-length causal attention over segments: one op, run by the fastest of `implementations.TABLE`.

>>> import torch
>>> from wlb_titan.kernels import varlen_attention
>>> q, k, v = (torch.randn(6, 2, 64) for _ in range(3))
>>> # Two documents of 4 and 2 tokens, packed one after the other.
>>> segments = torch.tensor([[0, 4, 0, 4], [4, 2, 4, 2]], dtype=torch.int32)
>>> varlen_attention(q, k, v, segments).shape
torch.Size([6, 2, 64])

The op is imported when it is first asked for: `fastest` is read without torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .op import varlen_attention

__all__ = ["varlen_attention"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import op

    return getattr(op, name)
