"""The Gluon kernels' arithmetic and synchronization, on the CPU: see gluon_emulator.py."""

import math

import pytest
import torch
from oracle import attention_and_lse, compare, packed, poisoned, random_inputs, side_by_side, with_gradients

pytest.importorskip("triton")

from gluon_emulator import Emulated, load_kernel
from wlb_titan.kernels import gluon_launch
from wlb_titan.kernels.options import Options, Saved
from wlb_titan.kernels.schedule import schedule_of
from wlb_titan.kernels.segments import CAUSAL, Visibility

SHARD = torch.tensor(
    [[5, 3, 2, 9], [0, 5, 0, 5], [8, 1, 11, 1], [10, 2, 0, 12], [3, 0, 1, 4]], dtype=torch.int32
)
CHUNKS = torch.tensor([[0, 100, 0, 100], [100, 100, 0, 400]], dtype=torch.int32)
SCALE = 0.1


def statistics(dout, dlse, out, lse, pack):
    """triton_launch.row_statistics, whose kernel the interpreter checks."""
    tokens = -(-out.shape[0] // 4) * 4
    lse_log2, delta = torch.full((2, out.shape[1], tokens), torch.nan)
    lse_log2[:, : out.shape[0]] = lse * math.log2(math.e)
    delta[:, : out.shape[0]] = (out.float() * dout.float()).sum(-1).T
    if dlse is not None:
        delta[:, : out.shape[0]] -= torch.where(torch.isposinf(lse), 0.0, dlse)
    return lse_log2, delta


def run(
    monkeypatch,
    segments,
    tokens,
    heads,
    dims,
    *,
    visibility=CAUSAL,
    deterministic=True,
    seed=0,
    units=5,
    dtype=torch.bfloat16,
    forward=(),
    backward=(),
    deadlock_s=20.0,
):
    """Everything against the oracle; the races found. `forward`, `backward`: changes to the source."""
    options = {"deadlock_s": deadlock_s, "seed": seed}
    forward_kernel = Emulated(load_kernel("gluon_forward", "gluon_forward_kernel", forward), **options)
    backward_kernel = Emulated(
        load_kernel("gluon_backward", "gluon_backward_kernel", backward), ordered=deterministic, **options
    )
    monkeypatch.setattr(gluon_launch, "gluon_forward_kernel", forward_kernel)
    monkeypatch.setattr(gluon_launch, "gluon_backward_kernel", backward_kernel)
    monkeypatch.setattr(gluon_launch, "row_statistics", statistics)
    monkeypatch.setattr(gluon_launch, "multiprocessors", lambda device: units)
    q, k, v, dout = random_inputs(*tokens, *heads, *dims, dtype, seed=seed)
    k, v = side_by_side(k, v)
    dlse = torch.randn(heads[0], tokens[0], generator=torch.Generator().manual_seed(seed))
    schedule = schedule_of(segments, *tokens, q.device, visibility)
    with poisoned():
        wanted = Options(SCALE, visibility, deterministic)
        out, lse = gluon_launch.forward(q, k, v, schedule, wanted)
        gradients = gluon_launch.backward(dout, dlse, Saved(q, k, v, out, lse), schedule, wanted)
    padding = torch.isposinf(lse[0])
    got = {"out": out, "lse": torch.where(padding, 0.0, lse)}
    got |= {f"d{name}": x for name, x in zip("qkv", gradients, strict=True)}

    def oracle(q, k, v, _):
        mask = {"causal": visibility.causal, "window": visibility.window}
        return attention_and_lse(q, k, v, segments, SCALE, **mask)

    want = with_gradients(oracle, *(x.double() for x in (q, k, v, torch.zeros(1), dout, dlse)))
    del want["dsinks"]
    compare(got, want, 1e-2)
    assert (out[padding] == 0).all() and (gradients[0][padding] == 0).all()
    return gradients, forward_kernel.races | backward_kernel.races


CASES = {
    "ragged": (packed([150, 1, 77, 13, 12, 130]), (386, 383), (2, 1), (64, 64), {}),
    "shard": (SHARD, (13, 12), (4, 2), (128, 128), {}),
    "long": (packed([420, 40]), (461, 460), (2, 2), (128, 128), {}),
    "two_chunks": (CHUNKS, (200, 400), (2, 1), (64, 128), {}),
    "split_group": (packed([90, 30]), (120, 120), (8, 1), (64, 64), {"units": 8, "dtype": torch.float16}),
    "window": (packed([330, 20, 61]), (411, 411), (2, 1), (64, 64), {"visibility": Visibility(window=70)}),
    "not_causal": (packed([150, 40]), (190, 190), (1, 1), (64, 64), {"visibility": Visibility(causal=False)}),
    "any_order": (packed([300, 40]), (340, 340), (2, 1), (64, 64), {"deterministic": False}),
    "padding": (packed([]), (70, 50), (1, 1), (64, 64), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_gluon(monkeypatch, case):
    *arguments, options = CASES[case]
    _, races = run(monkeypatch, *arguments, **options)
    assert not races


def test_gluon_repeats_bit_for_bit(monkeypatch):
    """Though copies, additions and partitions come in another order each time."""
    first, second = (
        run(monkeypatch, packed([400, 30]), (430, 430), (2, 1), (64, 64), seed=0)[0] for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


RELEASE_Q = "mbarrier.arrive(bars.index(Q_FREE + q_stage), count=1)\n"
FORWARD_MUTANTS = {
    "K released before it is read": (
        "        s = warpgroup_mma_wait(0, deps=[s])\n"
        "        mbarrier.arrive(bars.index(K_FREE + stage), count=1)",
        "        mbarrier.arrive(bars.index(K_FREE + stage), count=1)\n"
        "        s = warpgroup_mma_wait(0, deps=[s])",
    ),
    "V released before it is read": (
        "            o, p = warpgroup_mma_wait(0, deps=[o, p])\n"
        "            mbarrier.arrive(bars.index(V_FREE + before), count=1)",
        "            mbarrier.arrive(bars.index(V_FREE + before), count=1)\n"
        "            o, p = warpgroup_mma_wait(0, deps=[o, p])",
    ),
    "Q not released": ("        " + RELEASE_Q, ""),
    "Q loaded over the last but one": (
        "        mbarrier.wait(bars.index(Q_FREE + q_stage), ((round // Q_STAGES) & 1) ^ 1)\n",
        "",
    ),
    "V not waited for": ("            mbarrier.wait(bars.index(V_READY + before), before_phase)\n", ""),
    "V of the wrong phase": ("V_READY + before), before_phase)", "V_READY + before), before_phase ^ 1)"),
    "V released by one consumer": (
        "V_FREE + stage), count=CONSUMERS)",
        "V_FREE + stage), count=1 if CONSUMERS == 2 else 4)",
    ),
    "V never released": (
        "        mbarrier.arrive(bars.index(V_FREE + stage), count=1)\n        step += 1",
        "        step += 1",
    ),
    "no mask": ("if (start < shared_begin) | (start + BLOCK_N > shared_end):", "if False:"),
    "mask only at the end": ("if (start < shared_begin) | (start + BLOCK_N", "if (start + BLOCK_N"),
    "output used before its wait": ("            o, p = warpgroup_mma_wait(0, deps=[o, p])\n", ""),
    "last round forgotten": ("whole + gl.where(place < work - whole * programs, 1, 0)", "whole"),
}
BACKWARD_MUTANTS = {
    "no fence after dS": (
        "            fence_async_shared()\n            mbarrier.arrive(bars.index(DS_READY)",
        "            mbarrier.arrive(bars.index(DS_READY)",
    ),
    "no fence after dQ": (
        "            fence_async_shared()\n            mbarrier.arrive(bars.index(DQ_READY)",
        "            mbarrier.arrive(bars.index(DQ_READY)",
    ),
    "dS written while it is read": (
        "            mbarrier.wait(bars.index(DS_FREE), (step & 1) ^ 1)\n",
        "",
    ),
    "dS read before the other's is there": (
        "            mbarrier.wait(bars.index(DS_READY), step & 1)\n",
        "",
    ),
    "dQ written while it is added": (
        "            mbarrier.wait(bars.index(DQ_FREE), (step & 1) ^ 1)\n",
        "",
    ),
    "dQ given back before it is read": (
        "                wait_until_read()\n            mbarrier.arrive(bars.index(DQ_FREE), count=1)",
        "                mbarrier.arrive(bars.index(DQ_FREE), count=1)\n                wait_until_read()",
    ),
    "dQ added before it is there": ("                mbarrier.wait(bars.index(DQ_READY), step & 1)\n", ""),
    "Q released before dK is done": (
        "            dk_acc = warpgroup_mma_wait(0, deps=[dk_acc])\n"
        "            mbarrier.arrive(bars.index(FREE + stage), count=1)",
        "            mbarrier.arrive(bars.index(FREE + stage), count=1)\n"
        "            dk_acc = warpgroup_mma_wait(0, deps=[dk_acc])",
    ),
    "statistics' bytes not expected": (
        "+ 3 * lse_log2.block_type.nbytes",
        "+ 2 * lse_log2.block_type.nbytes",
    ),
    "rows of the next item counted": ("gl.where((row >= q_begin) & (row < q_end), last, 0)", "last"),
    "turn not waited for": ('0, sem="acquire") != turn', '0, sem="acquire") == -1'),
    "turn passed on before the addition": (", wait_until_added(), sem", ", 1, sem"),
    "turn not passed on": (", wait_until_added(), sem", ", 0 * wait_until_added(), sem"),
}


def caught(monkeypatch, **mutant) -> bool:
    """Whether a result is wrong, a race is found, or nothing moves any more.

    Tried with tiles of several blocks, and with many of one block on a single program.
    """
    for lengths, dims, units in (([420, 45], (64, 64), 4), ([128] * 5, (128, 128), 1)):
        tokens = sum(lengths)
        try:
            _, races = run(
                monkeypatch, packed(lengths), (tokens, tokens), (2, 1), dims, units=units, deadlock_s=1.0,
                visibility=Visibility(window=350), **mutant,
            )  # fmt: skip
        except (AssertionError, TimeoutError, RuntimeError, TypeError):
            return True
        if races:
            return True
    return False


def test_the_unchanged_kernels_pass_the_mutants_case(monkeypatch):
    assert not caught(monkeypatch)


@pytest.mark.parametrize("name", FORWARD_MUTANTS)
def test_mutants_of_the_forward_are_caught(monkeypatch, name):
    assert caught(monkeypatch, forward=(FORWARD_MUTANTS[name],))


@pytest.mark.parametrize("name", BACKWARD_MUTANTS)
def test_mutants_of_the_backward_are_caught(monkeypatch, name):
    assert caught(monkeypatch, backward=(BACKWARD_MUTANTS[name],))
