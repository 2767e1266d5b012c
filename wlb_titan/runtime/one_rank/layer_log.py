"""What operations do between marks, and how that grows with tokens: the log below `layer_trace.py`.

Compiled code fuses element-wise operators. It reads once a pass what products, attention, collectives and
gathers have made, and writes what these take, and what is there when the pass ends; what only passes from
one element-wise operator to the next is neither read nor written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.flop_counter import flop_registry

from wlb_titan.cost.told import KindWork, LayerWork, Work
from wlb_titan.layers.recompute import KINDS
from wlb_titan.runtime.compat import FakeTensorMode
from wlb_titan.runtime.one_rank.dry_trace import OperationLog, bytes_of, group_of, key_of, kind_of, tensors_in

NAMES = [kind.name for kind in KINDS]
aten = torch.ops.aten
FUSED = {aten._to_copy, aten.clone, aten.copy_, aten.cat, aten.stack, aten.sum, aten.mean, aten._softmax}
"""Operators that compiled code fuses, besides those that torch tags as pointwise."""

NOTHING = {aten._unsafe_view, aten.empty, aten.new_empty, aten.empty_strided}
"""Operators that neither read nor write, besides views."""


class Operation(NamedTuple):
    """What an operation does, in bytes but for `products`."""

    alive: int  # after it
    products: int  # FLOPs
    made: int  # its results
    elements: int
    fused: int
    sent: int
    group: str = ""  # name of the process group of a collective


class LayerLog(OperationLog):
    """Notes the operations between marks."""

    def __init__(self, fake: FakeTensorMode, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__(fake)
        self._unwritten: dict[int, int] = {}  # what element-wise operators made, by storage
        self._read: set[int] = set()  # by element-wise operators since the last mark
        self.operations: list[Operation] = []
        self.marks: list[tuple[str, int, int]] = []
        """Name, number of the next operation, bytes alive."""
        self.attention: dict[str, int] = {}
        """Number of attention's backward operation by the mark before it."""
        for tensor in tensors:
            self._storage(tensor)

    def mark(self, name: str, *_: Any) -> None:
        if self._unwritten and self.operations:
            last = self.operations[-1]
            self.operations[-1] = last._replace(fused=last.fused + sum(self._unwritten.values()))
        self._unwritten.clear()
        self._read.clear()
        self.marks.append((name, len(self.operations), self._alive))

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any, made: list[torch.Tensor]) -> None:
        for tensor in made:
            self._storage(tensor)
        read = tensors_in((args, kwargs))
        products = elements = sent = 0
        group = ""
        if func is aten._grouped_mm.default:  # of tokens by expert, or of weights' gradients
            products = 2 * args[0].numel() * args[1].shape[-1]
        elif func._overloadpacket in flop_registry:
            products = flop_registry[func._overloadpacket](*args, **kwargs, out_val=result)
        elif func.namespace in ("c10d", "_c10d_functional"):
            if kind_of(func._schema.name.partition("::")[2]):
                sent = max(bytes_of(read), bytes_of(made))
                group = group_of([*args, *kwargs.values()])
        elif func.namespace == "aten" and not func.is_view and func._overloadpacket not in NOTHING:
            elements = bytes_of(read) + bytes_of(made)
        fuses = elements and (torch.Tag.pointwise in func.tags or func._overloadpacket in FUSED)
        fused = self._fused(read, made) if fuses else self._written(read) + elements
        self.operations.append(Operation(self._alive, products, bytes_of(made), elements, fused, sent, group))
        if func is torch.ops.wlb_titan.varlen_attention_backward.default:
            self.attention[self.marks[-1][0]] = len(self.operations) - 1

    def _fused(self, read: list[Any], made: list[Any]) -> int:
        """Bytes that compiled code reads for an operator that it fuses."""
        keys = {key_of(tensor): bytes_of([tensor]) for tensor in read}
        new = {
            key: size for key, size in keys.items() if key not in self._unwritten and key not in self._read
        }
        self._read |= set(new)
        self._unwritten |= {key_of(tensor): bytes_of([tensor]) for tensor in made}
        return sum(new.values())

    def _written(self, read: list[Any]) -> int:
        """Bytes that compiled code writes because another operation reads them."""
        return sum(self._unwritten.pop(key_of(tensor), 0) for tensor in read)

    def _freed(self, key: int) -> None:
        super()._freed(key)
        self._unwritten.pop(key, None)
        self._read.discard(key)


class Slopes:
    """Two traces of the same operations: what each does more in the second, over the more tokens it has."""

    def __init__(self, less: LayerLog, more: LayerLog, number: float, size: int) -> None:
        """`size` has bytes of a gradient's element."""
        assert [mark[:2] for mark in less.marks] == [mark[:2] for mark in more.marks], "other operations"
        first, second = (
            np.array([operation[:-1] for operation in log.operations], dtype=np.float64)
            for log in (less, more)
        )
        self._each = dict(zip(Operation._fields, ((second - first) / number).T, strict=False))
        made = Operation._fields.index("made")
        self._constant = np.where(first == second, first, 0.0)[:, made]  # bytes that it makes of no token
        self._size = size
        self._groups = [operation.group for operation in less.operations]
        self._attention = less.attention
        names, begins, before = zip(*less.marks, strict=True)
        alive = [(mark[2] - start) / number for mark, start in zip(more.marks, before, strict=True)]
        self._parts = {
            name: (slice(begin, end), at_begin, at_end)
            for name, (begin, end), (at_begin, at_end) in zip(
                names, pairwise(begins), pairwise(alive), strict=False
            )
        }

    def of_layer(self, place: int, axes: Mapping[str, str], fullest: Slopes | None = None) -> LayerWork:
        """Of a layer that stands from `place` on, once for each kind.

        Args:
            axes: of process groups, by name.
            fullest: the slopes that say where passes are fullest; None: these.
        """
        passes = {name: (f"F{place + k}", f"B{place + k}") for k, name in enumerate(NAMES)}
        forward, backward = passes["none"]
        plain = self._work(backward, axes)
        input_ = 0.0 if fullest else self.left(passes["full"][0])  # all that `full` keeps

        def of_kind(forward: str, backward: str) -> KindWork:
            again = (more - less for more, less in zip(self._work(backward, axes), plain, strict=True))
            return KindWork(*self._bytes(forward, backward, input_, fullest or self), Work(*again))

        return LayerWork(
            forward=self._work(forward, axes),
            backward=plain,
            weight_products=self._weight_products(backward),
            kinds={name: of_kind(*both) for name, both in passes.items()},
        )

    def of_loss(self, normed: float) -> tuple[float, float]:
        """Bytes of the loss beside the last norm's output: at its fullest moment, and where the head's
        gradient is copied, which is the largest that follows from no token."""
        part, before, _ = self._parts["loss"]
        alive, constant = self._each["alive"][part] - before - normed, self._constant[part]
        return float(alive.max()), float(alive[constant == constant.max()].max())

    def left(self, forward: str) -> float:
        """Bytes of a part that are there when it is over."""
        _, begin, end = self._parts[forward]
        return end - begin

    def _bytes(self, forward: str, backward: str, arriving: float, by: Slopes) -> tuple[float, ...]:
        """All of `KindWork` but `repeated`; a backward pass begins with `arriving` bytes of its output's
        gradient."""
        of_forward, _, left = self._parts[forward]
        of_backward, there, _ = self._parts[backward]
        alive, before = self._each["alive"], there - arriving
        in_forward, in_backward = (by._fullest(part) for part in (of_forward, of_backward))
        made = self._constant[of_backward.start : in_backward + 1]
        gradients = made[self._each["products"][of_backward.start : in_backward + 1] > 0].sum() / self._size
        return (
            self.left(forward),
            alive[in_forward] - left,
            alive[in_backward] - before,
            alive[self._attention[backward]] - before,
            float(gradients),
        )

    def _fullest(self, part: slice) -> int:
        """The last operation of a part after which most is alive."""
        alive = self._each["alive"][part]
        return part.start + int(np.flatnonzero(alive >= alive.max() - 0.5)[-1])

    def _work(self, name: str, axes: Mapping[str, str]) -> Work:
        """Of a pass."""
        part, _, _ = self._parts[name]
        sent = Counter[str]()
        for group, bytes_ in zip(self._groups[part], self._each["sent"][part], strict=True):
            if bytes_:
                sent[axes[group]] += bytes_
        products, elements, fused = (
            float(self._each[field][part].sum()) for field in ("products", "elements", "fused")
        )
        return Work(products, elements, fused, float(sent["tp"]), float(sent["ep"]))

    def _weight_products(self, name: str) -> float:
        """FLOPs of a pass for the gradients of weights, which are as large whatever the tokens."""
        part, _, _ = self._parts[name]
        return float(self._each["products"][part][self._constant[part] > 0].sum())
