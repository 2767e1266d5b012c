"""Gluon's backward where nobody has tried it: run before all other tests on a new GPU, driver or Triton.

    pytest -x --device cuda tests/gpu/test_trial.py

In the order of what goes wrong first: launches end; they are right; they repeat; what is broken is found.
"""

import importlib.util
import os
import shutil
import subprocess
import sys

import pytest
import torch
import triton
from gluon_emulator import KERNELS, mutants, mutated
from gluon_trial import LAYOUTS, REPEATS, SMALL_REPEATS, repeat, try_way
from oracle import packed
from wlb_titan.kernels import gluon_launch, self_check, varlen_attention
from wlb_titan.kernels.segments import Options, Shape

DIMS = (128, 128)
RELAXED = ('raised, sem="release"', 'raised, sem="relaxed"')
TOY = """
import torch
from wlb_titan.kernels.segments import Options, Shape
from wlb_titan.kernels.self_check import Noise, check_kernels
segments = torch.tensor([[0, 200, 0, 200], [200, 200, 200, 200]], dtype=torch.int32)
noise = Noise.on(segments, Shape(4, 1, 128, 128), torch.bfloat16, torch.device("cuda"))
print(check_kernels(noise, Options(0.1, implementation="gluon")))
"""


@pytest.fixture
def made(target):
    """What kernels are made with of a shape of a GPU, in small on a CPU: shape, options, dtype and device. A
    CPU has the reference's one way to divide the backward, and is its own judge."""

    def made(shape, small=(4, 2, 16, 16)):
        shape = Shape(*target.pick(cuda=shape, cpu=small))
        options = Options(shape.dim**-0.5, implementation=target.pick(cuda="gluon", cpu="reference"))
        dtype = target.pick(cuda=torch.bfloat16, cpu=torch.float32)
        return shape, options, dtype, torch.device(target.device)

    return made


@pytest.fixture
def way(target, made):
    """Noise on rich segments, options, what is right, and a way to divide the backward."""
    shape, options, dtype, device = made((32, 4, *DIMS))
    noise = self_check.Noise.rich(shape, dtype, device, target.pick(cuda=1, cpu=20))
    divided = self_check.ways(noise, options)[0]
    return noise, options, self_check.wanted(noise, options, "reference"), divided


@pytest.mark.parametrize(("length", "documents"), [(129, 2032), (257, 1020)])
def test_tiles_that_wait_for_each_other_end(target, made, monkeypatch, length, documents):
    monkeypatch.setattr(self_check, "PATIENCE", 5.0)
    segments = packed([length] * target.pick(cuda=documents, cpu=3))
    shape, options, dtype, device = made((8, 2, *DIMS))
    self_check.warm_up(shape, options, dtype, device)  # compiles, which takes more than PATIENCE
    noise = self_check.Noise.on(segments, shape, dtype, device)
    got = self_check.attend(noise, options)
    self_check.compare(got, self_check.wanted(noise, options, "reference"), shape.name)


def test_a_way_is_right_repeats_and_is_the_same_by_any_number_of_programs(way):
    try_way(*way, repeats=3)


def test_it_repeats_while_memory_is_busy(way):
    noise, options, _, divided = way
    got = self_check.attend(noise, options, divided)
    if noise.q.is_cuda:
        big, stream = torch.empty(2, 1 << 30, dtype=torch.uint8, device="cuda"), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(200):
                big[0].copy_(big[1])
    for _ in range(3):
        self_check.same(got, self_check.attend(noise, options, divided), "runs beside copies")


def changed(tmp_path, change):
    """The backward kernel after replacing some of its source."""
    path = tmp_path / "changed.py"
    path.write_text(mutated((KERNELS / "gluon_backward.py").read_text(), change))
    spec = importlib.util.spec_from_file_location("wlb_titan.kernels.changed", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.gluon_backward_kernel


@pytest.mark.parametrize("name", ["added to nothing", "relaxed"])
def test_what_is_broken_on_purpose_is_found(target, way, monkeypatch, tmp_path, name):
    kernel = changed(tmp_path, (mutants("gluon_backward") | {"relaxed": RELAXED})[name])
    if target.device == "cpu":
        pytest.skip("the kernel runs on a GPU alone; the emulator has its mutants")
    monkeypatch.setattr(gluon_launch, "gluon_backward_kernel", kernel)
    with pytest.raises(self_check.KernelError):
        try_way(*way, repeats=REPEATS)


@pytest.mark.parametrize("heads", LAYOUTS, ids=str)
def test_every_way_is_right_and_repeats_in_many_launches(target, made, heads):
    """Of groups that together pack and split in every way."""
    shape, options, dtype, device = made((*heads, *DIMS), small=(*heads, 16, 16))
    self_check.warm_up(shape, options, dtype, device)
    scale, seed = target.pick(cuda=1, cpu=20), LAYOUTS.index(heads)
    noise = self_check.Noise.rich(shape, dtype, device, scale, seed=seed)
    few = self_check.rich_segments(shape.kv_heads, 1, scale=16 * target.pick(cuda=1, cpu=10))
    small = self_check.Noise.on(few, shape, dtype, device)
    want = self_check.wanted(noise, options, "reference")
    for divided in self_check.ways(noise, options):
        try_way(noise, options, want, divided, target.pick(cuda=REPEATS, cpu=2))
        repeat(small, options, divided, target.pick(cuda=SMALL_REPEATS, cpu=2))


def run_toy(command: list[str], environment: dict[str, str]) -> None:
    how = {"capture_output": True, "text": True, "timeout": 540, "env": os.environ | environment}
    done = subprocess.run([*command, sys.executable, "-c", TOY], **how)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def test_tritons_concurrency_sanitizer_finds_nothing(target, tmp_path):
    if target.device == "cpu" or triton.__version__ < "3.9":
        pytest.skip("needs a GPU and Triton 3.9")
    run_toy([], {"TRITON_INSTRUMENTATION_MODE": "consan", "TRITON_CACHE_DIR": str(tmp_path)})


def test_compute_sanitizer_finds_nothing(target):
    if target.device == "cpu" or not shutil.which("compute-sanitizer"):
        pytest.skip("needs a GPU and compute-sanitizer")
    run_toy(["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "3"], {})


def test_offsets_of_more_than_32_bits(target, made):
    """The last document of a million tokens, forward and backward, whose addresses overflow 32 bits."""
    shape, options, _, device = made((32, 4, *DIMS))
    length, documents = 1024, target.pick(cuda=2**10, cpu=2)
    segments = packed([length] * documents)
    q, k, v, dout = self_check.make_inputs(segments, shape, torch.bfloat16, device)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = varlen_attention(*leaves, segments, implementation=options.implementation)
    got = (out, *torch.autograd.grad(out, leaves, dout))
    last = [x[-length:].detach().float().requires_grad_() for x in (q, k, v)]
    want = varlen_attention(*last, packed([length]), implementation="reference")
    wanted = (want, *torch.autograd.grad(want, last, dout[-length:].float()))
    names = ("out", "dq", "dk", "dv")
    ends = {name: x[-length:].detach() for name, x in zip(names, got, strict=True)}
    self_check.compare(ends, dict(zip(names, wanted, strict=True)), "a million tokens")
