"""Compile kernels for sm_90 with no GPU, and read from the result what decides whether they are any good.

The launch code of wlb_titan.kernels is called on CPU tensors with the kernel replaced by a recorder, so that
what is compiled is what would be launched. Each launch has a process, which the compiler's assertions abort.
"""

import multiprocessing
import re
import subprocess
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_MEMORY = 232448  # bytes a program may use on sm_90
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32"}


class Launch(NamedTuple):
    """kernel[grid](**kwargs), recorded."""

    kernel: Any
    kwargs: dict


@dataclass
class Report:
    """What the compiler made of a launch. Bytes, instruction counts; `ttgir` and `ptx` are the texts."""

    registers: int = 0
    spills: int = 0
    shared: int = 0
    wgmma: int = 0
    tma_loads: int = 0
    tma_reductions: int = 0
    warnings: list[str] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)
    error: str = ""
    ttgir: str = ""
    ptx: str = ""


@contextmanager
def recording(module, *names: str):
    """Within, the kernels `names` of `module` do nothing but append their launches to the list yielded."""
    launches = []

    class Recorder:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            return lambda **kwargs: launches.append(Launch(self.kernel, kwargs))

    with mock.patch.multiple(module, **{name: Recorder(getattr(module, name)) for name in names}):
        yield launches


def compile_all(launches: list[Launch], target: GPUTarget = HOPPER) -> list[Report]:
    """In the order of the launches, each version of a kernel once; two processes at a time."""
    versions = [repr(version(launch)) for launch in launches]
    different = list(dict(zip(versions, launches, strict=True)).items())
    reports = {}
    for first in range(0, len(different), 2):
        running = {name: _start(launch, target) for name, launch in different[first : first + 2]}
        reports |= {name: _receive(*started) for name, started in running.items()}
    return [reports[name] for name in versions]


def _start(launch: Launch, target: GPUTarget):
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_compile_and_send, args=(launch, target, sender))
    process.start()
    sender.close()
    return process, receiver


def _receive(process, receiver) -> Report:
    try:
        report = receiver.recv()
    except EOFError:
        process.join()
        report = Report(error=f"the compiler ended its process, exit code {process.exitcode}")
    process.kill()
    process.join()
    return report


def _compile_and_send(launch: Launch, target: GPUTarget, sender) -> None:
    try:
        report = compile_one(launch, target)
    except Exception as error:
        report = Report(error=f"{type(error).__name__}: {error}"[:2000])
    sender.send(report)


def compile_one(launch: Launch, target: GPUTarget) -> Report:
    """Compile in this process."""
    source, options = _source(launch)
    compiled = triton.compile(source, target=target, options=options)
    ptx, ttgir = compiled.asm["ptx"], compiled.asm["ttgir"]
    log = _ptxas(ptx, target)
    spills = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    return Report(
        registers=int(re.search(r"Used (\d+) registers", log)[1]),
        spills=max(map(int, spills.groups())),
        shared=compiled.metadata.shared,
        wgmma=ptx.count("wgmma.mma_async"),
        tma_loads=len(re.findall(r"cp\.async\.bulk\.tensor\.\dd\.shared", ptx)),
        tma_reductions=ptx.count("cp.reduce.async.bulk"),
        warnings=sorted(set(re.findall(r"C75\d\d", log))),
        mismatches=transfer_mismatches(ttgir),
        ttgir=ttgir,
        ptx=ptx,
    )


def version(launch: Launch) -> tuple:
    """What Triton tells versions of a kernel by: constants and options, and the divisibility of the rest."""
    source, options = _source(launch)
    return launch.kernel.__name__, source.signature, source.constants, source.attrs, options


def _source(launch: Launch):
    """An ASTSource with the types and specializations that Triton would give these arguments."""
    kernel = launch.kernel
    arguments = {name: x for name, x in launch.kwargs.items() if name in kernel.arg_names}
    options = {name: x for name, x in launch.kwargs.items() if name not in kernel.arg_names}
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        x = arguments[parameter.name]
        one = type(x) is int and x == 1 and not parameter.do_not_specialize
        if parameter.is_constexpr or one or x is None:
            signature[parameter.name], constants[parameter.name] = "constexpr", x
            continue
        if isinstance(x, torch.Tensor):
            signature[parameter.name], divisible = f"*{TYPES[x.dtype]}", x.data_ptr() % 16 == 0
        elif hasattr(x, "block_shape"):  # a TMA descriptor, Triton's or Gluon's
            block = ",".join(map(str, x.block_shape))
            layout = f",{x.layout!r}" if hasattr(x, "layout") else ""
            signature[parameter.name] = f"tensordesc<{TYPES[x.base.dtype]}[{block}]{layout}>"
            divisible = False
        elif isinstance(x, float):
            signature[parameter.name], divisible = "fp32", False
        else:
            signature[parameter.name], divisible = "i32", x % 16 == 0 and not parameter.do_not_specialize
        if divisible:
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    return source(kernel, signature, constants, attributes), options


def _ptxas(ptx: str, target: GPUTarget) -> str:
    """Messages of the assembler that Triton itself would call for this target."""
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    newer = folder / "ptxas-blackwell"
    use_newer = newer.exists() and target.arch >= (90 if triton.__version__ >= "3.9" else 100)
    arch = f"sm_{target.arch}a" if target.arch >= 90 else f"sm_{target.arch}"
    options = ["--regAllocOptLevel=2"] if triton.__version__ >= "3.7" else []
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        command = [newer if use_newer else folder / "ptxas", *options, "-v", f"--gpu-name={arch}"]
        command += ["-o", cubin.name, "/dev/stdin"]
        done = subprocess.run(command, input=ptx, text=True, capture_output=True, check=True)
    return done.stdout + done.stderr


def transfer_mismatches(ttgir: str) -> list[str]:
    """TMA copies whose descriptor and buffer differ in size, or that other bytes are expected of by barriers.

    Triton 3.6 splits a buffer between two consumer groups, but not a descriptor made on the host: 128 rows
    are then copied into a buffer of 64, without a word.
    """
    wrong = []
    width = {"bf16": 2, "f16": 2, "f32": 4, "i32": 4, "si32": 4}
    source = r"async_tma_copy_global_to_local .*?: !tt\.tensordesc<(?:tensor<)?((?:\d+x)+)(\w+)"
    copies = source + r".*?-> !ttg\.memdesc<((?:\d+x)+)"
    copied = 0
    for shape, dtype, buffer in re.findall(copies, ttgir):
        elements, room = (prod(int(n) for n in s.split("x") if n) for s in (shape, buffer))
        copied += elements * width[dtype]
        if elements != room:
            wrong.append(f"descriptor {shape} into buffer {buffer}")
    expected = sum(map(int, re.findall(r"barrier_expect %[\w.#]+(?:\[.*?\])?, (\d+)", ttgir)))
    if copied != expected:
        wrong.append(f"barriers expect {expected} bytes, {copied} are copied")
    return wrong
