"""The Gluon kernels' arithmetic and synchronization, on the CPU: see gluon_emulator.py."""

from contextlib import nullcontext
from itertools import count
from types import ModuleType

import gluon_trial
import oracle
import pytest
import torch
from gluon_emulator import KERNELS, Emulated, load_kernel, mutants, mutated
from gluon_machine import ORDERS
from oracle import SHARD, compare_all, packed, random_inputs, rows
from wlb_titan.kernels import gluon_launch, op, self_check, triton_launch
from wlb_titan.kernels import schedule as schedules
from wlb_titan.kernels.implementations import Device
from wlb_titan.kernels.schedule import Key, Schedule
from wlb_titan.kernels.segments import NO_WINDOW, Options, Saved, Shape

SCALE = 0.1


def emulate(monkeypatch, forward, backward, units):
    """Runs stand-ins for the kernels, of which the interpreter checks the two of the oracle."""
    monkeypatch.setattr(gluon_launch, "gluon_forward_kernel", forward)
    monkeypatch.setattr(gluon_launch, "gluon_backward_kernel", backward)
    monkeypatch.setattr(gluon_launch, "row_statistics", oracle.row_statistics)
    monkeypatch.setattr(gluon_launch, "gradient", oracle.gradient)
    monkeypatch.setattr(gluon_launch, "units", lambda device: units)


def changed_tiles(change) -> ModuleType:
    """kernels/tiles.py after replacing some of its text."""
    made = ModuleType("wlb_titan.kernels.changed_tiles")
    exec(mutated((KERNELS / "tiles.py").read_text(), change), made.__dict__)
    return made


def run(
    monkeypatch, segments, tokens, heads, dims, *, window=None, order="any", programs=3, units=5,
    heads_first=False, dtype=torch.bfloat16, file="", change=None,
):  # fmt: skip
    """Everything against the oracle; the gradients, the races found, for how many products and additions of
    others a program of the backward has waited at most, and both kernels. `change`: of the source of `file`.
    """
    forward, backward = (
        Emulated(load_kernel(name, change if name == file else None), ordered, order, programs)
        for name, ordered in (("gluon_forward", False), ("gluon_backward", True))
    )
    emulate(monkeypatch, forward, backward, units)
    monkeypatch.setattr(gluon_launch, "HEADS_FIRST", 0 if heads_first else 1 << 30)
    if file == "tiles":
        monkeypatch.setattr(schedules, "tiles", changed_tiles(change))
    given = q, k, v, dout, dlse = random_inputs(*tokens, heads, dims, dtype)
    wish = Options(SCALE, window)
    schedule = Schedule(segments.numpy(), Key(*tokens, wish.reach, q.device, 0))
    with self_check.poisoned():
        out, lse = gluon_launch.forward(q, k, v, schedule, wish)
        gradients = gluon_launch.backward(dout, dlse, Saved(q, k, v, out, lse), schedule, wish)
    compare_all(out, lse, gradients, given, segments, SCALE, window, 1e-2)
    return gradients, forward.races | backward.races, backward.waited, forward, backward


CASES = {
    "ragged": (packed([150, 1, 77, 13, 12, 130]), (386, 383), (4, 1), (64, 64), {"units": 1}),
    "shard": (SHARD, (13, 12), (8, 2), (128, 128), {"units": 1}),
    "long": (packed([420, 40]), (461, 460), (2, 2), (128, 128), {}),
    "two_chunks": (rows([0, 100, 0, 100], [100, 100, 0, 400]), (200, 400), (2, 1), (64, 128), {}),
    "split_group": (packed([90, 30]), (120, 120), (8, 1), (64, 64), {"units": 8, "dtype": torch.float16}),
    "two_packs": (packed([70, 9, 3, 140]), (222, 222), (16, 1), (64, 64), {"units": 1}),
    "heads_first": (packed([150, 90]), (240, 240), (8, 2), (64, 64), {"units": 1, "heads_first": True}),
    "heads_first_split": (packed([90, 30]), (120, 120), (8, 1), (64, 64), {"units": 3, "heads_first": True}),
    "three_packs": (packed([33, 100]), (133, 133), (12, 1), (64, 64), {"units": 1}),
    "window": (packed([330, 20, 61]), (411, 411), (4, 1), (64, 64), {"units": 1, "window": 70}),
    "padding": (packed([]), (70, 50), (1, 1), (64, 64), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_gluon_is_right_and_repeats_bit_for_bit(monkeypatch, case):
    """Though copies, additions and partitions come in another order each time."""
    *arguments, options = CASES[case]
    got = []
    for order in ("any", "last program first"):
        gradients, races, *_ = run(monkeypatch, *arguments, order=order, **options)
        assert not races
        got.append(gradients)
    assert all(torch.equal(a, b) for a, b in zip(*got, strict=True))


def test_who_comes_late_takes_nothing(monkeypatch):
    """A program that gets its multiprocessor when the others have done all, as where a collective held it."""
    case = packed([300]), (300, 300), (2, 1), (64, 64)
    for kernel in run(monkeypatch, *case, order="last program first", units=1)[3:]:
        assert kernel.work[2] > 8 * kernel.work[0]


def test_multiprocessors_are_left_to_other_kernels(monkeypatch):
    """Of 5 as many as are asked for, and one works in any case."""
    grids = []

    class Launched:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda **arguments: None

    emulate(monkeypatch, Launched(), Launched(), units=5)
    q, k, v, dout, _ = random_inputs(1024, 1024, (4, 4), (64, 64), torch.bfloat16)
    schedule = Schedule(packed([1024]).numpy(), Key(1024, 1024, NO_WINDOW, q.device, 0))
    for margin in (0, 2, 9):
        wish = Options(SCALE, sm_margin=margin)
        out, lse = gluon_launch.forward(q, k, v, schedule, wish)
        gluon_launch.backward(dout, None, Saved(q, k, v, out.zero_(), lse.zero_()), schedule, wish)
    assert grids == [(5,), (5,), (3,), (3,), (1,), (1,)]


# In a tile, items in the order of their queries.
QUERIES_FIRST = {"file": "tiles", "change": ("(-begin, haste, tile)", "(begin, tile)")}


@pytest.mark.parametrize(
    ("lengths", "heads", "slow"),
    [([129] * 9, 2, QUERIES_FIRST), ([384], 5, {"heads_first": True})],
    ids=["documents that share tiles", "heads that share keys"],
)
def test_turns_are_not_waited_for_in_a_row(monkeypatch, lengths, heads, slow):
    """A program waits for two steps of others, each of eight products and additions; in the other order for
    many."""
    case = packed(lengths), (sum(lengths), sum(lengths)), (heads, 1), (64, 64)
    each_a_tile = {"units": 1, "programs": 10}
    assert run(monkeypatch, *case, **each_a_tile)[2] <= 16
    assert run(monkeypatch, *case, **each_a_tile, **slow)[2] > 30


def differing(backward, when):
    """A backward pass whose dQ is another in the fifth call, or by two programs."""
    calls = count(1)

    def other(dout, dlse, saved, schedule, options, divided):
        dq, dk, dv = backward(dout, dlse, saved, schedule, options, divided)
        programs = gluon_launch.most_programs(dq.device, options)
        return dq + (next(calls) == 5 if when == "late" else programs == 2), dk, dv

    return other


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", None),
        ("added to nothing", "is .* of its norm wrong"),
        ("sums of another group", "is .* of its norm wrong"),
        ("late", "gradients differ in 1 of 1 launches"),
        ("two programs", "dq differs in .* when it is computed by 2 programs"),
    ],
)
def test_a_trial_refuses_what_is_wrong(monkeypatch, name, reason):
    """One division's trial on a GPU, on the emulated kernels and few tokens."""
    change = mutants("gluon_backward").get(name)
    kernels = load_kernel("gluon_forward"), load_kernel("gluon_backward", change)
    emulated = [Emulated(kernel, order="last program first", programs=None) for kernel in kernels]
    emulate(monkeypatch, *emulated, units=3)
    monkeypatch.setattr(gluon_trial, "PROGRAMS", (1, 2, 7))
    monkeypatch.setattr(gluon_trial, "units", lambda device: 3)
    if reason and not change:
        monkeypatch.setattr(gluon_launch, "backward", differing(gluon_launch.backward, name))
    for module in (op, triton_launch):
        monkeypatch.setattr(module, "device_of", lambda device: Device("cuda", (9, 0)))
    wish = Options(SCALE, implementation="gluon")
    segments = self_check.rich_segments(2, units=0, scale=40)
    noise = self_check.Noise.on(segments, Shape(8, 2, 64, 64), torch.bfloat16, torch.device("cpu"))
    way, want = self_check.ways(noise, wish)[0], self_check.wanted(noise, wish, "reference")
    with pytest.raises(self_check.KernelError, match=reason) if reason else nullcontext():
        gluon_trial.try_way(noise, wish, want, way, repeats=1)


# Tiles of several blocks, two documents that share one, and a window; many tiles of one block; two packs.
MUTANT_CASES = (
    (packed([420, 165]), (585, 585), (2, 1), (64, 64), {"units": 3, "window": 230}),
    (packed([128] * 4), (512, 512), (2, 1), (128, 128), {"units": 1}),
    (packed([70, 9, 60, 21]), (160, 160), (8, 2), (64, 64), {"units": 2}),
)
CRASHES = {
    "output used before its wait": "unsupported operand type(s) for *: 'Product' and 'Tensor'",
    "dK used before its wait": "unsupported operand type(s) for *: 'Product' and 'float'",
}
"""Mutants that the emulator refuses to run on, and what it says."""


def caught(monkeypatch, name="", **mutant) -> str:
    """The first wrong result, race or standstill in any order; empty if there is none."""
    for order in ORDERS:
        for *arguments, options in MUTANT_CASES:
            try:
                _, races, *_ = run(monkeypatch, *arguments, order=order, **options, **mutant)
            except (AssertionError, TimeoutError) as error:
                return f"{order}: {error}"
            except (RuntimeError, TypeError) as error:
                if str(error) != CRASHES.get(name):
                    raise
                return f"{order}: {error}"
            if races:
                return f"{order}: {races}"
    return ""


def test_the_unchanged_kernels_pass_the_mutants_case(monkeypatch):
    assert caught(monkeypatch) == ""


FILES = ("gluon_forward", "gluon_backward", "tiles")


@pytest.mark.parametrize(("file", "name"), [(file, name) for file in FILES for name in mutants(file)])
@pytest.mark.long
def test_mutants_are_caught(monkeypatch, file, name):
    assert caught(monkeypatch, name, file=file, change=mutants(file)[name])
