"""The check of the kernels sees what a broken one would leave: here the reference is broken. Its segments
make the kernels do all that they can. And whatever segments choose was compiled before."""

from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from commands import CONFIGS
from crosscompile import recording, version
from gluon_trial import LAYOUTS
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_tiles import segment_lists
from wlb_titan.kernels import gluon_launch, op, reference, self_check, tiles, triton_launch
from wlb_titan.kernels.implementations import Device
from wlb_titan.kernels.segments import NO_WINDOW, Options, Saved, Shape, check_segments

CPU = torch.device("cpu")
SHAPE = Shape(4, 2, 16, 24)
OPTIONS = Options(0.25)
SEGMENTS = {
    "rich": self_check.rich_segments(2, units=1, scale=20),
    "chunk": torch.tensor([[0, 128, 0, 700]], dtype=torch.int32),
}
UNITS = 132
RESULTS = {"out": "forward", "lse": "forward", "dq": "backward", "dk": "backward", "dv": "backward"}


def broken(monkeypatch, name, change, calls=lambda call: call > 0):
    """Makes the reference change that result in some calls: the judge's come first."""
    which = RESULTS[name]
    place = [other for other in RESULTS if RESULTS[other] == which].index(name)
    right, number = getattr(reference, which), count()

    def wrong(*arguments):
        results = list(right(*arguments))
        if calls(next(number)):
            results[place] = change(results[place].clone())
        return tuple(results)

    monkeypatch.setattr(reference, which, wrong)


def check(segments=SEGMENTS["rich"], options=OPTIONS):
    return self_check.check_kernels(self_check.Noise.on(segments, SHAPE, torch.float32, CPU), options)


@pytest.mark.parametrize("window", [None, 6, 51])
@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS)
def test_what_is_right_passes(segments, window):
    """With a window most of a chunk's keys get no gradient at all."""
    assert check(segments, Options(0.25, window)) < 1e-5


@pytest.mark.parametrize("name", RESULTS)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_any_row_that_is_wrong_is_found(name, data):
    """A row of a head, left as it was, added twice or 10 % too large: the whole norm may not see it."""
    tokens, heads = (700, 2) if name in ("dk", "dv") else (128, 4)
    row, head = data.draw(st.integers(0, tokens - 1)), data.draw(st.integers(0, heads - 1))
    factor = data.draw(st.sampled_from([0.0, 2.0, 1.1, torch.nan]))

    def change(x):
        place = (head, row) if name == "lse" else (row, head)
        # Where a gradient nearly cancels, its size is that of the usual row's.
        lost = x[place].norm() < 0.5 * x.norm() / x.shape[0] ** 0.5
        x[place] = x[place] * factor if not lost else x[place] + x.norm()
        return x

    with pytest.MonkeyPatch.context() as patch:
        broken(patch, name, change)
        with pytest.raises(self_check.KernelError, match=f"^{name} is"):
            check(SEGMENTS["chunk"])


def test_what_differs_when_repeated_is_found(monkeypatch):
    def flip(dq):
        dq[40, 1, 3] = torch.nextafter(dq[40, 1, 3], torch.tensor(2.0))
        return dq

    broken(monkeypatch, "dq", flip, calls=lambda call: call == 2)
    with pytest.raises(self_check.KernelError, match=r"dq differs in 1 of .* tokens when it is repeated"):
        check()


def test_what_nobody_writes_is_found(monkeypatch):
    broken(monkeypatch, "dv", torch.empty_like)
    with pytest.raises(self_check.KernelError, match="dv is nan"):
        check()
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_launch_that_does_not_end_is_found(monkeypatch):
    never = SimpleNamespace(record=lambda: None, query=lambda: False)
    monkeypatch.setattr(torch.cuda, "Event", lambda: never)
    monkeypatch.setattr(op, "current", lambda device: torch.no_grad())
    monkeypatch.setattr(self_check, "PATIENCE", 0.05)
    with pytest.raises(self_check.KernelError, match="has not ended"):
        self_check._wait(torch.device("cuda"))


def head_layouts() -> set[tuple[int, int]]:
    """Query and key heads of a rank, of every configuration that ships for GPUs."""
    from wlb_titan.runtime.configured import model_shape
    from wlb_titan.runtime.models.load import load_config

    found = set()
    for path in sorted((CONFIGS).glob("*.toml")):
        if path.name.startswith("cpu"):
            continue
        config = load_config(str(path), ()).config
        tensor, model = config.parallelism.tensor_parallel_degree, model_shape(config.model_spec.model)
        found.add((model.heads // tensor, model.kv_heads // tensor))
    return found


def test_the_check_covers_what_the_kernels_can_do():
    """For the heads of every configuration that ships, and those of the trial, in every division: tiles for
    each multiprocessor, turns, items with steps that need no mask, and steps of a tile."""
    ships = head_layouts()
    assert (6, 6) in ships  # of llama2_30b_64k.toml, whose degrees are those of the file that it extends
    for q_heads, kv_heads in sorted(ships | {*LAYOUTS, (4, 1), (5, 1), (32, 1), (32, 32), (40, 8)}):
        segments = self_check.rich_segments(kv_heads, UNITS).numpy()
        kv_tokens = int((segments[:, 2] + segments[:, 3]).max())
        for divided in gluon_launch.divisions(q_heads, kv_heads, NO_WINDOW):
            case, rows = (q_heads, kv_heads, divided), 64 // divided.pack
            lists = tiles.key_tiles(segments, kv_tokens, tokens=rows, block_n=128, turn_rows=rows)
            assert len(lists.tiles) * kv_heads * divided.split >= self_check.TILES * UNITS, case
            assert lists.items[:, 5].max() > 8, case
            assert (lists.items[:, 1] < lists.items[:, 2]).sum() > 8, case
            assert lists.heaviest * (q_heads // kv_heads) // divided.split // divided.pack > 2, case


def test_rich_segments_have_gaps_and_shared_keys():
    for heads, units, scale in ((1, 132, 1), (8, 132, 1), (2, 1, 20)):
        segments = self_check.rich_segments(heads, units, scale).numpy().astype(np.int64)
        q0, q, k0, k = segments.T
        check_segments(segments, int((q0 + q).max()), int((k0 + k).max()))
        assert (q0[1:] > (q0 + q)[:-1]).sum() == len(self_check.LONG)
        chunks = segments[len(self_check.LONG) : len(self_check.LONG) + 2]
        assert chunks[0, 2] == chunks[1, 2] and chunks[0, 3] < chunks[1, 3]


LAYERS = {
    "8 heads a group": (Shape(16, 2, 128, 128), None),
    "one key head": (Shape(4, 1, 128, 128), None),
    "as many key heads": (Shape(4, 4, 64, 64), None),
    "latent attention": (Shape(2, 2, 192, 128), None),
    "short window": (Shape(8, 1, 128, 128), 512),
    "long window": (Shape(8, 1, 128, 128), 4096),
}
RUNS = [(name, how) for name in LAYERS for how in ("auto", "triton", "gluon")]
RUNS.remove(("latent attention", "gluon"))  # which has no such head dim


@pytest.fixture
def hopper(monkeypatch):
    for module in (op, triton_launch):
        monkeypatch.setattr(module, "device_of", lambda device: Device("cuda", (9, 0)))
    monkeypatch.setattr(gluon_launch, "units", lambda device: 132)


def versions(run):
    """Of all kernels that a function launches, what Triton tells their versions by."""
    names = [[name for name in vars(x) if name.endswith("_kernel")] for x in (triton_launch, gluon_launch)]
    with recording(triton_launch, *names[0]) as launches, recording(gluon_launch, *names[1]) as more:
        run()
    return {repr(version(launch)) for launch in launches + more}


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("name", "implementation"), RUNS)
def test_no_segments_choose_what_was_not_warmed_up(name, implementation):
    """Launches are recorded, on the CPU taken for a Hopper GPU."""
    shape, window = LAYERS[name]
    options = Options(0.1, window, implementation=implementation)
    warm = versions(lambda: self_check.warm_up(shape, options, torch.bfloat16, CPU))

    @settings(max_examples=12, deadline=None)
    @given(segment_lists(documents=12, longest=20_000), st.booleans())
    def check(case, wants_lse):
        segments, q_tokens, kv_tokens = case
        assume(q_tokens and kv_tokens)
        segments = torch.from_numpy(segments)
        dims = shape.dim, shape.v_dim
        q, dout = (torch.empty(q_tokens, shape.q_heads, dim, dtype=torch.bfloat16) for dim in dims)
        # Keys and values side by side, as context parallelism gathers them.
        widths = [shape.kv_heads * dim for dim in dims]
        kv = torch.empty(kv_tokens, sum(widths), dtype=torch.bfloat16).split(widths, dim=1)
        k, v = (x.unflatten(1, (shape.kv_heads, -1)) for x in kv)
        lse = torch.empty(shape.q_heads, q_tokens)

        def attend():
            op.forward(q, k, v, segments, options)
            saved = Saved(q, k, v, dout, lse)
            op.backward(dout, lse if wants_lse else None, saved, segments, options)

        assert set() < versions(attend) <= warm

    check()


@pytest.mark.usefixtures("hopper")
def test_what_is_warmed_up():
    """For Qwen3 0.6B: groups in two parts or one, and of very long documents one head after the other."""
    noise = self_check.Noise.on(self_check.FEW, Shape(16, 8, 128, 128), torch.bfloat16, CPU)
    wish = Options(0.1, implementation="gluon")
    found = [divided[:3] for divided in self_check.ways(noise, wish)]
    assert found == [(1, 1, False), (2, 1, False), (1, 1, True)]
    assert len(self_check.ways(noise, wish._replace(window=4096))) == 2
    assert self_check.ways(noise, Options(0.1, implementation="triton")) == [None]
