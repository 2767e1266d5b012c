"""The check of the kernels sees what a broken one would leave; here the reference is broken, or the emulated
kernels are. And its segments make the kernels do all that they can.
"""

from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from wlb_titan.kernels import op, reference, self_check
from wlb_titan.kernels.segments import NO_WINDOW, Options, Shape, check_segments

CPU = torch.device("cpu")
SHAPE = Shape(4, 2, 16, 24)
OPTIONS = Options(0.25)
SEGMENTS = {
    "rich": self_check.rich_segments(2, units=1, scale=20),
    "chunk": torch.tensor([[0, 128, 0, 700]], dtype=torch.int32),
}
UNITS = 132


class Broken:
    """The reference, whose results `change` changes in some calls: the judge's come first."""

    def __init__(self, monkeypatch, name="", change=None, calls=lambda call: call > 0):
        self.forwards, self.backwards = count(), count()
        self.name, self.change, self.calls = name, change, calls
        monkeypatch.setattr(reference, "forward", self.forward)
        monkeypatch.setattr(reference, "backward", self.backward)

    def _changed(self, names, tensors, call):
        return tuple(
            self.change(x.clone()) if name == self.name and self.calls(call) else x
            for name, x in zip(names, tensors, strict=True)
        )

    def forward(self, *arguments):
        return self._changed(("out", "lse"), FORWARD(*arguments), next(self.forwards))

    def backward(self, *arguments):
        return self._changed(("dq", "dk", "dv"), BACKWARD(*arguments), next(self.backwards))


FORWARD, BACKWARD = reference.forward, reference.backward


def check(segments=SEGMENTS["rich"], options=OPTIONS):
    return self_check.check_kernels(self_check.Noise.on(segments, SHAPE, torch.float32, CPU), options)


@pytest.mark.parametrize("window", [None, 6, 51])
@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS)
def test_what_is_right_passes(segments, window):
    """With a window most of a chunk's keys get no gradient at all."""
    assert check(segments, Options(0.25, window)) < 1e-5


@pytest.mark.parametrize("name", ["out", "lse", "dq", "dk", "dv"])
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_any_row_that_is_wrong_is_found(name, data):
    """A row of a head, left as it was, added twice or 10 % too large: the whole norm may not see it."""
    segments = SEGMENTS["chunk"]
    tokens = int(segments[0, 3 if name in ("dk", "dv") else 1])
    row = data.draw(st.integers(0, tokens - 1))
    head = data.draw(st.integers(0, (2 if name in ("dk", "dv") else 4) - 1))
    factor = data.draw(st.sampled_from([0.0, 2.0, 1.1, torch.nan]))

    def change(x):
        place = (head, row) if name == "lse" else (row, head)
        # Where a gradient nearly cancels, its size is that of the usual row's.
        lost = x[place].norm() < 0.5 * x.norm() / x.shape[0] ** 0.5
        x[place] = x[place] * factor if not lost else x[place] + x.norm()
        return x

    with pytest.MonkeyPatch.context() as patch:
        Broken(patch, name, change)
        with pytest.raises(self_check.KernelError, match=f"^{name} is"):
            check(segments)


def test_what_differs_when_repeated_is_found(monkeypatch):
    def flip(dq):
        dq[40, 1, 3] = torch.nextafter(dq[40, 1, 3], torch.tensor(2.0))
        return dq

    Broken(monkeypatch, "dq", flip, calls=lambda call: call == 2)
    with pytest.raises(self_check.KernelError, match=r"dq differs in 1 of .* tokens when it is repeated"):
        check()


def test_what_nobody_writes_is_found(monkeypatch):
    Broken(monkeypatch, "dv", torch.empty_like)
    with pytest.raises(self_check.KernelError, match="dv is nan"):
        check()
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_launch_that_does_not_end(monkeypatch):
    class Never:
        def record(self):
            pass

        def query(self):
            return False

    monkeypatch.setattr(torch.cuda, "Event", Never)
    monkeypatch.setattr(op, "current", lambda device: torch.no_grad())
    monkeypatch.setattr(self_check, "PATIENCE", 0.05)
    with pytest.raises(self_check.KernelError, match="has not ended"):
        self_check._wait(torch.device("cuda"))


def head_layouts() -> set[tuple[int, int]]:
    """Query and key heads of a rank, of every configuration that ships for GPUs."""
    from wlb_titan.runtime.job import model_shape
    from wlb_titan.runtime.models.load import load_config

    found = set()
    for path in sorted((Path(__file__).parents[2] / "train_configs").glob("*.toml")):
        if path.name.startswith("cpu"):
            continue
        config = load_config(str(path), ()).config
        tensor, model = config.parallelism.tensor_parallel_degree, model_shape(config.model_spec.model)
        found.add((model.heads // tensor, model.kv_heads // tensor))
    return found


def coverage(heads: tuple[int, int], units: int = UNITS) -> dict:
    """For each division of the backward: tiles a multiprocessor, the largest turn, items with steps that need
    no mask, and steps of a tile.
    """
    from wlb_titan.kernels import gluon_launch, tiles

    segments = self_check.rich_segments(heads[1], units).numpy()
    kv_tokens = int((segments[:, 2] + segments[:, 3]).max())
    found = {}
    for divided in gluon_launch.divisions(*heads, NO_WINDOW):
        rows = 64 // divided.pack
        lists = tiles.key_tiles(segments, kv_tokens, tokens=rows, block_n=128, turn_rows=rows)
        groups = heads[0] // heads[1] // divided.split // divided.pack
        found[divided] = {
            "tiles": len(lists.tiles) * heads[1] * divided.split / units,
            "turn": int(lists.items[:, 5].max()),
            "unmasked": int((lists.items[:, 1] < lists.items[:, 2]).sum()),
            "steps": lists.heaviest * groups,
        }
    return found


def test_the_check_covers_what_the_kernels_can_do():
    """For the heads of every configuration that ships, and those of the trial, in every division."""
    from wlb_titan.kernels.trial import LAYOUTS

    ships = head_layouts()
    assert (6, 6) in ships  # of llama2_30b_64k.toml, whose degrees are those of the file that it extends
    for heads in sorted(ships | set(LAYOUTS) | {(4, 1), (5, 1), (32, 1), (32, 32), (40, 8)}):
        for divided, found in coverage(heads).items():
            assert found["tiles"] >= self_check.TILES, (heads, divided, found)
            assert min(found["turn"], found["unmasked"]) > 8 and found["steps"] > 2, (heads, divided, found)


def test_rich_segments_have_gaps_and_shared_keys():
    for heads, units, scale in ((1, 132, 1), (8, 132, 1), (2, 1, 20)):
        segments = self_check.rich_segments(heads, units, scale).numpy().astype(np.int64)
        q0, q, k0, k = segments.T
        check_segments(segments, int((q0 + q).max()), int((k0 + k).max()))
        assert (q0[1:] > (q0 + q)[:-1]).sum() == len(self_check.LONG)
        chunks = segments[len(self_check.LONG) : len(self_check.LONG) + 2]
        assert chunks[0, 2] == chunks[1, 2] and chunks[0, 3] < chunks[1, 3]
