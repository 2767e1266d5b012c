"""A process group whose other ranks are not there: it answers at once, with data made up.

What comes back has the shape, type and device that the real collective's would, and finite values: this
rank's own data in the place of another rank's, wherever it has such data, and where there is none, as in a
receive, normal noise. Zeros would not do: a GPU multiplies them faster than numbers. Number and bytes of what
was asked for are counted, by kind and group.

A collective's answer takes time that is not the collective's, a copy within the device. It is measured as
passes are, and taken out of them. What the collective itself would take is for the trainer to say (`wait`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from wlb_titan.runtime.compat import done_work
from wlb_titan.runtime.step_trace import PassTimer

BACKEND = "lone"
DEVICES = ["cpu", "cuda"]
ANSWER = "answer"
"""The kind that answers have among the passes of a timer."""


class Traffic:
    """What a rank's process groups were asked for.

    Attributes:
        calls, bytes_: by kind of collective and name of group; bytes of the larger of what goes in and what
            comes out.
        timer: measures the answers while it is on; to be set once there is one.
        wait: is told kind, name of group and bytes of each answer that is measured, before it ends.
    """

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        self.bytes_: Counter[tuple[str, str]] = Counter()
        self.timer: PassTimer | None = None
        self.wait: Callable[[str, str, int], None] = lambda kind, group, bytes_: None

    def clear(self) -> None:
        self.calls.clear()
        self.bytes_.clear()

    @property
    def collectives(self) -> dict[tuple[str, str], tuple[int, int]]:
        """Number and bytes by kind and group."""
        return {key: (number, self.bytes_[key]) for key, number in self.calls.items()}

    @contextmanager
    def asked(
        self, kind: str, group: str, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]
    ) -> Iterator[None]:
        """Counts a collective, and measures what answers it within, where it is on the passes' own stream."""
        bytes_ = max(_bytes(sent), _bytes(received))
        self.calls[kind, group] += 1
        self.bytes_[kind, group] += bytes_
        timed = self.timer is not None and self.timer.measures_this_stream()
        with torch.no_grad(), self.timer.time(ANSWER, 0, 0) if timed else nullcontext():
            yield
            if timed:
                self.wait(kind, group, bytes_)


class LoneGroup(dist.ProcessGroup):
    """The group of one rank, as torch.distributed knows groups; `traffic` counts what it is asked for."""

    def __init__(self, rank: int, size: int, traffic: Traffic) -> None:
        super().__init__(rank, size)
        self._rank, self._size, self._traffic = rank, size, traffic
        self._name = ""

    # What torch keeps with the backends that a group has elsewhere.

    @property
    def group_name(self) -> str:
        return self._name

    def getGroupName(self) -> str:  # as C++ calls it
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def name(self) -> str:
        return BACKEND

    def _get_backend(self, device: torch.device) -> Any:
        """torch asks it whether it merges sends and receives; it does not."""
        return self

    def _asked(self, kind: str, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> Any:
        return self._traffic.asked(kind, self.group_name, sent, received)

    # Every rank has what this one has.

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        with self._asked("all-reduce", tensors, tensors):
            return done_work()

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        return self.allreduce(tensors)

    def reduce(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        return self.allreduce(tensors)

    def barrier(self, opts: Any = None) -> dist.Work:
        return done_work()

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        with self._asked("all-gather", [input], [output]):
            own = input.clone() if _overlap(input, output) else input  # FSDP gathers in place
            output.view(self._size, -1).copy_(own.reshape(1, -1))
        return done_work()

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        for output, input in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, input)
        return done_work()

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        for each, input in zip(outputs, inputs, strict=True):
            with self._asked("all-gather", [input], each):
                for output in each:
                    repeat(input, output)
        return done_work()

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        with self._asked("reduce-scatter", [input], [output]):
            own = input.view(self._size, -1)[self._rank]
            output.view(-1).copy_(own.clone() if _overlap(input, output) else own)
        return done_work()

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        for output, input in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, input)
        return done_work()

    def reduce_scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None
    ) -> dist.Work:
        for output, each in zip(outputs, inputs, strict=True):
            with self._asked("reduce-scatter", each, [output]):
                output.copy_(each[self._rank])
        return done_work()

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        opts: Any = None,
    ) -> dist.Work:
        with self._asked("all-to-all", [input], [output]):
            repeat(input, output)
        return done_work()

    def alltoall(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        with self._asked("all-to-all", inputs, outputs):
            for output, input in zip(outputs, inputs, strict=True):
                repeat(input, output)
        return done_work()

    def gather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        if outputs:
            return self.allgather(outputs, inputs)
        with self._asked("gather", inputs, []):
            return done_work()

    # What only another rank has.

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        with self._asked("broadcast", tensors, tensors):
            if opts is not None and opts.rootRank != self._rank:
                make_up(tensors)
        return done_work()

    def scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None
    ) -> dist.Work:
        with self._asked("scatter", [], outputs):
            make_up(outputs)
        return done_work()

    def send(self, tensors: list[torch.Tensor], destination: int, tag: int) -> dist.Work:
        with self._asked("send", tensors, []):
            return done_work()

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> dist.Work:
        with self._asked("receive", [], tensors):
            make_up(tensors)
        return done_work()


def start_lone_group(rank: int, world_size: int) -> Traffic:
    """Makes this process one rank of a world that is not there; gives what its groups are asked for from now
    on."""
    traffic = Traffic()

    def make(store: Any, group_rank: int, group_size: int, timeout: Any) -> LoneGroup:
        return LoneGroup(group_rank, group_size, traffic)

    dist.Backend.register_backend(BACKEND, make, devices=DEVICES)
    dist.init_process_group(BACKEND, rank=rank, world_size=world_size, store=dist.HashStore())
    return traffic


def repeat(source: torch.Tensor, target: torch.Tensor) -> None:
    """Fills a tensor with another's values, from the first again where they end; of none, with zeros."""
    flat, own = target.view(-1), source.reshape(-1)
    if not own.numel():
        flat.zero_()
        return
    whole = flat.numel() // own.numel() * own.numel()
    flat[:whole].view(-1, own.numel()).copy_(own)
    flat[whole:].copy_(own[: flat.numel() - whole])


def make_up(tensors: Sequence[torch.Tensor]) -> None:
    """Fills tensors: of floating point with normal noise, others with zeros."""
    for tensor in tensors:
        if tensor.is_floating_point():
            tensor.normal_()
        else:
            tensor.zero_()


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors lie in one storage."""
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
