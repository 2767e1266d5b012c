"""Tile shapes and launch options of the Triton kernels, by pass and head dim.

Never by lengths: those change every step, and each new configuration is a compilation. The shapes were chosen
by cross-compiling for sm_90 (registers, spills, shared memory, programs per multiprocessor); docs/kernels.md
has the figures.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """One kernel's shape.

    block_m: rows of a query tile. block_n: keys of a block. transposed: keys x rows scores in the key-tile
    pass.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    transposed: bool = False


HEAD_DIMS = (64, 96, 128, 192, 256)  # the classes: the larger of D and Dv, rounded up
LATENT = (192, 128)  # and a class of its own: D and Dv of multi-head latent attention

_HOPPER = {
    ("forward", 64): Config(128, 128, 8, 3),
    ("forward", 96): Config(128, 128, 8, 2),
    ("forward", 128): Config(128, 128, 8, 2),
    ("forward", LATENT): Config(128, 128, 8, 2),
    ("forward", 192): Config(128, 64, 8, 2),
    ("forward", 256): Config(128, 64, 8, 2),
    ("key_tiles", 64): Config(128, 64, 8, 2),
    ("key_tiles", 96): Config(128, 64, 8, 2),
    ("key_tiles", 128): Config(128, 64, 8, 2),
    ("key_tiles", LATENT): Config(128, 64, 8, 2),
    ("key_tiles", 192): Config(128, 64, 8, 1),
    ("key_tiles", 256): Config(64, 32, 8, 1),
    ("query_tiles", 64): Config(128, 128, 8, 2),
    ("query_tiles", 96): Config(128, 64, 8, 3),
    ("query_tiles", 128): Config(128, 64, 8, 3),
    ("query_tiles", LATENT): Config(128, 64, 8, 2),
    ("query_tiles", 192): Config(128, 32, 8, 2),
    ("query_tiles", 256): Config(128, 32, 8, 2),
}

# Smaller tiles for 100 KB of shared memory (sm_86, sm_89) and loads by cp.async (sm_80 too).
_AMPERE = {
    ("forward", 64): Config(128, 64, 4, 3),
    ("forward", 128): Config(128, 32, 4, 3),
    ("forward", 256): Config(64, 32, 4, 1),
    ("key_tiles", 64): Config(32, 128, 8, 2, transposed=True),
    ("key_tiles", 128): Config(32, 64, 4, 2, transposed=True),
    ("key_tiles", 256): Config(32, 32, 4, 1, transposed=True),
    ("query_tiles", 64): Config(64, 64, 4, 2),
    ("query_tiles", 128): Config(64, 32, 4, 2),
    ("query_tiles", 256): Config(32, 32, 4, 1),
}


def choose(which: str, dims: tuple[int, int], tma: bool) -> Config:
    """The configuration of a pass: "forward", "key_tiles" (dK, dV) or "query_tiles" (dQ).

    dims: D and Dv. tma: whether tiles are loaded by TMA.
    """
    table = _HOPPER if tma else _AMPERE
    head_dim: object = dims
    if (which, dims) not in table:
        head_dim = next(d for d in HEAD_DIMS if max(dims) <= d and (which, d) in table)
    return table[which, head_dim]
