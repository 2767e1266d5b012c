"""Attention of slices: the keys and values of a document's earlier slices, and their gradients.

One op reads and fills the cache, and its backward op empties it (docs/slimpack.md, "How a step runs").
Autograd sees only the slice's own queries, keys and values. For torch.compile and activation checkpointing
the op is a function of its inputs: the cache and the layer are tensors with a number each.

Shape suffixes: L tokens, N heads, H head dim.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from wlb_titan.kernels.op import define_attention, scale_of

NUMBER, BEFORE, HERE, IN_ALL = range(4)
"""Columns of `rows`, int64 (n, 4) on the CPU, a row for each document of a micro-batch, in order: its number
within the step (-1 if all of it is here), and its tokens before those here, here and in all."""

_numbers = itertools.count()
_caches: weakref.WeakValueDictionary[int, KeyValueCache] = weakref.WeakValueDictionary()


class KeyValueCache:
    """The keys and values that the slices of one step leave to each other on one rank."""

    def __init__(self) -> None:
        number = next(_numbers)
        self.number = torch.tensor(number, device="cpu")  # by which ops find it
        self._documents: dict[tuple[int, int], _Document] = {}  # by layer and document
        _caches[number] = self

    def tensors(self) -> Iterator[Tensor]:
        for document in self._documents.values():
            yield from document.tensors()

    def check_empty(self) -> None:
        if self._documents:
            layer, document = next(iter(self._documents))
            raise RuntimeError(
                f"Keys of {len(self._documents)} documents and layers are left after the step, first of them "
                f"document {document} in layer {layer}: not all of its slices had their backward pass."
            )

    def keys(self, layer: int, rows: list[list[int]], k_LNH: Tensor, v_LNH: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all documents of a micro-batch, each prefix before its tokens; leaves those of
        slices in the cache, unless they are in it already."""
        parts, begin = [], 0
        for document, prefix, tokens, total in rows:
            end = begin + tokens
            seen = k_LNH[begin:end], v_LNH[begin:end]
            if document >= 0:
                if (layer, document) not in self._documents:
                    self._documents[layer, document] = _Document(total, seen)
                seen = self._documents[layer, document].through(prefix, seen)
            parts.append(seen)
            begin = end
        if begin < k_LNH.shape[0]:  # padding
            parts.append((k_LNH[begin:], v_LNH[begin:]))
        return parts[0] if len(parts) == 1 else _joined(parts)

    def own_gradients(
        self, layer: int, rows: list[list[int]], dk_LNH: Tensor, dv_LNH: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Gradients of the micro-batch's own tokens, from those of all that `keys` returned."""
        parts, begin = [], 0
        for document, prefix, tokens, _ in rows:
            end = begin + prefix + tokens
            own = dk_LNH[begin:end], dv_LNH[begin:end]
            if document >= 0:
                entry = self._documents.get((layer, document))
                if entry is None or entry.upto != prefix + tokens:
                    due = entry.upto if entry is not None else 0
                    raise RuntimeError(
                        f"The backward pass of tokens {prefix} to {prefix + tokens} of document {document} "
                        f"runs in layer {layer} where that of the tokens before {due} is due: backward "
                        "passes of slices go from a document's end to its start."
                    )
                own = entry.taken(prefix, own)
                if prefix == 0:
                    del self._documents[layer, document]
            parts.append(own)
            begin = end
        return _joined([*parts, (dk_LNH[begin:], dv_LNH[begin:])])


def _joined(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return tuple(torch.cat(part) for part in zip(*parts, strict=True))


class _Document:
    """One document in one layer: room for all of its keys and values, and gradients once they come."""

    def __init__(self, total: int, like: tuple[Tensor, Tensor]) -> None:
        self.upto = total  # tokens whose slices have not had their backward pass
        self._filled = 0
        self._kv = tuple(x.new_empty((total, *x.shape[1:])) for x in like)
        self._gradients: tuple[Tensor, ...] | None = None

    def tensors(self) -> tuple[Tensor, ...]:
        return *self._kv, *(self._gradients or ())

    def through(self, prefix: int, own: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values up to the end of a slice, whose own are given."""
        end = prefix + own[0].shape[0]
        if self._filled < end:
            assert self._filled == prefix, "forward passes of slices go from a document's start to its end"
            for kept, x in zip(self._kv, own, strict=True):
                kept[prefix:end] = x
            self._filled = end
        k, v = self._kv
        return k[:end], v[:end]

    def taken(self, prefix: int, gradients: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Adds up the prefix's gradients; returns the slice's own, plus what later slices left for it."""
        own = tuple(d[prefix:] for d in gradients)
        if self._gradients is not None:
            own = tuple(
                (d + left[prefix : self.upto]).to(d.dtype)
                for d, left in zip(own, self._gradients, strict=True)
            )
            for left, d in zip(self._gradients, gradients, strict=True):
                left[:prefix] += d[:prefix]
        elif prefix:
            self._gradients = tuple(
                d[:prefix].to(torch.promote_types(d.dtype, torch.float32), copy=True) for d in gradients
            )
        self.upto = prefix
        return own


def sliced_attention(
    q_LNH: Tensor, k_LNH: Tensor, v_LNH: Tensor, segments: Tensor, rows: Tensor, cache: Tensor, layer: Tensor,
    *, scale: float | None = None, window: int | None = None, implementation: str = "auto",
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`varlen_attention` of a micro-batch with slices of documents; returns output and log-sum-exp.

    Args:
        k_LNH, v_LNH: all keys and values of the micro-batch, in document order, padding last.
        segments: among the keys with each prefix before its document's own.
        cache: `KeyValueCache.number` of the step.
        layer: int64 () on the CPU, different in every layer of the process.
    """
    options = scale_of(q_LNH, scale), window, implementation, sm_margin
    return torch.ops.wlb_titan.sliced_attention.default(
        q_LNH, k_LNH, v_LNH, segments, rows, cache, layer, *options
    )


def attend(
    q: Tensor, k: Tensor, v: Tensor, segments: Tensor, rows: Tensor, cache: Tensor, layer: Tensor,
    *options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The op; `options` are those of the op `varlen_attention`."""
    keys, values = _caches[int(cache)].keys(int(layer), rows.tolist(), k, v)
    return torch.ops.wlb_titan.varlen_attention.default(q, keys, values, segments, *options)


def gradients(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    segments: Tensor, rows: Tensor, cache: Tensor, layer: Tensor, *options: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    kept, runs = _caches[int(cache)], rows.tolist()
    keys, values = kept.keys(int(layer), runs, k, v)
    backward = torch.ops.wlb_titan.varlen_attention_backward.default
    dq, dkeys, dvalues = backward(dout, dlse, q, keys, values, out, lse, segments, *options)
    return dq, *kept.own_gradients(int(layer), runs, dkeys, dvalues)


define_attention("sliced_attention", ("segments", "rows", "cache", "layer"), attend, gradients)
