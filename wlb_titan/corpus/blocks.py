"""Checksums of a file by block, compared when a block is first read.

A corpus is mapped and read in random places for months, on disks and after copies that nobody watches. A
CRC-32 of each block of 32 KiB finds every flipped bit, costs one pass over what is read anyway (about 1.4
GB/s of a core, once a block and process), and takes 4 bytes a block beside the file.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from wlb_titan.arrays import Ints
from wlb_titan.corpus.shards import map_file
from wlb_titan.errors import CorpusError

BLOCK = 1 << 15  # bytes

Sums = NDArray[np.uint32]


def block_sums(path: Path) -> Sums:
    """uint32 (blocks,), the CRC-32 of each block; the last one may be shorter."""
    pages = map_file(path)
    return np.array(
        [zlib.crc32(pages[begin : begin + BLOCK].data) for begin in range(0, len(pages), BLOCK)],
        dtype=np.uint32,
    )


class CheckedPages:
    """The bytes of a file, mapped; call `check` before they are used.

    Args:
        sums: checksums of its blocks; None checks nothing.

    Attributes:
        pages: uint8 (bytes,).
    """

    def __init__(self, path: Path, sums: Sums | None) -> None:
        self.pages = map_file(path)
        self._path = path
        self._sums = sums
        self._unseen = np.ones(0 if sums is None else len(sums), dtype=np.bool_)

    def check(self, begin: int, end: int, what: str) -> None:
        """Compares the blocks that hold the bytes begin .. end - 1, unless that was done before.

        Args:
            begin, end: bytes of the file.

        Raises:
            CorpusError: the file is not what was written.
        """
        self._check(np.arange(begin // BLOCK, -(-end // BLOCK)), what)

    def check_places(self, places: Ints, what: str) -> None:
        """`check` of the blocks that hold these bytes, int64 (n,)."""
        self._check(places // BLOCK, what)

    def damaged_blocks(self) -> list[int]:
        """The numbers of all blocks that are not what was written."""
        sums = () if self._sums is None else self._sums
        return [block for block, wanted in enumerate(sums) if self._sum(block) != wanted]

    def _check(self, blocks: Ints, what: str) -> None:
        if self._sums is None:
            return
        unseen = blocks[self._unseen[blocks]]
        if not unseen.size:  # as in nearly every call
            return
        for block in np.unique(unseen).tolist():
            if self._sum(block) != self._sums[block]:
                raise damaged(
                    self._path,
                    f"{what}: the {BLOCK:,} bytes from {block * BLOCK:,} on are not what was written",
                )
            self._unseen[block] = False

    def _sum(self, block: int) -> int:
        return zlib.crc32(self.pages[block * BLOCK : (block + 1) * BLOCK].data)


def damaged(path: Path, what: str) -> CorpusError:
    """The error for a file of a prepared corpus that is not what was written."""
    return CorpusError(
        f"The corpus {path.parent} is damaged: {path.name}, {what}. {again(path.parent)}; `wlb-titan prepare "
        f"{path.parent} --verify` names all damage."
    )


def again(folder: Path) -> str:
    """What to do with a prepared corpus that is not what was written, as a sentence without its end."""
    return f"Copy it again from where it came, or make it again with `wlb-titan prepare {folder} --overwrite`"
