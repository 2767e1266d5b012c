"""A trace of what a rank allocates and communicates, operation by operation.

A dispatch mode sees every operation below autograd and DTensor, so the recorded memory is that of local
tensors, and the recorded collectives are those that the process would start. Storages are counted once,
however many views they have, and until the last of them is gone. FSDP frees a storage without freeing the
tensor, by resizing it to nothing: such storages are looked at again before a new peak is believed.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from wlb_titan.runtime.compat import AsyncCollectiveTensor, FakeTensor, FakeTensorMode, in_backward_pass
from wlb_titan.runtime.lone.calls import CallLog

SNAPSHOT_STEP = 1.002
"""A peak this much above the last one is looked at again: taking it apart costs more than an operation."""

GATHERED, FORWARD, BACKWARD = "gathered", "activations", "backward"


@dataclass(slots=True)
class _Storage:
    size: int
    term: str
    what: str
    reference: Any = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A moment of a trace.

    Attributes:
        bytes_: bytes of all storages alive.
        terms: bytes by term: what the storages were given for, `activations` for those made in a forward
            pass, `backward` for those made in a backward pass, and `gathered` for FSDP's whole weights,
            their gradients and its buffers.
        largest: bytes, number and description of storages that are alike, the largest sums first.
    """

    bytes_: int = 0
    terms: dict[str, int] = field(default_factory=dict)
    largest: list[tuple[int, int, str]] = field(default_factory=list)


class MemoryTrace(TorchDispatchMode):
    """Records what is done while it is active.

    Args:
        fake: the mode of the rank's tensors. DTensor works out shapes on tensors of a mode of its own.
        weight_shapes: shapes of whole weights, as this rank has them between gathering and freeing them.
        calls: gets the collectives, sends and receives.

    Attributes:
        current: bytes alive.
        highest: the most bytes that were alive at any time.
        peak: what was alive then, or at a moment with 0.2 % less.
    """

    def __init__(
        self,
        fake: FakeTensorMode,
        weight_shapes: Iterable[tuple[int, ...]] = (),
        calls: CallLog | None = None,
    ) -> None:
        super().__init__()
        self.current = self.highest = 0
        self.peak = Snapshot()
        self._calls = calls
        self._fake = fake
        self._storages: dict[int, _Storage] = {}
        self._resizable: set[int] = set()
        self._weight_shapes = set(weight_shapes)

    def add(self, tensor: torch.Tensor, term: str, what: str = "") -> None:
        """Counts a tensor's storage, if it is not counted yet."""
        local = local_tensor(tensor)
        storage = local.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            self._resized(key, storage.nbytes())
            return
        entry = _Storage(storage.nbytes(), term, f"{what} {tuple(local.shape)} {local.dtype}")
        entry.reference = weakref.ref(storage, lambda _: self._freed(key))
        self._storages[key] = entry
        self.current += entry.size
        self._check()

    def reassign(self, tensors: Iterable[torch.Tensor], term: str) -> None:
        """Moves the storages of tensors to another term."""
        for tensor in tensors:
            if (entry := self._storages.get(local_tensor(tensor).untyped_storage()._cdata)) is not None:
                entry.term = term

    def begin(self) -> None:
        """Forgets the peak: a new phase."""
        self.highest, self.peak = self.current, self.now()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor goes on to operations on local tensors, which come back here
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._calls is not None and func.namespace in ("c10d", "_c10d_functional"):
            self._calls.note(func, args, kwargs, result)
        if func.namespace == "fsdp":  # writes into tensors that it is given
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, torch.Tensor):
                    self._add_resizable(tensor, str(func))
        term = BACKWARD if in_backward_pass() else FORWARD
        for tensor in tree_leaves(result):
            if not isinstance(tensor, torch.Tensor) or not self._is_of_the_rank(tensor):
                continue
            if self._is_of_weights(tensor):
                self._add_resizable(tensor, str(func))
            else:
                self.add(tensor, term, str(func))
        return result

    def _add_resizable(self, tensor: torch.Tensor, what: str) -> None:
        self.add(tensor, GATHERED, what)
        self._resizable.add(local_tensor(tensor).untyped_storage()._cdata)

    def _is_of_the_rank(self, tensor: torch.Tensor) -> bool:
        return not isinstance(tensor, FakeTensor) or tensor.fake_mode is self._fake

    def _is_of_weights(self, tensor: torch.Tensor) -> bool:
        """Whether it is one of FSDP's flat buffers, which have one dimension, or has a whole weight's shape,
        as its gradient does too."""
        shape = tuple(tensor.shape)
        is_buffer = len(shape) == 1 and tensor.is_floating_point() and tensor.numel() > 1 << 16
        return is_buffer or shape in self._weight_shapes or shape[::-1] in self._weight_shapes

    def _freed(self, key: int) -> None:
        entry = self._storages.pop(key, None)
        if entry is not None:
            self.current -= entry.size
        self._resizable.discard(key)

    def _resized(self, key: int, size: int) -> None:
        entry = self._storages[key]
        if entry.size != size:
            self.current += size - entry.size
            entry.size = size
            self._check()

    def _check(self) -> None:
        if self.current <= self.highest:
            return
        for key in tuple(self._resizable):
            entry = self._storages[key]
            storage = entry.reference()
            if storage is not None and (size := storage.nbytes()) < entry.size:
                self.current += size - entry.size
                entry.size = size
        if self.current > self.highest:
            self.highest = self.current
            if self.current > SNAPSHOT_STEP * self.peak.bytes_:
                self.peak = self.now()

    def now(self) -> Snapshot:
        """What is alive."""
        terms: Counter[str] = Counter()
        sizes: Counter[str] = Counter()
        numbers: Counter[str] = Counter()
        for entry in self._storages.values():
            terms[entry.term] += entry.size
            sizes[f"{entry.term}: {entry.what}"] += entry.size
            numbers[f"{entry.term}: {entry.what}"] += 1
        largest = [(size, numbers[what], what) for what, size in sizes.most_common(40)]
        return Snapshot(self.current, dict(terms), largest)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor, after any collective under way."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    return tensor.elem if isinstance(tensor, AsyncCollectiveTensor) else tensor
