"""Runs the Gluon kernels' own source on the CPU, and looks for races in it.

The source is executed with stand-ins for Triton's modules: tensors are torch tensors, a partition is a Python
thread, some programs run at once. What a GPU does on its own time happens late here, by a random delay:

- a TMA load fills its buffer with NaN at once and with data later, and only then completes its barrier;
- a TMA addition reads shared memory later and adds to global memory later still;
- a matrix product takes its operands from shared memory at the wait, not when it is issued.

Whether two accesses to a buffer of shared memory are ordered is decided by vector clocks, which threads hand
on through mbarriers and atomics: so an access that nothing orders is found even if it came at the right time.
So are additions to one place of global memory, if they must be ordered. A store by threads that the copy
engine or a matrix product reads needs a fence by the thread that stored.
"""

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
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
    enter,
    here,
    merge,
    tick,
)
from torch import Tensor

KERNELS = Path(__file__).parents[2] / "kernels"
RESIDENT = 3  # programs that run at once


class Product:
    """A matrix product that has been issued; not a tensor, so using it before its wait is an error."""

    def __init__(self, a, b, acc, use_acc: bool):
        self.operands, self.acc, self.use_acc, self.value = (a, b), acc, use_acc, None
        self.reads = [x.history.read(asynchronous=True) for x in (a, b) if isinstance(x, Shared)]

    def finish(self) -> None:
        a, b = (x.data.clone() if isinstance(x, Shared) else x for x in self.operands)
        for access in self.reads:
            access.ends = here.clock[here.name]
        acc = self.acc.value if isinstance(self.acc, Product) else self.acc
        product = a.float() @ b.float()
        self.value = product + acc if self.use_acc else product
        tick()


def warpgroup_mma(a, b, acc, *, use_acc=True, is_async=False):
    assert is_async and b.dtype in (torch.bfloat16, torch.float16) and a.dtype == b.dtype
    acc = acc.value if isinstance(acc, Product) and acc.value is not None else acc
    here.products.append(Product(a, b, acc, use_acc))
    time.sleep(here.machine.delay())
    return here.products[-1]


def warpgroup_mma_wait(pendings: int, deps):
    """Until all but the last `pendings` products have ended."""
    while len(here.products) > pendings:
        here.products.pop(0).finish()
    values = [x.value if isinstance(x, Product) and x.value is not None else x for x in deps]
    return values[0] if len(values) == 1 else values


def tma_load(descriptor: Descriptor, corner, bar: Barrier, target: Shared) -> None:
    assert list(target.shape) == descriptor.block, f"box {descriptor.block} into buffer {target.shape}"
    data, machine, name = descriptor.load([int(c) for c in corner]), here.machine, f"copy {time.time_ns()}"
    target.history.overwrite(Access(ends=1, name=name))
    target.data.fill_(float("nan") if target.dtype.is_floating_point else -1)

    def land() -> None:
        time.sleep(machine.delay())
        target.data.copy_(data)
        bar.step(0, descriptor.block_type.nbytes, {**here.clock, name: 1})

    machine.start(land)


def tma_add(descriptor: Descriptor, corner, source: Shared) -> None:
    read, machine, place = source.history.read(asynchronous=True), here.machine, tuple(map(int, corner))
    has_read, added = threading.Event(), Access()
    with machine.lock:
        for row in source.data.any(1).nonzero().flatten().tolist():  # adding zeros disturbs nobody
            before = descriptor.additions.get((*place, row))
            if machine.ordered and before and not before.ordered():
                machine.races.add("nothing orders two additions to one place")
            descriptor.additions[*place, row] = added

    def go() -> None:
        time.sleep(machine.delay())
        box = source.data.clone()
        has_read.set()
        time.sleep(3 * machine.delay())
        descriptor.add(place, box)

    here.additions.append((machine.start(go), has_read, read, added))


def wait_for_additions(to_be_added: bool) -> None:
    for thread, has_read, read, added in here.additions:
        thread.join() if to_be_added else has_read.wait()
        read.ends = read.ends or here.clock[here.name]
        added.ends = here.clock[here.name] if to_be_added else None
    tick()
    if to_be_added:
        here.additions = []


def inline_assembly(text, constraints, args, dtype, is_pure, pack):
    if "cp.async.bulk.wait_group 0" in text:
        wait_for_additions(to_be_added=True)
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
        time.sleep(here.machine.delay())
        with bar.condition:
            here.machine.wait_for(lambda: bar.phase != int(phase) & 1, bar.condition, "a barrier's phase")
            merge(here.clock, bar.completed_clock)

    @staticmethod
    def arrive(bar: Barrier, count: int) -> None:
        time.sleep(here.machine.delay())
        bar.step(count, 0, here.clock)
        tick()

    @staticmethod
    def expect(bar: Barrier, nbytes) -> None:
        with bar.condition:
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
    NVMMASharedLayout = staticmethod(lambda *_, **__: None)
    static_range = range
    arange = staticmethod(lambda begin, end, layout: torch.arange(begin, end))
    full = staticmethod(lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype))
    where = staticmethod(lambda c, a, b: torch.where(tensor(c), tensor(a), tensor(b)))
    maximum = staticmethod(lambda a, b: torch.maximum(tensor(a), tensor(b)))
    minimum = staticmethod(lambda a, b: torch.minimum(tensor(a), tensor(b)))
    max = staticmethod(lambda x, dim: x.amax(dim))
    sum = staticmethod(lambda x, dim: x.sum(dim))
    exp2, log2 = staticmethod(torch.exp2), staticmethod(torch.log2)
    convert_layout = staticmethod(lambda x, layout: x)
    program_id = staticmethod(lambda axis: torch.tensor(here.program[0]))
    num_programs = staticmethod(lambda axis: torch.tensor(here.program[1]))
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
        with here.machine.lock:
            pointer.flat[at[mask]] = values[mask]

    @staticmethod
    def atomic_add(pointer: Pointer, value, sem) -> Tensor:
        machine, at = here.machine, int(pointer.at)
        poll = isinstance(value, int) and value == 0
        if poll:
            here.polls_end = getattr(here, "polls_end", None) or time.monotonic() + machine.deadlock_s
            if machine.errors or time.monotonic() > here.polls_end:
                raise TimeoutError("a turn never comes")
            time.sleep(1e-4)
        else:
            here.polls_end = None
        with machine.lock:
            released = machine.atomic_clocks.setdefault(at, {})
            merge(*((here.clock, released) if sem == "acquire" else (released, here.clock)))
            before = pointer.flat[at].clone()
            pointer.flat[at] += value
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
        threads = [
            here.machine.start(work, *arguments, name=f"{here.program[0]} partition {i}")
            for i, (work, arguments) in enumerate(partitions)
        ]
        for thread in threads:
            thread.join()


def _modules() -> dict[str, ModuleType]:
    """Stand-ins for what the kernels import, by name."""

    def module(name: str, **members) -> ModuleType:
        made = ModuleType(name)
        made.__dict__.update(members)
        return made

    def jit(*args, **_):
        return args[0] if args else lambda function: function

    tma = SimpleNamespace(async_load=tma_load, store_wait=lambda _: wait_for_additions(to_be_added=False))
    hopper = module(
        "hopper",
        mbarrier=MBarrier,
        tma=tma,
        warpgroup_mma=warpgroup_mma,
        warpgroup_mma_wait=warpgroup_mma_wait,
        fence_async_shared=fence_async_shared,
    )
    gluon = module("gluon", language=Language, jit=jit)
    triton = module("triton", experimental=module("experimental", gluon=gluon))
    prefix = "triton.experimental.gluon"
    return {
        "triton": triton,
        "triton.experimental": triton.experimental,
        prefix: gluon,
        f"{prefix}.language": Language,
        f"{prefix}.language._core": module("core", builtin=lambda function: tma_add),
        f"{prefix}.language.nvidia": module("nvidia"),
        f"{prefix}.language.nvidia.hopper": hopper,
    }


def load_kernel(file: str, name: str, mutate: tuple[tuple[str, str], ...] = ()) -> Callable:
    """The function `name` of kernels/<file>.py on the stand-ins, after replacing some of its text."""
    source = (KERNELS / f"{file}.py").read_text()
    for old, new in mutate:
        assert old in source, f"{file}.py has no {old!r}"
        source = source.replace(old, new)
    members = {"__name__": f"emulated.{file}", "__package__": "emulated"}
    with mock.patch.dict(sys.modules, _modules()):
        package = ModuleType("emulated")
        package.__path__ = []
        sys.modules["emulated"] = package
        if file != "gluon_common":
            common = sys.modules["emulated.gluon_common"] = ModuleType("emulated.gluon_common")
            exec(
                compile((KERNELS / "gluon_common.py").read_text(), "gluon_common.py", "exec"), common.__dict__
            )
        exec(compile(source, f"{file}.py", "exec"), members)
    return members[name]


class Emulated:
    """Stands for a kernel: `Emulated(function)[grid](...)` runs it, and collects races in `.races`."""

    def __init__(self, function: Callable, *, deadlock_s: float = 20.0, ordered: bool = False, seed: int = 0):
        self.function, self.deadlock_s, self.ordered, self.seed = function, deadlock_s, ordered, seed
        self.races: set[str] = set()

    def __getitem__(self, grid: tuple[int]) -> Callable:
        return lambda **arguments: self.launch(grid[0], arguments)

    def launch(self, programs: int, arguments: dict) -> None:
        to_the_compiler = ("num_warps", "enable_fp_fusion")
        arguments = {name: self.argument(x) for name, x in arguments.items() if name not in to_the_compiler}
        machine = Machine(self.deadlock_s, self.ordered, self.seed)
        resident = threading.Semaphore(RESIDENT)

        def program() -> None:
            try:
                self.function(**arguments)
            finally:
                resident.release()

        for i in range(programs):  # programs start in the order of their ids, as on a GPU
            resident.acquire()
            enter(machine, f"launch {i}", {}, (i, programs))
            machine.start(program, name=f"{i}")
        for thread in machine.threads:  # grows meanwhile
            thread.join()
        self.races |= machine.races
        if machine.errors:
            raise machine.errors[0]

    @staticmethod
    def argument(x):
        if hasattr(x, "block_shape"):
            return Descriptor(x)
        return Pointer(x.view(-1)) if isinstance(x, Tensor) else x
