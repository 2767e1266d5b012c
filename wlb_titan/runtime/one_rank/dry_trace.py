"""What one rank allocates and communicates, operation by operation.

docs/dryrun.md says what counts ("The trace"). FSDP frees a storage by resizing it to nothing and keeps the
tensor, so these are looked at again before a new peak counts.
"""

from __future__ import annotations

import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves

from wlb_titan.runtime.compat import (
    AsyncCollectiveTensor,
    FakeTensor,
    FakeTensorMode,
    groups_made,
    in_backward_pass,
    place_in_batch,
    ranks_of_group,
)
from wlb_titan.simulator.calls import RECEIVE, SEND, Call, RankCalls

KINDS = {
    "allgather": "all-gather",
    "reducescatter": "reduce-scatter",
    "allreduce": "all-reduce",
    "alltoall": "all-to-all",
    "broadcast": "broadcast",
    "gather": "gather",
    "scatter": "scatter",
    "reduce": "reduce",
    "barrier": "barrier",
    "send": SEND,
    "isend": SEND,
    "recv": RECEIVE,
    "irecv": RECEIVE,
}
"""Kinds of calls by how torch's names of operations begin, without underscores."""

PEERS = ("dst", "src", "root_rank")
"""Arguments by which operations name a rank of the group."""

HERE = Path(__file__).parent
SNAPSHOT_STEP = 1.002
"""How far a new peak must be above the last one to be taken apart, which costs more than an operation."""

GATHERED, FORWARD, BACKWARD = "gathered", "activations", "backward"


class Snapshot(NamedTuple):
    """A moment of a trace.

    Terms are those given to `Trace`, and `activations` for storages made in a forward pass, `backward` in a
    backward pass, and `gathered` for FSDP's whole weights, their gradients and its buffers.
    """

    bytes_: int
    terms: dict[str, int]  # bytes by term
    largest: list[tuple[int, int, str]]  # bytes, number and description of storages alike, largest sums first


@dataclass(slots=True)
class _Storage:
    size: int
    reference: Any
    term: str = ""
    what: str = ""


class OperationLog(TorchDispatchMode):
    """Notes each operation on a rank's tensors while it is active, and what these keep alive. `fake` is their
    mode: DTensor works out shapes on tensors of its own."""

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self._fake = fake
        self._alive = 0  # bytes
        self._storages: dict[int, _Storage] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        parts = (kind for kind in types if not issubclass(kind, AsyncCollectiveTensor))
        if any(map(is_traceable_wrapper_subclass_type, parts)):
            return NotImplemented  # DTensor and torchao go on to operations on parts, which come back here
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        made = tensors_in(result)
        if all(not isinstance(t, FakeTensor) or t.fake_mode is self._fake for t in made):
            self._note(func, args, kwargs, result, made)
        return result

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any, made: list[torch.Tensor]) -> None:
        raise NotImplementedError

    def _storage(self, tensor: torch.Tensor) -> _Storage:
        """The record of a tensor's storage, which may be new."""
        storage, key = local_tensor(tensor).untyped_storage(), key_of(tensor)
        if key not in self._storages:
            reference = weakref.ref(storage, lambda _: self._freed(key))
            self._storages[key] = _Storage(storage.nbytes(), reference)
            self._alive += storage.nbytes()
        return self._storages[key]

    def _freed(self, key: int) -> None:
        if (entry := self._storages.pop(key, None)) is not None:
            self._alive -= entry.size


class Trace(OperationLog):
    """Records what is done while it is active.

    Args:
        weight_shapes: as this rank has weights between gathering and freeing them.

    Attributes:
        highest: the most bytes alive at any time since the latest `begin`.
        peak: what was alive then, or at a moment with 0.2 % less.
    """

    def __init__(
        self,
        fake: FakeTensorMode,
        weight_shapes: Iterable[tuple[int, ...]] = (),
        calls: CallLog | None = None,
    ) -> None:
        super().__init__(fake)
        self._calls = calls
        self._weight_shapes = set(weight_shapes)
        self._resizable: set[int] = set()
        self.begin()

    def begin(self) -> None:
        """Starts a new peak."""
        self.highest, self.peak = self._alive, self.now()

    def add(self, tensor: torch.Tensor, term: str, what: str = "") -> None:
        """Counts a tensor's storage, unless it is counted already."""
        entry, local = self._storage(tensor), local_tensor(tensor)
        if entry.term:
            self._resize(entry)
        else:
            entry.term, entry.what = term, f"{what} {tuple(local.shape)} {local.dtype}"
        self._check()

    def reassign(self, tree: Any, term: str) -> None:
        """Moves the storages of the tensors in lists and dicts to another term."""
        for tensor in tensors_in(tree):
            if (entry := self._storages.get(key_of(tensor))) is not None:
                entry.term = term

    def now(self) -> Snapshot:
        terms, sizes, numbers = Counter[str](), Counter[str](), Counter[str]()
        for entry in self._storages.values():
            what = f"{entry.term}: {entry.what}"
            terms[entry.term] += entry.size
            sizes[what] += entry.size
            numbers[what] += 1
        largest = [(size, numbers[what], what) for what, size in sizes.most_common(40)]
        return Snapshot(self._alive, dict(terms), largest)

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any, made: list[torch.Tensor]) -> None:
        if self._calls is not None and func.namespace in ("c10d", "_c10d_functional"):
            self._calls.note(func, args, kwargs, result)
        if func.namespace == "fsdp":  # writes into tensors that it is given
            for tensor in tensors_in((args, kwargs)):
                self._add_resizable(tensor, str(func))
        term = BACKWARD if in_backward_pass() else FORWARD
        for tensor in made:
            if self._is_of_weights(tensor):
                self._add_resizable(tensor, str(func))
            else:
                self.add(tensor, term, str(func))

    def _add_resizable(self, tensor: torch.Tensor, what: str) -> None:
        self.add(tensor, GATHERED, what)
        self._resizable.add(key_of(tensor))

    def _is_of_weights(self, tensor: torch.Tensor) -> bool:
        """Whether it is a flat buffer of FSDP's, or has the shape of a whole weight and its gradient."""
        shape = tuple(tensor.shape)
        is_buffer = len(shape) == 1 and tensor.is_floating_point() and tensor.numel() > 1 << 16
        return is_buffer or shape in self._weight_shapes or shape[::-1] in self._weight_shapes

    def _freed(self, key: int) -> None:
        super()._freed(key)
        self._resizable.discard(key)

    def _resize(self, entry: _Storage) -> None:
        if (storage := entry.reference()) is not None:
            self._alive += storage.nbytes() - entry.size
            entry.size = storage.nbytes()

    def _check(self) -> None:
        if self._alive <= self.highest:
            return
        for key in tuple(self._resizable):
            self._resize(self._storages[key])
        if self._alive > self.highest:
            self.highest = self._alive
            if self._alive > SNAPSHOT_STEP * self.peak.bytes_:
                self.peak = self.now()


class CallLog:
    """The calls that a rank makes, with the names of their groups; `latest` says which pass began last."""

    def __init__(self, latest: Callable[[], object] = str) -> None:
        self.calls: list[tuple[str, Call]] = []
        self._latest = latest
        self._batches = 0

    def add(
        self,
        kind: str,
        group: str,
        sent: Sequence[torch.Tensor],
        received: Sequence[torch.Tensor],
        root: int = -1,
    ) -> None:
        """Keeps a call; `root` is the rank that it names, within the group."""
        place = place_in_batch() if kind in (SEND, RECEIVE) else None
        self._batches += place == 0
        tensors = [*sent, *received]
        dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
        peer = -1 if root < 0 else ranks_of_group(group)[root]
        batch = 0 if place is None else self._batches
        where = f"{self._latest()}, {_site()}"
        self.calls.append(
            (group, Call(kind, 0, bytes_of(sent), bytes_of(received), dtype, peer, batch, where))
        )

    def note(self, func: Any, args: Iterable[Any], kwargs: dict[str, Any], result: Any) -> None:
        """Keeps a dispatched operation if it is a call; waiting is none."""
        kind = kind_of(func._schema.name.partition("::")[2])
        if kind is None:
            return
        given = {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)} | kwargs
        read, written = [], []
        for name, value in given.items():
            if name.startswith("out"):
                written += tensors_in(value)
            else:
                read += tensors_in(value)
        if func.namespace == "_c10d_functional":
            written = written or tensors_in(result)
        if kind == RECEIVE:
            read, written = [], read
        elif kind != SEND:
            written = written or read
        root = next((given[key] for key in PEERS if key in given), -1)
        self.add(kind, group_of(given.values()), read, written, root)

    def of_rank(self) -> RankCalls:
        """The calls to groups of several ranks, and these groups."""
        made, ranks = groups_made()
        several = {name: tuple(members) for name, members in ranks.items() if len(members) > 1}
        numbers = {name: number for number, name in enumerate(several)}
        numbered = [call._replace(group=numbers[group]) for group, call in self.calls if group in numbers]
        return RankCalls(made, list(several.values()), numbered)


def kind_of(operation: str) -> str | None:
    """The kind of a process group's operation; None if it is no call."""
    name = operation.replace("_", "").lower()
    return next((kind for begin, kind in KINDS.items() if name.startswith(begin)), None)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, after any collective under way."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    return tensor.elem if isinstance(tensor, AsyncCollectiveTensor) else tensor


def key_of(tensor: torch.Tensor) -> int:
    """Of its storage."""
    return local_tensor(tensor).untyped_storage()._cdata


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def group_of(values: Iterable[Any]) -> str:
    for value in reversed(list(values)):
        if isinstance(value, str):  # functional collectives name it, after the reduction
            return value
        if isinstance(value, torch.ScriptObject) and value._type().name() == "ProcessGroup":
            return dist.ProcessGroup.unbox(value).group_name
    return ""


def _site() -> str:
    """The innermost line outside torch and this package."""
    for frame, line in traceback.walk_stack(None):
        file = Path(frame.f_code.co_filename)
        if file.suffix and "torch" not in file.parts and HERE not in file.parents:
            return f"{file.name}:{line}"
    return ""
