"""Runs the Gluon kernels' own source on the CPU, and looks for races in it.

The source is executed with stand-ins for Triton's modules: tensors are torch tensors, a partition is a Python
thread, some programs run at once. One thread runs at a time; who is next is decided by an order and a seed
(gluon_machine.ORDERS), so that a run repeats. What a GPU does on its own time takes turns too: a TMA
load fills its buffer with NaN at once, with data later, and only then completes its barrier; a TMA addition
reads shared memory later and adds to global memory later still; a matrix product reads at its wait.

Whether two accesses to a buffer of shared memory, or two additions to one place of global memory, are ordered
is decided by vector clocks, which threads hand on through mbarriers and atomics: so an access that nothing
orders is found even if it came at the right time. A store by threads that the copy engine or a matrix product
reads needs a fence by the thread that stored. The clocks also count matrix products and additions of the
longest chain before a thread's state: less its program's own, that is for how many it has waited.
"""

import itertools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import indent
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from gluon_machine import (
    Access,
    Barrier,
    Barriers,
    Descriptor,
    Machine,
    Pointer,
    Shared,
    Task,
    enter,
    here,
    merge,
    tick,
)
from torch import Tensor

KERNELS = Path(__file__).parents[2] / "kernels"
WORK = "work"  # of a clock: products and additions that came before, one after the other
copies = itertools.count()


class Product:
    """A matrix product that has been issued; not a tensor, so using it before its wait is an error."""

    def __init__(self, a, b, acc, use_acc: bool):
        self.operands, self.acc, self.use_acc, self.value = (a, b), acc, use_acc, None
        self.reads = [x.history.read(asynchronous=True) for x in (a, b) if isinstance(x, Shared)]

    def finish(self) -> None:
        a, b = (x.data.clone() if isinstance(x, Shared) else x for x in self.operands)
        for access in self.reads:
            access.ends = here.clock[here.task.name]
        acc = self.acc.value if isinstance(self.acc, Product) else self.acc
        product = a.float() @ b.float()
        self.value = product + acc if self.use_acc else product
        tick()


def count_work() -> None:
    here.clock[WORK] = here.clock.get(WORK, 0) + 1
    here.task.own_work += 1


def warpgroup_mma(a, b, acc, *, use_acc=True, is_async=False):
    assert is_async and b.dtype in (torch.bfloat16, torch.float16) and a.dtype == b.dtype
    acc = acc.value if isinstance(acc, Product) and acc.value is not None else acc
    product = Product(a, b, acc, use_acc)
    here.products.append(product)
    count_work()
    here.machine.pause()
    return product


def warpgroup_mma_wait(pendings: int, deps):
    """Until all but the last `pendings` products have ended."""
    while len(here.products) > pendings:
        here.products.pop(0).finish()
    values = [x.value if isinstance(x, Product) and x.value is not None else x for x in deps]
    return values[0] if len(values) == 1 else values


def tma_load(descriptor: Descriptor, corner, bar: Barrier, target: Shared) -> None:
    assert list(target.shape) == descriptor.block, f"box {descriptor.block} into buffer {target.shape}"
    data, name = descriptor.load([int(c) for c in corner]), f"load {next(copies)}"
    target.history.overwrite(Access(ends=1, name=name))
    target.data.fill_(float("nan") if target.dtype.is_floating_point else -1)
    clock = {**here.clock, name: 1}

    def land() -> None:
        target.data.copy_(data)
        bar.step(0, descriptor.block_type.nbytes, clock)

    here.machine.copy(land)
    here.machine.pause()


class Addition:
    """One TMA addition, or store: reads its buffer at some time, and adds at a later one."""

    def __init__(self, descriptor: Descriptor, corner, source: Shared, adds: bool):
        self.descriptor, self.place, self.source = descriptor, tuple(map(int, corner)), source
        self.adds = adds
        self.read, self.added = source.history.read(asynchronous=True), Access()
        self.box: Tensor | None = None
        self.is_added, self.machine = False, here.machine
        if here.acquired:
            self.machine.races.add("a turn that has come is followed by an addition without a fence")
        places = (source.data != 0) | (not adds)  # adding zeros disturbs nobody
        earlier = descriptor.additions.setdefault(self.place, [])
        if self.machine.ordered and any((at & places).any() for x, at in earlier if not x.ordered()):
            self.machine.races.add("nothing orders two additions to one place")
        earlier.append((self.added, places))
        self.machine.copy(self.take)

    def take(self) -> None:
        self.box = self.source.data.clone()
        self.machine.copy(self.add)

    def add(self) -> None:
        self.descriptor.add(self.place, self.box, self.adds)
        self.is_added = True


def tma_add(descriptor: Descriptor, corner, source: Shared, adds: bool = True) -> None:
    count_work()
    here.additions.append(Addition(descriptor, corner, source, adds))
    here.machine.pause()


def tma_store(descriptor: Descriptor, corner, source: Shared) -> None:
    tma_add(descriptor, corner, source, adds=False)


def wait_for_additions(to_be_added: bool) -> None:
    mine = here.additions
    ready = lambda: all(x.is_added if to_be_added else x.box is not None for x in mine)  # noqa: E731
    here.machine.pause(ready, "its additions")
    for addition in mine:
        addition.read.ends = addition.read.ends or here.clock[here.task.name]
        addition.added.ends = here.clock[here.task.name] if to_be_added else None
    tick()
    if to_be_added:
        here.additions = []


def inline_assembly(text, constraints, args, dtype, is_pure, pack):
    if "cp.async.bulk.wait_group 0" in text:
        wait_for_additions(to_be_added=True)
    elif "fence.proxy.async.global" in text:
        here.acquired = False
    else:
        assert text == "mov.u32 $0, $1;"
    return args[0]


def fence_async_shared() -> None:
    for access in here.unfenced:
        access.fenced = True
    here.unfenced = []


class MBarrier:
    """The functions of hopper.mbarrier."""

    MBarrierLayout = staticmethod(lambda: "mbarrier")

    @staticmethod
    def init(bar: Barrier, count: int) -> None:
        bar.count = bar.missing = count

    @staticmethod
    def wait(bar: Barrier, phase) -> None:
        here.machine.pause(lambda: bar.phase != int(phase) & 1, "a phase of a barrier")
        merge(here.clock, bar.completed_clock)

    @staticmethod
    def arrive(bar: Barrier, count: int) -> None:
        here.machine.pause()
        bar.step(count, 0, here.clock)
        tick()

    @staticmethod
    def expect(bar: Barrier, nbytes) -> None:
        bar.missing_bytes += int(nbytes)
        bar.step(1, 0, here.clock)
        tick()


def tensor(x) -> Tensor:
    return x if isinstance(x, Tensor) else torch.tensor(x)


class Language:
    """The functions of gluon.language that the kernels use."""

    float32, int32, int64 = torch.float32, torch.int32, torch.int64
    constexpr = staticmethod(lambda x=None: x)
    NVMMADistributedLayout = SliceLayout = DotOperandLayout = staticmethod(lambda *_, **__: None)
    NVMMASharedLayout = SwizzledSharedLayout = BlockedLayout = staticmethod(lambda *_, **__: None)
    static_range = range
    arange = staticmethod(lambda begin, end, layout: torch.arange(begin, end))
    full = staticmethod(lambda shape, value, dtype, layout: torch.full(shape, float(value), dtype=dtype))
    where = staticmethod(lambda c, a, b: torch.where(tensor(c), tensor(a), tensor(b)))
    maximum = staticmethod(lambda a, b: torch.maximum(tensor(a), tensor(b)))
    minimum = staticmethod(lambda a, b: torch.minimum(tensor(a), tensor(b)))
    max = staticmethod(lambda x, dim: x.amax(dim))
    sum = staticmethod(lambda x, dim: x.sum(dim))
    exp2, log2 = staticmethod(torch.exp2), staticmethod(torch.log2)
    convert_layout = staticmethod(lambda x, layout: x)
    split = staticmethod(lambda x: x.unbind(-1))
    inline_asm_elementwise = staticmethod(inline_assembly)

    @staticmethod
    def load(pointer: Pointer, mask=None, other=0) -> Tensor:
        at = tensor(pointer.at)
        if mask is None:
            return pointer.flat[at]
        return torch.where(mask, pointer.flat[torch.where(mask, at, 0)], torch.tensor(other))

    @staticmethod
    def store(pointer: Pointer, values: Tensor, mask: Tensor) -> None:
        at, mask = (x.expand(values.shape) for x in (pointer.at, mask))
        pointer.flat[at[mask]] = values[mask]

    @staticmethod
    def atomic_add(pointer: Pointer, value, sem) -> Tensor:
        machine, at = here.machine, int(pointer.at)
        known = here.polled if isinstance(value, int) and value == 0 else None  # what was read here last
        machine.pause(lambda: (at, int(pointer.flat[at])) != known, "its turn")
        released = machine.atomic_clocks.setdefault(at, {})
        if sem != "relaxed":
            merge(*((here.clock, released) if sem == "acquire" else (released, here.clock)))
        before = pointer.flat[at].clone()
        pointer.flat[at] += value
        here.polled = at, int(before)
        here.acquired |= sem == "acquire"
        tick()
        return before

    @staticmethod
    def allocate_shared_memory(dtype, shape, layout):
        if layout == "mbarrier":
            return Barriers(shape[0])
        poison = float("nan") if dtype.is_floating_point else -1
        return Shared(torch.full(shape, poison, dtype=dtype), {})

    @staticmethod
    def warp_specialize(partitions, warps, registers) -> None:
        assert len(warps) == len(registers) == len(partitions) - 1 and all(r % 8 == 0 for r in registers)
        machine, me = here.machine, here.task
        tasks = [
            machine.start(
                work, *arguments, name=f"{me.name}, part {i}", clock=dict(me.clock), program=me.program
            )
            for i, (work, arguments) in enumerate(partitions)
        ]
        machine.pause(lambda: not any(task in machine.tasks for task in tasks), "its partitions")
        for task in tasks:
            merge(here.clock, task.clock)
        here.task.own_work = max(task.own_work for task in tasks)


def _modules() -> dict[str, Any]:
    """Stand-ins for what the kernels import, by name."""

    def jit(*args, **_):
        return args[0] if args else lambda function: function

    def store_wait(_):
        wait_for_additions(to_be_added=False)

    tma = SimpleNamespace(async_load=tma_load, async_store=tma_store, store_wait=store_wait)
    products = {"warpgroup_mma": warpgroup_mma, "warpgroup_mma_wait": warpgroup_mma_wait}
    others = {"mbarrier": MBarrier, "tma": tma, "fence_async_shared": fence_async_shared}
    gluon = SimpleNamespace(language=Language, jit=jit)
    experimental = SimpleNamespace(gluon=gluon)
    prefix = "triton.experimental.gluon"
    return {
        "triton": SimpleNamespace(experimental=experimental),
        "triton.experimental": experimental,
        prefix: gluon,
        f"{prefix}.language": Language,
        f"{prefix}.language._core": SimpleNamespace(builtin=lambda function: tma_add),
        f"{prefix}.language.nvidia": SimpleNamespace(),
        f"{prefix}.language.nvidia.hopper": SimpleNamespace(**products, **others),
    }


Change = tuple[str, str]  # of a source: what is replaced by what


def mutants(file: str) -> dict[str, Change]:
    """Those of kernels/<file>.py, by name: lines without (-) and with the mistake (+)."""
    found = {}
    for block in (Path(__file__).parent / "mutants" / f"{file}.txt").read_text().split("\n\n"):
        name, *lines = block.splitlines()
        found[name] = tuple("\n".join(line[2:] for line in lines if line[0] == sign) for sign in "-+")
    return found


def mutated(source: str, change: Change) -> str:
    """The source with a text replaced: whole lines, at any indentation, or else a part of one.

    Raises LookupError for a text that is not there.
    """
    old, new = change
    lines = "".join(f"(?P=at){re.escape(line)}\n" for line in old.splitlines())
    whole = re.compile(f"^{lines}".replace("(?P=at)", "(?P<at> *)", 1), re.MULTILINE)
    if whole.search(source):
        return whole.sub(lambda match: indent(f"{new}\n" if new else "", match["at"]), source)
    if old not in source:
        raise LookupError(f"the source has no {old!r}")
    return source.replace(old, new)


def load_kernel(file: str, change: Change | None = None) -> Callable:
    """The kernel of kernels/<file>.py on the stand-ins, after replacing some of its text."""
    source = (KERNELS / f"{file}.py").read_text()
    members = {"__name__": f"emulated.{file}", "__package__": "emulated"}
    with mock.patch.dict(sys.modules, _modules()):
        package = sys.modules["emulated"] = ModuleType("emulated")
        package.__path__ = []
        common = sys.modules["emulated.gluon_common"] = ModuleType("emulated.gluon_common")
        exec((KERNELS / "gluon_common.py").read_text(), common.__dict__)
        exec(mutated(source, change) if change else source, members)
    return members[f"{file}_kernel"]


class Emulated:
    """Stands for a kernel: `Emulated(function)[grid](...)` runs it, and leaves `.races` and `.waited`.

    Whatever the grid, `programs` run, all at once: the kernels' work is done by any number. None: the grid's.
    """

    def __init__(self, function: Callable, ordered=False, order: str = "any", programs: int | None = 3):
        self.function, self.ordered, self.order, self.programs = function, ordered, order, programs
        self.races: set[str] = set()
        self.waited = 0  # products and additions of others that a program has waited for, at most
        self.work: dict[int, int] = {}  # products and additions of each program

    def __getitem__(self, grid: tuple[int]) -> Callable:
        return lambda **arguments: self.launch(self.programs or grid[0], arguments)

    def launch(self, programs: int, arguments: dict) -> None:
        options = ("num_warps", "enable_fp_fusion")  # of the compiler
        arguments = {name: self.argument(x) for name, x in arguments.items() if name not in options}
        machine = Machine(self.ordered, self.order)

        def program() -> None:
            self.function(**arguments)
            self.waited = max(self.waited, here.clock.get(WORK, 0) - here.task.own_work)
            self.work[here.program[0]] = here.task.own_work

        launch = Task("launch", (programs, programs), {})
        enter(machine, launch)
        with machine.until_all_have_ended():
            for i in range(programs):
                machine.start(program, name=f"program {i}", clock={}, program=(i, programs))
            machine.pause(lambda: machine.tasks == [launch], "all programs and their copies")
        self.races |= machine.races

    @staticmethod
    def argument(x):
        if hasattr(x, "block_shape"):
            return Descriptor(x)
        return Pointer(x.view(-1)) if isinstance(x, Tensor) else x
