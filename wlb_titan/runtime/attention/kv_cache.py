"""Attention of slices: the keys and values of a document's earlier slices, and the gradients that they get.

A slice's queries see the document's tokens before it, whose keys and values its earlier slices left in the
cache. Its backward pass gives gradients to all of these keys; those of the prefix are added up in float32
until the backward passes of their own slices come, from the document's end to its begin, and take them along.
So what a layer receives is the same as for the whole document, in as many passes as there are slices.

One op reads and fills the cache, and its backward op empties it: outside of autograd, which sees queries,
keys and values of the slice only, and keeps nothing of the prefix. torch.compile and activation checkpointing
see an op that is a function of its inputs: the cache and the layer are tensors with a number each. Repeating
the forward pass of a slice, as checkpointing does, changes nothing.

Shape suffixes: L tokens, N heads, H head dim.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from wlb_titan.kernels.op import define, differentiate
from wlb_titan.kernels.options import SCHEMA, op_arguments

DOCUMENT, PREFIX, TOKENS, TOTAL = range(4)
"""Columns of `rows`, int64 (n, 4) on the CPU, of the documents of a micro-batch in their order: number of the
document within the step (-1 where all of it is here), tokens before those here, tokens here, tokens in
all."""

Layer = tuple[int, int]
"""A layer's number, and which of its calls this is: under context parallelism it may attend in groups of
heads."""

_numbers = itertools.count()
_caches: weakref.WeakValueDictionary[int, KeyValueCache] = weakref.WeakValueDictionary()


class KeyValueCache:
    """What the slices of one step leave to each other on one rank. Each step has a cache of its own.

    Attributes:
        number: int64 () on the CPU, by which ops find it.
    """

    def __init__(self) -> None:
        number = next(_numbers)
        self.number = torch.tensor(number, device="cpu")
        self._documents: dict[tuple[Layer, int], _Document] = {}  # by layer and document
        _caches[number] = self

    def tensors(self) -> Iterator[Tensor]:
        """What it holds: keys and values, and their gradients."""
        for document in self._documents.values():
            yield from document.tensors()

    def check_empty(self) -> None:
        """Raises RuntimeError if a document is left, whose backward passes did not all run."""
        if self._documents:
            (layer, _), document = next(iter(self._documents))
            raise RuntimeError(
                f"Keys of {len(self._documents)} documents and layers are left after the step, first of them "
                f"document {document} in layer {layer}: not all of its slices had their backward pass."
            )

    def keys(
        self, layer: Layer, rows: list[list[int]], k_LNH: Tensor, v_LNH: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of all documents of a micro-batch, each prefix before its tokens.

        Leaves the tokens of slices in the cache on the way, where they are not in it yet.
        """
        parts: tuple[list[Tensor], list[Tensor]] = ([], [])
        begin = 0
        for document, prefix, tokens, total in rows:
            end = begin + tokens
            own = k_LNH[begin:end], v_LNH[begin:end]
            kept = own if document < 0 else self._document(layer, document, total, own).through(prefix, own)
            for part, tensor in zip(parts, kept, strict=True):
                part.append(tensor)
            begin = end
        if begin < k_LNH.shape[0]:  # padding
            parts[0].append(k_LNH[begin:])
            parts[1].append(v_LNH[begin:])
        k, v = (part[0] if len(part) == 1 else torch.cat(part) for part in parts)
        return k, v

    def own_gradients(
        self, layer: Layer, rows: list[list[int]], dk_LNH: Tensor, dv_LNH: Tensor
    ) -> tuple[Tensor, Tensor]:
        """From gradients of what `keys` gave to those of the micro-batch's own tokens.

        Raises:
            RuntimeError: slices behind one of these have not had their backward pass.
        """
        parts: tuple[list[Tensor], list[Tensor]] = ([], [])
        begin = 0
        for document, prefix, tokens, _ in rows:
            end = begin + prefix + tokens
            own = dk_LNH[begin:end], dv_LNH[begin:end]
            if document >= 0:
                entry = self._documents.get((layer, document))
                if entry is None or entry.upto != prefix + tokens:
                    due = entry.upto if entry is not None else 0
                    raise RuntimeError(
                        f"The backward pass of tokens {prefix} to {prefix + tokens} of document {document} "
                        f"runs in layer {layer[0]} where that of the tokens before {due} is due: backward "
                        "passes of slices go from a document's end to its begin."
                    )
                own = entry.taken(prefix, own)
                if prefix == 0:
                    del self._documents[layer, document]
            for part, tensor in zip(parts, own, strict=True):
                part.append(tensor)
            begin = end
        if begin < dk_LNH.shape[0]:
            parts[0].append(dk_LNH[begin:])
            parts[1].append(dv_LNH[begin:])
        dk, dv = (torch.cat(part) for part in parts)
        return dk, dv

    def _document(self, layer: Layer, document: int, total: int, own: tuple[Tensor, Tensor]) -> _Document:
        if (layer, document) not in self._documents:
            self._documents[layer, document] = _Document(total, own)
        return self._documents[layer, document]


class _Document:
    """One document in one layer: room for all of its keys and values, and gradients once they come.

    Attributes:
        upto: tokens whose slices have not had their backward pass.
    """

    def __init__(self, total: int, like: tuple[Tensor, Tensor]) -> None:
        self.upto = total
        self._filled = 0
        self._kv = tuple(x.new_empty((total, *x.shape[1:])) for x in like)
        self._gradients: tuple[Tensor, ...] | None = None

    def tensors(self) -> tuple[Tensor, ...]:
        return *self._kv, *(self._gradients or ())

    def through(self, prefix: int, own: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values up to the end of a slice, whose own are these."""
        end = prefix + own[0].shape[0]
        if self._filled < end:
            assert self._filled == prefix, "forward passes of slices go from a document's begin to its end"
            for kept, x in zip(self._kv, own, strict=True):
                kept[prefix:end] = x
            self._filled = end
        k, v = self._kv
        return k[:end], v[:end]

    def taken(self, prefix: int, gradients: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Adds up the prefix' gradients; returns the slice's own with what later slices have left for it."""
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
        dk, dv = own
        return dk, dv


def sliced_attention(
    q_LNH: Tensor, k_LNH: Tensor, v_LNH: Tensor, segments: Tensor, rows: Tensor, cache: Tensor, layer: Tensor,
    *, call: int = 0, **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of a micro-batch with slices of documents; differentiable in q, k and v.

    Args:
        k_LNH, v_LNH: all keys and values of the micro-batch, in document order, padding last.
        segments: as of `varlen_attention`, among the keys with each prefix before its document's own.
        rows: int64 (n, 4) on the CPU, see above.
        cache: `KeyValueCache.number` of the step.
        layer: int64 () on the CPU, different in every layer of the process.
        call: which call of the layer in this pass.
        options: scale, window, ..., as of `varlen_attention`.

    Returns:
        Output and log-sum-exp, as `varlen_attention`.
    """
    out, lse = torch.ops.wlb_titan.sliced_attention.default(
        q_LNH, k_LNH, v_LNH, segments, rows, cache, layer, call, *op_arguments(q_LNH, **options)
    )
    return out, lse


def attend(
    q: Tensor, k: Tensor, v: Tensor, segments: Tensor, rows: Tensor, cache: Tensor, layer: Tensor, call: int,
    *options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What the op does; `options` are those of the op `varlen_attention`."""
    keys, values = _caches[int(cache)].keys((int(layer), call), rows.tolist(), k, v)
    out, lse = torch.ops.wlb_titan.varlen_attention.default(q, keys, values, segments, *options)
    return out, lse


def _attend_fake(q, k, v, *_):  # type: ignore[no-untyped-def]
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty((q.shape[0], q.shape[1], v.shape[2])), lse


def gradients(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    segments: Tensor, rows: Tensor, cache: Tensor, layer: Tensor, call: int, *options: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """What the op of the backward pass does; of q, k and v."""
    kept, runs, of_layer = _caches[int(cache)], rows.tolist(), (int(layer), call)
    keys, values = kept.keys(of_layer, runs, k, v)
    backward = torch.ops.wlb_titan.varlen_attention_backward.default
    dq, dkeys, dvalues = backward(dout, dlse, q, keys, values, out, lse, segments, *options)
    return dq, *kept.own_gradients(of_layer, runs, dkeys, dvalues)


def _gradients_fake(dout, dlse, q, k, v, *_):  # type: ignore[no-untyped-def]
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, segments, rows, cache, layer, *ctx.options = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, segments, rows, cache, layer)


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, *rest = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    backward = torch.ops.wlb_titan.sliced_attention_backward.default
    gradients = backward(dout, dlse, q, k, v, out, *rest, *ctx.options)
    return *gradients, *[None] * (4 + len(ctx.options))


_OF_SLICES = f"Tensor segments, Tensor rows, Tensor cache, Tensor layer, int call, {SCHEMA}"
define(
    "sliced_attention",
    f"Tensor q, Tensor k, Tensor v, {_OF_SLICES}",
    "(Tensor, Tensor)",
    attend,
    _attend_fake,
)
define(
    "sliced_attention_backward",
    f"Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_OF_SLICES}",
    "(Tensor, Tensor, Tensor)",
    gradients,
    _gradients_fake,
)
differentiate("sliced_attention", _differentiate, _save)
