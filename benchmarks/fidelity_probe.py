"""How fast this machine is right now: the speed of one that is shared with others drifts by half and more."""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from wlb_titan.kernels import varlen_attention

TOKENS, WIDTH, FEED_FORWARD, HEADS, KEY_HEADS, HEAD_DIM = 1024, 128, 384, 4, 2, 32
REPEATS = 3


class Probe:
    """A transformer layer of the cases' model in plain PyTorch, on one document."""

    def __init__(self) -> None:
        def weight(*size: int) -> torch.Tensor:
            return (torch.randn(*size) * WIDTH**-0.5).requires_grad_()

        self.x = torch.randn(TOKENS, WIDTH)
        self.qkv = weight((HEADS + 2 * KEY_HEADS) * HEAD_DIM, WIDTH)
        self.out = weight(WIDTH, HEADS * HEAD_DIM)
        self.gate, self.up = weight(FEED_FORWARD, WIDTH), weight(FEED_FORWARD, WIDTH)
        self.down = weight(WIDTH, FEED_FORWARD)
        self.segments = torch.tensor([[0, TOKENS, 0, TOKENS]], dtype=torch.int32)
        self.seconds()  # the first time pays for more

    def seconds(self) -> float:
        """Of one forward and backward pass, on average over some."""
        begin = time.perf_counter()
        for _ in range(REPEATS):
            self._pass()
        return (time.perf_counter() - begin) / REPEATS

    def _pass(self) -> None:
        heads = F.linear(F.rms_norm(self.x, (WIDTH,)), self.qkv).unflatten(1, (-1, HEAD_DIM))
        q, k, v = heads.split((HEADS, KEY_HEADS, KEY_HEADS), dim=1)
        h = self.x + F.linear(varlen_attention(q, k, v, self.segments).flatten(1), self.out)
        z = F.rms_norm(h, (WIDTH,))
        h = h + F.linear(F.silu(F.linear(z, self.gate)) * F.linear(z, self.up), self.down)
        h.square().sum().backward()
