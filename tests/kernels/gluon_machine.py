"""What gluon_emulator.py runs on: a scheduler, clocks that say what threads have seen of each other, buffers
that know who reads and writes them, barriers, descriptors and pointers."""

import math
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from torch import Tensor

here = threading.local()  # what belongs to a thread: see `enter`

# Who goes on next, of those that can: the one with the largest key. A task is a partition of a program, or a
# copy, which is what the copy engine does on its own time. Each of these is adverse to other mistakes.
ORDERS: dict[str, Callable] = {
    "any": lambda task, random: random,
    "copies late": lambda task, random: (not task.copy, random),
    "last program first": lambda task, random: (task.program[0], not task.copy, random),
    "one as long as it can": lambda task, random: (task.last, random),
}


class Task:
    """Something that goes on when `ready()`: a thread of its own, or a copy, which is `work` alone."""

    def __init__(self, name: str, program: tuple[int, int], clock: dict, work: Callable | None = None):
        self.name, self.program, self.clock = name, program, clock
        self.copy, self.work = work is not None, work
        self.ready: Callable[[], bool] = lambda: True
        self.waits_for, self.go, self.last, self.own_work = "", threading.Semaphore(0), 0, 0


class Machine:
    """One launch: its threads, of which one runs at a time, and what it found.

    Who runs is decided by `order` and a seed alone, whenever a thread does something that others see: so a
    launch goes the same way each time, on a busy machine too. When nobody can go on, that is known at once.
    """

    def __init__(self, ordered: bool, order: str):
        self.ordered, self.order, self.random = ordered, ORDERS[order], random.Random(0)
        self.races: set[str] = set()
        self.error: BaseException | None = None
        self.tasks: list[Task] = []
        self.atomic_clocks: dict[int, dict] = {}  # of what was released by an address
        self.switches = 0

    def start(self, work: Callable, *arguments, name: str, clock: dict, program: tuple[int, int]) -> Task:
        """A task for `work` on a thread of its own, which has seen `clock`."""
        task = Task(name, program, clock)

        def run() -> None:
            task.go.acquire()
            enter(self, task)
            try:
                if not self.error:
                    work(*arguments)
            except BaseException as error:  # of a thread: handed to whoever launched
                self.error = self.error or error
            self.tasks.remove(task)
            self.next().go.release()

        self.tasks.append(task)
        threading.Thread(target=run, daemon=True).start()
        return task

    def copy(self, work: Callable[[], None]) -> None:
        """Do this at some time."""
        self.tasks.append(Task("copy", here.program, {}, work))

    def pause(self, ready: Callable[[], bool] = lambda: True, waits_for: str = "") -> None:
        """Let others go on; return when `ready()`. TimeoutError if it never will be."""
        task = here.task
        task.ready, task.waits_for = ready, waits_for
        self.switches += 1
        task.last = self.switches
        chosen = self.next()
        if chosen is not task:
            chosen.go.release()
            task.go.acquire()
        if self.error:
            raise TimeoutError("another thread has failed") from self.error

    @contextmanager
    def until_all_have_ended(self) -> Iterator[None]:
        """Within, this thread is the one that launches; the first error of any ends all, and is raised."""
        me = here.task
        self.tasks.append(me)
        try:
            yield
        except BaseException as error:
            self.error = self.error or error
        while others := [task for task in self.tasks if task is not me and not task.copy]:
            others[0].go.release()
            me.go.acquire()
        if self.error:
            raise self.error

    def next(self) -> Task:
        """The thread that goes on; copies that come before it are done."""
        while True:
            able = self.tasks if self.error else [task for task in self.tasks if task.ready()]
            if not able:
                waits = sorted({f"{task.name} waits for {task.waits_for}" for task in self.tasks})
                self.error = TimeoutError(f"nobody can go on: {'; '.join(waits)}")
                continue
            chosen = max(able, key=lambda task: self.order(task, self.random.random()))
            if not chosen.copy:
                return chosen
            self.tasks.remove(chosen)
            if not self.error:
                chosen.work()


def enter(machine: Machine, task: Task) -> None:
    here.machine, here.task, here.clock, here.program = machine, task, task.clock, task.program
    here.products, here.additions, here.unfenced, here.polled, here.acquired = [], [], [], None, False
    tick()


def tick() -> int:
    here.clock[here.task.name] = here.clock.get(here.task.name, 0) + 1
    return here.clock[here.task.name]


def merge(clock: dict, other: dict) -> None:
    for name, time_ in other.items():
        clock[name] = max(clock.get(name, 0), time_)


class Access:
    """A read or write of a buffer; `ends` is its thread's time at its end, None before that."""

    def __init__(self, ends: int | None = None, name: str | None = None, generic: bool = False):
        self.name, self.ends, self.fenced = name or here.task.name, ends, not generic

    def ordered(self) -> bool:
        """Whether it has ended before what this thread does now."""
        return self.ends is not None and here.clock.get(self.name, 0) >= self.ends


class History:
    """Last write of a buffer and the reads since."""

    def __init__(self) -> None:
        self.write: Access | None = None
        self.reads: list[Access] = []

    def read(self, asynchronous: bool) -> Access:
        if self.write and not self.write.ordered():
            here.machine.races.add("a buffer is read without waiting for what is written to it")
        if self.write and asynchronous and not self.write.fenced:
            here.machine.races.add("what threads stored is read asynchronously without a fence")
        access = Access()
        self.reads.append(access)
        return access

    def overwrite(self, access: Access) -> None:
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
        self.phase, self.missing_bytes = 0, 0
        self.count = self.missing = -1
        self.clock, self.completed_clock = {}, {}

    def step(self, arrivals: int, nbytes: int, clock: dict) -> None:
        merge(self.clock, clock)
        self.missing -= arrivals
        self.missing_bytes -= nbytes
        if self.missing < 0:
            raise RuntimeError("more arrivals than the barrier counts")
        if self.missing == 0 and self.missing_bytes == 0:
            self.phase ^= 1
            self.missing, self.completed_clock = self.count, dict(self.clock)


class Barriers:
    """The allocation that kernels index for their barriers."""

    def __init__(self, count: int):
        self.bars = [Barrier() for _ in range(count)]

    def index(self, i) -> Barrier:
        return self.bars[int(i)]


class Descriptor:
    """A host descriptor: boxes of a view, zeros outside it."""

    def __init__(self, host):
        self.view = torch.as_strided(host.base, list(host.shape), list(host.strides))
        self.block, self.dtype, self.layout = list(host.block_shape), host.base.dtype, None
        self.block_type = SimpleNamespace(nbytes=math.prod(self.block) * host.base.element_size())
        self.additions: dict[tuple, list[tuple[Access, Tensor]]] = {}  # to each box, and where they are not 0

    def inside(self, corner) -> tuple[slice, ...]:
        sizes = zip(corner, self.block, self.view.shape, strict=True)
        return tuple(slice(c, min(c + b, n)) for c, b, n in sizes)

    def load(self, corner) -> Tensor:
        box = torch.zeros(self.block, dtype=self.dtype)
        found = self.view[self.inside(corner)]
        box[tuple(map(slice, found.shape))] = found
        return box

    def add(self, corner, box: Tensor, to_what_is_there: bool) -> None:
        found = self.view[self.inside(corner)]
        box = box[tuple(map(slice, found.shape))]
        found.copy_(found + box if to_what_is_there else box)


class Pointer:
    """An address in a contiguous tensor."""

    def __init__(self, flat: Tensor, at=0):
        self.flat, self.at = flat, at
        self.dtype = SimpleNamespace(element_ty=flat.dtype)

    def __add__(self, offset) -> "Pointer":
        return Pointer(self.flat, self.at + offset)
