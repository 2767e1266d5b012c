"""What a rank asks of its process groups in a dry run, call by call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from wlb_titan.runtime.compat import groups_made, place_in_batch, ranks_of_group
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
"""How the operations' names begin, without underscores, and what they are called here."""

PEERS = ("dst", "src", "root_rank")
"""What the operations call the rank of the group that they name."""

HERE = Path(__file__).parent


class CallLog:
    """The calls of a rank, as its operations are dispatched.

    Args:
        latest: what the latest pass that began was.

    Attributes:
        calls: in order, with the names of their groups.
    """

    def __init__(self, latest: Callable[[], object] = str) -> None:
        self.calls: list[tuple[str, Call]] = []
        self._latest = latest
        self._batches = 0

    def note(self, func: Any, args: Iterable[Any], kwargs: dict[str, Any], result: Any) -> None:
        """Keeps an operation that is a call; others, such as waiting, are left out."""
        name = func._schema.name.partition("::")[2].strip("_").replace("_", "")
        kind = next((kind for prefix, kind in KINDS.items() if name.startswith(prefix)), None)
        if kind is None:
            return
        given = {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)} | kwargs
        tensors = {name: _tensors(value) for name, value in given.items()}
        read = [t for name, found in tensors.items() if "output" not in name and name != "out" for t in found]
        written = [t for name, found in tensors.items() if name.startswith("out") for t in found]
        if func.namespace == "_c10d_functional":
            written = written or _tensors(result)
        if kind == RECEIVE:
            read, written = [], read
        elif not written and kind != SEND:
            written = read
        group = _group(given.values())
        peer = next((ranks_of_group(group)[given[key]] for key in PEERS if key in given), -1)
        dtype = str((read or written)[0].dtype).removeprefix("torch.") if read or written else ""
        place = place_in_batch() if kind in (SEND, RECEIVE) else None
        self._batches += place == 0
        where = f"{self._latest()}, {site()}"
        batch = 0 if place is None else self._batches
        self.calls.append((group, Call(kind, 0, _bytes(read), _bytes(written), dtype, peer, batch, where)))

    @property
    def collectives(self) -> dict[tuple[str, str], tuple[int, int]]:
        """Number and bytes by kind and group: of the larger of what goes in and what comes out."""
        found: dict[tuple[str, str], tuple[int, int]] = {}
        for group, call in self.calls:
            number, total = found.get((call.kind, group), (0, 0))
            found[call.kind, group] = number + 1, total + max(call.sent, call.received)
        return found


def of_rank(calls: Iterable[tuple[str, Call]]) -> RankCalls:
    """A rank's calls to groups of several ranks, which come with the groups' names, and these groups."""
    made, ranks = groups_made()
    several = {name: tuple(members) for name, members in ranks.items() if len(members) > 1}
    numbers = {name: number for number, name in enumerate(several)}
    numbered = [call._replace(group=numbers[group]) for group, call in calls if group in numbers]
    return RankCalls(made, list(several.values()), numbered)


def site() -> str:
    """The innermost line that is the job's and not torch's or a dry run's."""
    frames = _frames()
    frame = next((f for f in frames if not _foreign(Path(f.f_code.co_filename))), None)
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _frames() -> Iterator[Any]:
    frame = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _foreign(file: Path) -> bool:
    return "torch" in file.parts or HERE in file.parents or not file.suffix


def _group(values: Iterable[Any]) -> str:
    """The name of the process group among a call's arguments."""
    for value in reversed(list(values)):
        if isinstance(value, str):  # functional collectives name it, after the reduction
            return value
        if isinstance(value, torch.ScriptObject) and value._type().name() == "ProcessGroup":
            return dist.ProcessGroup.unbox(value).group_name
    return ""


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
