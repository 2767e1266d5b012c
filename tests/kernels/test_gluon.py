"""The Gluon kernels' arithmetic and synchronization, on the CPU: see gluon_emulator.py."""

import math
from types import ModuleType

import pytest
import torch
from gluon_emulator import KERNELS, Emulated, load_kernel, mutated
from gluon_machine import ORDERS
from oracle import SHARD, compare_all, packed, random_inputs, side_by_side
from wlb_titan.kernels import gluon_launch, op, self_check, stress
from wlb_titan.kernels import schedule as schedules
from wlb_titan.kernels.implementations import Device
from wlb_titan.kernels.schedule import Key, Schedule
from wlb_titan.kernels.segments import CAUSAL, Options, Saved, Shape, Visibility

CHUNKS = torch.tensor([[0, 100, 0, 100], [100, 100, 0, 400]], dtype=torch.int32)
SCALE = 0.1


def statistics(dout, dlse, out, lse, pack):
    """triton_launch.row_statistics, whose kernel the interpreter checks."""
    tokens, heads, _ = out.shape
    lse_log2, delta = torch.full((2, heads // pack, -(-tokens * pack // 4) * 4), torch.nan)
    each = (out.float() * dout.float()).sum(-1).T
    if dlse is not None:
        each = each - torch.where(torch.isposinf(lse), 0.0, dlse)
    for rows, values in ((lse_log2, lse * math.log2(math.e)), (delta, each)):
        rows[:, : tokens * pack] = values.view(-1, pack, tokens).transpose(1, 2).flatten(1)
    return lse_log2, delta


def gradient(sums, q, bounds, pack, scale):
    """gluon_launch.gradient, likewise."""
    tokens, heads, dim = q.shape
    blocks = sums.view(-1, heads // pack, 2, dim // 16, 4, 8, 4, 2, 2).permute(0, 4, 7, 5, 1, 2, 3, 6, 8)
    rows = blocks.reshape(-1, 64 // pack, pack, heads // pack, dim).transpose(2, 3)
    rows = rows.reshape(-1, heads, dim)[:tokens] * scale
    return torch.where((bounds[0] < bounds[1])[:, None, None], rows, 0.0).to(q.dtype)


def emulate(monkeypatch, forward, backward, units):
    """Runs stand-ins for the kernels."""
    for name, value in {
        "gluon_forward_kernel": forward,
        "gluon_backward_kernel": backward,
        "row_statistics": statistics,
        "gradient": gradient,
        "units": lambda device: units,
    }.items():
        monkeypatch.setattr(gluon_launch, name, value)


def run(
    monkeypatch,
    segments,
    tokens,
    heads,
    dims,
    *,
    visibility=CAUSAL,
    seed=0,
    order="any",
    programs=3,
    units=5,
    heads_first=False,
    dtype=torch.bfloat16,
    forward=(),
    backward=(),
    lists=(),
):
    """Everything against the oracle; the gradients, the races found, for how many products and additions of
    others a program of the backward has waited at most, and both kernels. `forward`, `backward`, `lists`:
    changes to the source.
    """
    options = {"order": order, "seed": seed, "programs": programs}
    forward_kernel = Emulated(load_kernel("gluon_forward", "gluon_forward_kernel", forward), **options)
    backward_kernel = Emulated(
        load_kernel("gluon_backward", "gluon_backward_kernel", backward), ordered=True, **options
    )
    emulate(monkeypatch, forward_kernel, backward_kernel, units)
    monkeypatch.setattr(gluon_launch, "HEADS_FIRST", 0 if heads_first else 1 << 30)
    if lists:
        monkeypatch.setattr(schedules, "tiles", changed_tiles(lists))
    q, k, v, dout = random_inputs(*tokens, *heads, *dims, dtype, seed=seed)
    k, v = side_by_side(k, v)
    dlse = torch.randn(heads[0], tokens[0], generator=torch.Generator().manual_seed(seed))
    schedule = Schedule(segments.numpy(), Key(*tokens, visibility, q.device, 0))
    with self_check.poisoned():
        wanted = Options(SCALE, visibility)
        out, lse = gluon_launch.forward(q, k, v, schedule, wanted)
        gradients = gluon_launch.backward(dout, dlse, Saved(q, k, v, out, lse), schedule, wanted)
    compare_all(out, lse, gradients, (q, k, v, dout, dlse), segments, SCALE, visibility, 1e-2)
    races = forward_kernel.races | backward_kernel.races
    return gradients, races, backward_kernel.waited, forward_kernel, backward_kernel


def test_multiprocessors_are_left_to_other_kernels(monkeypatch):
    """Of 5 as many as are asked for, and one works in any case."""
    grids = []

    class Launched:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda **arguments: None

    emulate(monkeypatch, Launched(), Launched(), units=5)
    q, k, v, dout = random_inputs(1024, 1024, 4, 4, 64, 64, torch.bfloat16, seed=0)
    schedule = Schedule(packed([1024]).numpy(), Key(1024, 1024, CAUSAL, q.device, 0))
    for margin in (0, 2, 9):
        wanted = Options(SCALE, sm_margin=margin)
        out, lse = gluon_launch.forward(q, k, v, schedule, wanted)
        lse.fill_(0.0)
        gluon_launch.backward(dout, None, Saved(q, k, v, out.zero_(), lse), schedule, wanted)
    assert grids == [(5,), (5,), (3,), (3,), (1,), (1,)]


def changed_tiles(mutants) -> ModuleType:
    """kernels/tiles.py after replacing some of its text."""
    made = ModuleType("wlb_titan.kernels.changed_tiles")
    exec(mutated((KERNELS / "tiles.py").read_text(), mutants), made.__dict__)
    return made


CASES = {
    "ragged": (packed([150, 1, 77, 13, 12, 130]), (386, 383), (4, 1), (64, 64), {"units": 1}),
    "shard": (SHARD, (13, 12), (8, 2), (128, 128), {"units": 1}),
    "long": (packed([420, 40]), (461, 460), (2, 2), (128, 128), {}),
    "two_chunks": (CHUNKS, (200, 400), (2, 1), (64, 128), {}),
    "split_group": (packed([90, 30]), (120, 120), (8, 1), (64, 64), {"units": 8, "dtype": torch.float16}),
    "two_packs": (packed([70, 9, 3, 140]), (222, 222), (16, 1), (64, 64), {"units": 1}),
    "heads_first": (packed([150, 90]), (240, 240), (8, 2), (64, 64), {"units": 1, "heads_first": True}),
    "heads_first_split": (packed([90, 30]), (120, 120), (8, 1), (64, 64), {"units": 3, "heads_first": True}),
    "three_packs": (packed([33, 100]), (133, 133), (12, 1), (64, 64), {"units": 1}),
    "window": (
        packed([330, 20, 61]),
        (411, 411),
        (4, 1),
        (64, 64),
        {"units": 1, "visibility": Visibility(window=70)},
    ),
    "not_causal": (
        *(packed([150, 40]), (190, 190), (4, 1), (64, 64)),
        {"units": 1, "visibility": Visibility(causal=False)},
    ),
    "padding": (packed([]), (70, 50), (1, 1), (64, 64), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_gluon(monkeypatch, case):
    *arguments, options = CASES[case]
    for order in ("any", "last program first"):
        _, races, *_ = run(monkeypatch, *arguments, order=order, **options)
        assert not races


def test_gluon_repeats_bit_for_bit(monkeypatch):
    """Though copies, additions and partitions come in another order each time."""
    first, second = (
        run(monkeypatch, packed([400, 30]), (430, 430), (2, 1), (64, 64), order=order)[0]
        for order in ("copies late", "last program first")
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_who_comes_late_takes_nothing(monkeypatch):
    """A program that gets its multiprocessor when the others have done all, as where a collective held it."""
    case = packed([300]), (300, 300), (2, 1), (64, 64)
    for kernel in run(monkeypatch, *case, order="last program first", units=1)[3:]:
        assert kernel.work[2] > 8 * kernel.work[0]


# In a tile, items in the order of their queries.
QUERIES_FIRST = (("(-begin, haste, tile)", "(begin, tile)"),)


@pytest.mark.parametrize(
    ("lengths", "heads", "slow"),
    [([129] * 9, 2, {"lists": QUERIES_FIRST}), ([384], 5, {"heads_first": True})],
    ids=["documents that share tiles", "heads that share keys"],
)
def test_turns_are_not_waited_for_in_a_row(monkeypatch, lengths, heads, slow):
    """A program waits for two steps of others, each of eight products and additions; in the other order for
    many.
    """
    case = packed(lengths), (sum(lengths), sum(lengths)), (heads, 1), (64, 64)
    each_a_tile = {"units": 1, "programs": 10}
    assert run(monkeypatch, *case, **each_a_tile)[2] <= 16
    assert run(monkeypatch, *case, **each_a_tile, **slow)[2] > 30


def try_way(monkeypatch, backward=()):
    """One division's trial on a GPU (stress.py), on the emulated kernels and few tokens."""
    options = {"programs": None, "order": "last program first"}
    kernels = (
        Emulated(load_kernel("gluon_forward", "gluon_forward_kernel"), **options),
        Emulated(load_kernel("gluon_backward", "gluon_backward_kernel", backward), **options),
    )
    emulate(monkeypatch, *kernels, units=3)
    monkeypatch.setattr(stress, "PROGRAMS", (1, 2, 7))
    for module in (op, self_check):
        monkeypatch.setattr(module, "device_of", lambda device: Device("cuda", (9, 0)))
    shape, cpu = Shape(8, 2, 64, 64), torch.device("cpu")
    wish = Options(SCALE, implementation="gluon")
    segments = self_check.rich_segments(2, units=0, scale=40)
    noise = self_check.Noise.on(segments, shape, torch.bfloat16, cpu)
    way = self_check.ways(noise, wish)[0]
    stress.try_way(noise, wish, self_check.wanted(noise, wish, "reference"), way, repeats=1)


def test_a_trial_passes(monkeypatch):
    try_way(monkeypatch)


@pytest.mark.parametrize("name", ["added to nothing", "sums of another group"])
def test_a_trial_refuses(monkeypatch, name):
    with pytest.raises(self_check.KernelError):
        try_way(monkeypatch, (BACKWARD_MUTANTS[name],))


# What is replaced in a kernel's source by what; whole lines end in a new line, at any indentation.


def swapped(first, second):
    return f"{first}\n{second}\n", f"{second}\n{first}\n"


def without(line, before=""):
    """Where several are alike: the one `before` another."""
    after = f"{before}\n" if before else ""
    return f"{line}\n{after}", after


FORWARD_MUTANTS = {
    "K released before it is read": swapped(
        "s = warpgroup_mma_wait(0, deps=[s])", "mbarrier.arrive(bars[K].index(FREE + stage), count=1)"
    ),
    "V released before it is read": swapped(
        "o, p = warpgroup_mma_wait(0, deps=[o, p])", "mbarrier.arrive(bars[V].index(FREE + before), count=1)"
    ),
    "Q not released": without("mbarrier.arrive(bars[Q].index(FREE + q_stage), count=1)"),
    "Q loaded over the last but one": without(
        "mbarrier.wait(bars[Q].index(FREE + q_stage), ((round // Q_STAGES) & 1) ^ 1)"
    ),
    "V not waited for": without("mbarrier.wait(bars[V].index(READY + before), before_phase)"),
    "V of the wrong phase": (
        "bars[V].index(READY + before), before_phase)",
        "bars[V].index(READY + before), before_phase ^ 1)",
    ),
    "V released by one consumer": (
        "bars[V].index(FREE + stage), count=CONSUMERS)",
        "bars[V].index(FREE + stage), count=1)",
    ),
    "V never released": without("mbarrier.arrive(bars[V].index(FREE + stage), count=1)", before="step += 1"),
    "no mask": ("if (start < shared_begin) | (start + BLOCK_N > shared_end):", "if False:"),
    "mask only at the end": ("if (start < shared_begin) | (start + BLOCK_N", "if (start + BLOCK_N"),
    "output used before its wait": without("o, p = warpgroup_mma_wait(0, deps=[o, p])"),
    "a tile that nobody takes": (
        'number = gl.atomic_add(taken, 1, sem="relaxed")\nround += 1\n',
        'number = 1 + gl.atomic_add(taken, 1, sem="relaxed")\nround += 1\n',
    ),
    "Q and number not waited for": without(
        "mbarrier.wait(bars[Q].index(READY + q_stage), (round // Q_STAGES) & 1)"
    ),
}
BACKWARD_MUTANTS = {
    "no fence after dS": without(
        "fence_async_shared()", before="mbarrier.arrive(bars[DS].index(0), count=1)"
    ),
    "no fence after dQ": without(
        "fence_async_shared()", before="mbarrier.arrive(bars[DQ].index(DQ_READY + stage), count=1)"
    ),
    "dS written while it is read": ("ds_tile.index(2 * stage +", "ds_tile.index("),
    "dS read before the other's is there": without("mbarrier.wait(bars[DS].index(0), step & 1)"),
    "dQ written while it is added": without("mbarrier.wait(bars[DQ].index(DQ_FREE + stage), phase ^ 1)"),
    "dQ given back before it is read": swapped(
        "wait_until_read()", "mbarrier.arrive(bars[DQ].index(DQ_FREE + STAGE), count=1)"
    ),
    "dQ added before it is there": without(
        "mbarrier.wait(bars[DQ].index(DQ_READY + STAGE), ((step + place) // STAGES) & 1)"
    ),
    "K and V loaded over": without(
        "mbarrier.wait(bars[KV].index(KV_FREE), (round & 1) ^ 1)", before="give(program, work.index(PROGRAM))"
    ),
    "K, V and their numbers not waited for": without("mbarrier.wait(bars[KV].index(KV_READY), round & 1)"),
    "K and V released by one consumer": ("count=CONSUMERS + STAGES", "count=1 + STAGES"),
    "numbers released before they are read": swapped(
        "end = given(work.index(KV_END), 4)", "mbarrier.arrive(bars[KV].index(KV_FREE), count=1)"
    ),
    "a tile that nobody takes": (
        'gl.atomic_add(taken, 1, sem="relaxed")  # not sooner',
        '1 + gl.atomic_add(taken, 1, sem="relaxed")  #',
    ),
    "steps counted from the tile's first": (
        "dk_acc, dv_acc, step = accumulate_tile(",
        "dk_acc, dv_acc, _ = accumulate_tile(",
    ),
    "one warp is told of every sum": ("DQ_READY + stage), count=1", "DQ_READY), count=1"),
    "the steps of the other warp": ("(step + STAGE) % STAGES, blocks", "STAGE, blocks"),
    "Q released before the last S of an item": swapped(
        "s = warpgroup_mma_wait(0, deps=[s])",
        "mbarrier.arrive(bars[QUERIES].index(FREE + (final & 1)), count=1)",
    ),
    "Q released while it is still used": ("FREE + (stage ^ 1)", "FREE + stage"),
    "Q not released": ("if place > 0:", "if place > 1:"),
    "Q of the first step not waited for": without(
        "mbarrier.wait(bars[QUERIES].index(Q_READY + stage), phase)"
    ),
    "Q of the next step not waited for": without(
        "mbarrier.wait(bars[QUERIES].index(Q_READY + following), its_phase)"
    ),
    "dK used before its wait": without("dk_acc, ds_left = warpgroup_mma_wait(1, deps=[dk_acc, ds_left])"),
    "statistics' bytes not expected": (
        "+ 3 * lse_log2.block_type.nbytes",
        "+ 2 * lse_log2.block_type.nbytes",
    ),
    "rows of the next item counted": ("gl.where((row >= q_begin) & (row < q_end), last, 0)", "last"),
    "turn not waited for": ("while count >> 1 != turn:", "while count == -1:"),
    "turn passed on before the addition": ("= wait_until_added() + 2", "= 3"),
    "turn not passed on": (", raised, sem", ", 0 * raised, sem"),
    "additions not kept behind the turn": without("count = after_others(count)"),
    "never the first": ("raised = wait_until_added() + 2 - (count & 1)", "raised = wait_until_added() + 1"),
    "added to nothing": ("if (count & 1) == 1:", "if True:"),
    "stored over the other document's": ("((first < begin) |", "((first < 0) |"),
    "stored over the next document's": ("(first + ROWS // PACK > end))", "(first < 0))"),
    "turns of another group": (
        "counter + group * counters + at, 0",
        "counter + (group ^ 1) * counters + at, 0",
    ),
    "rows are tokens": ("gl.arange(0, ROWS, layout=columns) // PACK", "gl.arange(0, ROWS, layout=columns)"),
    "another pack's queries": ("heads = [row // PACK, group * PACK, 0]", "heads = [row // PACK, group, 0]"),
    "sums of the other warp": ("dq_tile.index(2 * STAGE + half)", "dq_tile.index(half)"),
    "gradients by a buffer of dS that is read": (
        "ds_tile.index(2 * (step & 1) + PART)",
        "ds_tile.index(2 * (1 - step & 1) + PART)",
    ),
    "sums of another group": ("(at * all_groups + group)", "(at * all_groups + (group ^ 1))"),
}
LIST_MUTANTS = {
    "keys after a partial tile not masked": (" & (t1[tile] - t0[tile] == block_n)", ""),
    "later tiles first": ("np.lexsort((chain,", "np.lexsort((-np.arange(len(chain)), chain,"),
    "a turn that never comes": (
        "(tile - first_tile[segment])[waits]",
        "(tile - first_tile[segment])[waits] + 1",
    ),
    "short documents wait for nobody": ("waits = count[segment] > 1", "waits = count[segment] > 2"),
    "the last block of a document not zero": ("ends = np.concatenate([q0, q1])", "ends = q0"),
    "a document's first tile stores over others": ("(row == number * rows) &", "True &"),
    "segments share their counters": ("start = np.cumsum(blocks) - blocks", "start = 0 * blocks"),
}


# Tiles of several blocks, two documents that share one, and a window; many tiles of one block on a single
# program; a document that ends within a tile and is followed by other keys, not causal; two packs of heads.
PARTIAL = torch.tensor([[0, 70, 0, 1100], [70, 10, 1100, 40]], dtype=torch.int32)
MUTANT_CASES = (
    (packed([420, 165]), (585, 585), (2, 1), (64, 64), {"units": 3, "visibility": Visibility(window=230)}),
    (packed([128] * 4), (512, 512), (2, 1), (128, 128), {"units": 1}),
    (PARTIAL, (80, 1140), (1, 1), (64, 64), {"visibility": Visibility(causal=False)}),
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


@pytest.mark.parametrize("name", FORWARD_MUTANTS)
def test_mutants_of_the_forward_are_caught(monkeypatch, name):
    assert caught(monkeypatch, name, forward=(FORWARD_MUTANTS[name],))


@pytest.mark.parametrize("name", BACKWARD_MUTANTS)
def test_mutants_of_the_backward_are_caught(monkeypatch, name):
    assert caught(monkeypatch, name, backward=(BACKWARD_MUTANTS[name],))


@pytest.mark.parametrize("name", LIST_MUTANTS)
def test_mutants_of_the_lists_are_caught(monkeypatch, name):
    assert caught(monkeypatch, name, lists=(LIST_MUTANTS[name],))
