"""What the Gluon emulator runs on: threads that know what they have seen of each other, buffers that know who
reads and writes them, barriers, descriptors and pointers. See gluon_emulator.py.
"""

import random
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor

here = threading.local()  # this thread's: machine, name, clock, products, additions, unfenced, program


class Machine:
    """One launch: what it found, and whether it has failed, so that all its threads stop."""

    def __init__(self, deadlock_s: float, ordered: bool, seed: int):
        self.deadlock_s, self.ordered = deadlock_s, ordered
        self.races: set[str] = set()
        self.errors: list[BaseException] = []
        self.threads: list[threading.Thread] = []
        self.lock, self.random = threading.RLock(), random.Random(seed)
        self.atomic_clocks: dict[int, dict] = {}  # of what was released by an address

    def wait_for(self, done: Callable[[], bool], condition: threading.Condition, what: str) -> None:
        """Wait with `condition` held; TimeoutError in a deadlock or when another thread has failed."""
        end = time.monotonic() + self.deadlock_s
        while not done():
            if self.errors or time.monotonic() > end:
                raise TimeoutError(f"{what} never comes")
            condition.wait(0.02)

    def delay(self) -> float:
        return self.random.random() * 5e-4 if self.random.random() < 0.3 else 0.0

    def start(self, work: Callable, *arguments, name: str = "") -> threading.Thread:
        """Run on a new thread, which knows what this one has seen."""
        clock, program = dict(here.clock), here.program

        def run() -> None:
            enter(self, name or threading.current_thread().name, clock, program)
            try:
                work(*arguments)
            except BaseException as error:  # of a thread: handed to whoever launched
                self.errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        with self.lock:
            self.threads.append(thread)
        thread.start()
        return thread


def enter(machine: Machine, name: str, clock: dict, program: tuple[int, int]) -> None:
    here.machine, here.name, here.clock, here.program = machine, name, clock, program
    here.products, here.additions, here.unfenced = [], [], []
    tick()


def tick() -> int:
    here.clock[here.name] = here.clock.get(here.name, 0) + 1
    return here.clock[here.name]


def merge(clock: dict, other: dict) -> None:
    for name, time_ in other.items():
        clock[name] = max(clock.get(name, 0), time_)


class Access:
    """A read or write of a buffer; `ends` is its thread's time at its end, None before that."""

    def __init__(self, ends: int | None = None, name: str | None = None, generic: bool = False):
        self.name, self.ends, self.fenced = name or here.name, ends, not generic

    def ordered(self) -> bool:
        """Whether it has ended before what this thread does now."""
        return self.ends is not None and here.clock.get(self.name, 0) >= self.ends


class History:
    """Last write of a buffer and the reads since."""

    def __init__(self) -> None:
        self.write: Access | None = None
        self.reads: list[Access] = []

    def read(self, asynchronous: bool) -> Access:
        with here.machine.lock:
            if self.write and not self.write.ordered():
                here.machine.races.add("a buffer is read without waiting for what is written to it")
            if self.write and asynchronous and not self.write.fenced:
                here.machine.races.add("what threads stored is read asynchronously without a fence")
            access = Access()
            self.reads.append(access)
            return access

    def overwrite(self, access: Access) -> None:
        with here.machine.lock:
            if not all(x.ordered() for x in self.reads):
                here.machine.races.add("a buffer is written while it is read")
            if self.write and not self.write.ordered():
                here.machine.races.add("a buffer is written twice at once")
            self.write, self.reads = access, []


class Shared:
    """A buffer of shared memory, or a view of one."""

    def __init__(self, data: Tensor, histories: dict, key: int | None = None):
        self.data, self.histories, self.key = data, histories, key

    dtype = property(lambda self: self.data.dtype)
    shape = property(lambda self: tuple(self.data.shape))

    @property
    def history(self) -> History:
        with here.machine.lock:
            return self.histories.setdefault(self.key, History())

    def index(self, i) -> "Shared":
        return Shared(self.data[int(i)], self.histories, int(i))

    def permute(self, order) -> "Shared":
        return Shared(self.data.permute(order), self.histories, self.key)

    def reshape(self, shape) -> "Shared":
        return Shared(self.data.reshape(shape), self.histories, self.key)

    def slice(self, start, length, dim) -> "Shared":
        return Shared(self.data.narrow(dim, start, length), self.histories, self.key)

    def load(self, layout=None) -> Tensor:
        access = self.history.read(asynchronous=False)
        data = self.data.clone()
        access.ends = tick()
        return data

    def store(self, values: Tensor) -> None:
        access = Access(ends=tick(), generic=True)
        self.history.overwrite(access)
        here.unfenced.append(access)
        self.data.copy_(values)


class Barrier:
    """An mbarrier: a phase completes when all arrivals and all bytes expected have come."""

    def __init__(self) -> None:
        self.condition, self.phase, self.missing_bytes = threading.Condition(), 0, 0
        self.count = self.missing = -1
        self.clock, self.completed_clock = {}, {}

    def step(self, arrivals: int, nbytes: int, clock: dict) -> None:
        with self.condition:
            merge(self.clock, clock)
            self.missing -= arrivals
            self.missing_bytes -= nbytes
            if self.missing < 0:
                raise RuntimeError("more arrivals than the barrier counts")
            if self.missing == 0 and self.missing_bytes == 0:
                self.phase ^= 1
                self.missing, self.completed_clock = self.count, dict(self.clock)
                self.condition.notify_all()


class Barriers:
    """The allocation that kernels index for their barriers."""

    def __init__(self, count: int):
        self.bars = [Barrier() for _ in range(count)]

    def index(self, i) -> Barrier:
        return self.bars[int(i)]


class Descriptor:
    """A host descriptor: boxes of a two-dimensional view, zeros outside it."""

    def __init__(self, host):
        self.view = torch.as_strided(host.base, list(host.shape), list(host.strides))
        self.block, self.dtype, self.layout = list(host.block_shape), host.base.dtype, None
        self.block_type = SimpleNamespace(nbytes=self.block[0] * self.block[1] * host.base.element_size())
        self.additions: dict[tuple, Access] = {}  # the last to each row of a box

    def inside(self, corner) -> tuple[slice, ...]:
        return tuple(
            slice(c, min(c + b, n)) for c, b, n in zip(corner, self.block, self.view.shape, strict=True)
        )

    def load(self, corner) -> Tensor:
        box = torch.zeros(self.block, dtype=self.dtype)
        found = self.view[self.inside(corner)]
        box[: found.shape[0], : found.shape[1]] = found
        return box

    def add(self, corner, box: Tensor) -> None:
        with here.machine.lock:
            found = self.view[self.inside(corner)]
            found += box[: found.shape[0], : found.shape[1]]


class Pointer:
    """An address in a contiguous tensor."""

    def __init__(self, flat: Tensor, at=0):
        self.flat, self.at = flat, at
        self.dtype = SimpleNamespace(element_ty=flat.dtype)

    def __add__(self, offset) -> "Pointer":
        return Pointer(self.flat, self.at + offset)
