"""`wlb-titan rehearse`: what a rank's collectives bring and count, and what is measured of its steps."""

import json
import os
import subprocess
import sys
import time
import weakref
from itertools import pairwise, product

import numpy as np
import pytest
import torch
import torch.distributed as dist
from commands import invoke

from wlb_titan.cost.cluster import load_cluster
from wlb_titan.prepare.prepare import write_synthetic_corpus
from wlb_titan.runtime.one_rank.lone import OneRankTrainer
from wlb_titan.runtime.one_rank.rehearsal import ANSWER, STEP, Traffic, without_answers
from wlb_titan.simulator.measured import Pass

pytestmark = pytest.mark.slow

JOB = """
base = "llama3_debug"
wlb.corpus.path = "{corpus}"
training = {{ seq_len = 256, local_batch_size = 2 }}
"""
PP, CP, TP = (f"--parallelism.{axis}_parallel_degree" for axis in ("pipeline", "context", "tensor"))
DP = "--parallelism.data_parallel_shard_degree"
SLIM = ("--wlb.policy", "slim", "--wlb.packing.micropacks", "4")
JOBS = {  # what changes the job, and the kinds of its passes
    "pipeline, context and tensor": ((PP, 2, CP, 2, TP, 2), ["F", "B", "L"]),
    "data": ((DP, 2), ["FB"]),
    "ulysses": ((CP, 2, "--wlb.policy", "plain/ulysses"), ["FB"]),
    "slices": ((PP, 2, CP, 2, *SLIM), ["F", "B", "L"]),
    "slices, shared": ((DP, 2, "--wlb.packing.dp_merge", "true", *SLIM), ["F", "B"]),
}


@pytest.fixture
def written(forked_ranks, tmp_path):
    """Runs a command, and gives what it writes and what it says."""

    def run(*words):
        result = invoke(*words, "--output", tmp_path / "out.json")
        assert result.exit_code == 0 and not result.stderr, result.output
        return json.loads((tmp_path / "out.json").read_text()), result.stdout

    return run


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    path = tmp_path_factory.mktemp("rehearsal") / "job.toml"
    lengths = np.random.default_rng(0).lognormal(4.5, 1.2, 500).astype(int).clip(2, 500)
    write_synthetic_corpus(path.parent / "corpus", lengths)
    path.write_text(JOB.format(corpus=path.parent / "corpus"))
    return path


@pytest.mark.parametrize("case", JOBS)
@pytest.mark.long
def test_a_rank_moves_what_a_dry_run_says_and_measures_every_pass(written, job, case):
    """Bytes of a step's collectives by kind and axis, beside those that a dry run traces."""
    changes, kinds = JOBS[case]
    # Both of a first step: from the second on FSDP gathers the model's ends once more.
    words = (job, "--rank", "last", "--step", 1, *changes)
    rehearsed, _ = written("rehearse", *words, "--steps", 1)
    ((rank,),) = [one["ranks"] for one in rehearsed["policies"]]
    (dry,), _ = written("dryrun", *words)
    moved, traced = ({(c["kind"], c["over"]): c["gib"] for c in one["collectives"]} for one in (rank, dry))
    assert moved
    assert moved == pytest.approx(traced, abs=2**-20)  # a pipeline's first run sends a few words besides
    (step,) = rank["steps"]
    assert (rank["coordinates"], step["lengths"]) == (dry["coordinates"], dry["lengths"])
    passes = [Pass(**one) for one in step["passes"]]
    expected = product(kinds, range(len(step["lengths"])))
    assert sorted((one.kind, one.micro_batch) for one in passes) == sorted(expected)
    assert all(0 < one.seconds < np.inf for one in passes)
    waited = sum(one.waited for one in passes)
    assert sum(one.seconds for one in passes) + waited + step["optimizer"] <= step["seconds"] * 1.001
    # On a CPU passes wait for every collective but what stages send; those outside passes are at the end.
    asked = 0.0
    for each in rank["collectives"]:
        if each["kind"] not in ("send", "receive"):
            neighbours = each["over"] == "tp" or (TP not in changes and each["over"] != "pp")
            link = load_cluster("cpu").link(2, 1 if neighbours else 2)
            bytes_ = each["gib"] * 2**30 * (1 + (each["kind"] == "all-reduce"))
            asked += each["number"] * link.collective(bytes_ / each["number"], 2)
    assert asked / 2 < waited < asked <= (waited + step["optimizer"]) * (1 + 1e-9)


def test_the_table_and_the_policies(forked_ranks, on_terminal, job, tmp_path):
    said, shown = on_terminal(
        *("rehearse", job, "--rank", "all-stages", "--steps", 2, "--step", 3, PP, 2),
        *("--output", tmp_path / "out.json"),
        *("--policies", "plain/per_sequence/as_packed,wlb_lazy/per_sequence/best"),
        *("--wlb.policy", "wlb//best"),  # of the file, which is neither
    )
    assert {f"{what} wlb_lazy/per_sequence/best" for what in ("Planning", "Running ranks,")} <= shown
    plain, lazy = json.loads((tmp_path / "out.json").read_text())["policies"]
    assert (plain["policy"], lazy["policy"]) == ("plain/per_sequence", "wlb_lazy/per_sequence/best")
    for one in (plain, lazy):
        assert [rank["rank"] for rank in one["ranks"]] == [0, 1]
        assert len(one["rehearsed"]["seconds"]) == len(one["predicted"]["seconds"]) == 2
        assert one["rehearsed"]["flops"] == one["predicted"]["flops"]
        # A step is at least as long as what its busiest rank measured of it.
        for number, seconds in enumerate(one["rehearsed"]["seconds"]):
            own = [sum(p["seconds"] for p in rank["steps"][number]["passes"]) for rank in one["ranks"]]
            assert seconds >= max(own) * (1 - 1e-9)
    assert "all 8 passes" in said and "±" in said


def test_what_does_not_fit_is_said_in_the_predictions_words_and_mistakes_are_refused(forked_ranks, job):
    result = invoke("rehearse", job, "--rank", "first", "--base", "llama2_70b")
    assert result.exit_code == 1
    assert "cannot fit" in result.stdout and "tokens in flight" in result.stdout
    for words, message in ((("--output", "/nowhere/x.json"), "/nowhere"), (("--policies", "wlbb"), "wlbb")):
        result = invoke("rehearse", job, *words)
        assert result.exit_code == 2 and message in result.stderr, result.output


def test_the_backward_pass_stays_in_the_thread_that_has_the_meshes():
    """An accelerator's would run in another, where what it repeats of the forward pass is not gathered."""

    class Alone(OneRankTrainer):
        def __init__(self):
            pass

        def start_group(self):
            raise InterruptedError

    with torch.autograd.set_multithreading_enabled(True):
        with pytest.raises(InterruptedError):
            Alone().init_distributed()
        assert not torch._C._is_multithreading_enabled()


def nothing(length, dtype=torch.float32):
    return torch.full([length], float("nan") if dtype.is_floating_point else -1, dtype=dtype)


@pytest.fixture
def traffic():
    return Traffic()


@pytest.fixture
def group(traffic):
    made = traffic.make_group(dist.HashStore(), 1, 4, None)
    made._set_group_name("test")
    return made


GATHERED, DIFFERENT, OWN = [1, 2, 3] * 4, None, [1, 2, 0, 0]
COLLECTIVES = {  # a call, and what it writes
    "all-gather": (lambda g, out, own: g.all_gather_single(out, own), GATHERED),
    "all-gather in place": (lambda g, out, own: g.all_gather_single(out, out[3:6].copy_(own)), GATHERED),
    "all-gather of a list": (lambda g, out, own: g.allgather([list(out.split(3))], [own]), GATHERED),
    "reduce-scatter": (lambda g, out, own: g.reduce_scatter_single(out[:2], torch.arange(8.0)), [2, 3]),
    "all-to-all, more": (lambda g, out, own: g.all_to_all_single(out, own, [3] * 4, OWN), GATHERED),
    "all-to-all, fewer": (lambda g, out, own: g.all_to_all_single(out[:2], own, [1, 1, 0, 0], OWN), [1, 2]),
    "of nothing": (lambda g, out, own: g.all_to_all_single(out, own[:0], [3] * 4, [0] * 4), [0] * 12),
    "receive": (lambda g, out, own: g.recv([out], 0, 0), DIFFERENT),
    "broadcast": (lambda g, out, own: g.broadcast([out], dist.BroadcastOptions()), DIFFERENT),
    "scatter": (lambda g, out, own: g.scatter([out], [], dist.ScatterOptions()), DIFFERENT),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_nothing_uninitialised_comes_back(group, name):
    call, expected = COLLECTIVES[name]
    out = nothing(12)
    call(group, out, torch.tensor([1.0, 2.0, 3.0])).wait()
    if expected is DIFFERENT:
        assert out.isfinite().all() and len(set(out.tolist())) == 12
    else:
        assert out[: len(expected)].tolist() == expected


def test_no_tensor_is_kept(group):
    """Or a rank would take more memory than it does in the job."""
    out = nothing(12)
    kept = weakref.ref(out)
    group.all_gather_single(out, torch.zeros(3)).wait()
    del out
    assert kept() is None


def test_bytes_are_those_of_the_larger_side(group, traffic):
    group.all_gather_single(nothing(12), torch.zeros(3))
    group.reduce_scatter_single(nothing(2), torch.zeros(8))
    group.send([torch.zeros(5, dtype=torch.bfloat16)], 0, 0)
    group.recv([nothing(5, dtype=torch.int64)], 0, 0)
    bytes_ = {"all-gather": 48, "reduce-scatter": 32, "send": 10, "receive": 40}
    assert traffic.asked == [(kind, "test", size) for kind, size in bytes_.items()]


def test_answers_are_taken_out_of_what_they_lie_in():
    measured = [
        Pass(ANSWER, 0, 0, 0.5, 0.25, waited=0),  # before the first pass: a receive
        Pass("F", 0, 0, 1.0, 2.0),
        Pass(ANSWER, 0, 0, 1.5, 0.5, waited=0.25),
        Pass(ANSWER, 0, 0, 2.5, 0.25, waited=0.5),
        Pass("B", 0, 0, 3.0, 1.0),
        Pass(ANSWER, 0, 0, 4.5, 0.5, waited=16.0),  # of clipping
        Pass(STEP, 0, 0, 0.0, 6.0),
    ]
    passes, seconds, optimizer = without_answers(measured)
    assert [(one.kind, one.seconds) for one in passes] == [("F", 1.25), ("B", 1.0)]
    assert [one.pieces for one in passes] == [[0.5, 0.5, 0.25], [1.0]]
    assert [one.waited for one in passes] == [0.75, 0]
    assert (seconds, optimizer) == (4.5 + 16.75, 1.5 + 16.0)
    assert all(one.start <= other.start for one, other in pairwise(passes))
    assert np.isclose(sum(one.seconds for one in passes) + optimizer, 3.75 + 16)


def test_sigterm_ends_the_ranks(tmp_path):
    """Ranks that would sleep for minutes: those under way end, and those that wait do not begin."""
    script = """
from types import SimpleNamespace
from wlb_titan.commands.command_line import Asked
from wlb_titan.commands.lone_ranks import run_ranks
from wlb_titan.job import Job
from wlb_titan.runtime import one_rank
one_rank.PROCESS = 'sleeping'
config = SimpleNamespace(wlb=SimpleNamespace(cluster='cpu', device='cpu'))
loaded = SimpleNamespace(config=config, file='job.toml', overrides=())
run_ranks(Asked(Job(window=8, micro_batches=1), None, loaded), 'dryrun', [0, 1, 2], 2)
"""
    sleeping = f"""
import os, pathlib, time
pathlib.Path({str(tmp_path)!r}, str(os.getpid()) + '.pid').touch()
time.sleep(600)
"""
    (tmp_path / "sleeping.py").write_text(sleeping)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    process = subprocess.Popen([sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": path})
    while len(pids := list(tmp_path.glob("*.pid"))) < 2:
        time.sleep(0.05)
    process.terminate()
    assert process.wait(60) == 143
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid.stem), 0)
