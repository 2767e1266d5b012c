"""Measured passes beside their predictions: which ranks are slow, and the profile that a run's passes make.

A pass takes c_f or c_b in each layer whatever its tokens, a times what is predicted of all that grows with
tokens, b_f and b_b times the attention, and the waiting that is predicted, which is not fitted.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from wlb_titan.arrays import Floats
from wlb_titan.cost.attention_kernels import non_negative
from wlb_titan.cost.profile import Entry, LinearProfile, Profile
from wlb_titan.cost.workload import workload
from wlb_titan.job import Job
from wlb_titan.layers.passes import JobCost
from wlb_titan.packing.predicted import pass_seconds
from wlb_titan.plan import MicroBatch
from wlb_titan.simulator.measured import ROWS, Pass, without_waiting

JOB, RANK, PARTS = "job", "of", "predicted_parts"
"""Facts of a measured pass: its job's `fingerprint`, its rank and host, and its row of `pass_parts`."""

FACTORS = 5  # c_f, c_b, a, b_f, b_b
DIFFERS = 0.1  # of the predicted passes: a run says so
SLOWER = 1.15  # than equal work elsewhere: the rank is named
JUDGED = 2000  # passes of all ranks to which `slow_ranks` fits: while it does, all ranks wait
OUTLIER = 0.05  # relative error from which a pass counts less
SETTLED = 1e-4  # change of every relative error with which fitting ends
TINY = 1e-9  # instead of a factor of 0, in a denominator
PRIOR = 0.01  # of the weight that all passes give a factor


def fingerprint(job: Job) -> int:
    """Of what passes, and predictions for them, follow from."""
    sizes = (job.model, job.degrees.tensor, job.degrees.context, job.layers, job.window, job.cluster.name)
    facts = (*sizes, *filter(None, job.float8))
    return zlib.crc32(repr((facts, job.context.profile)).encode())


def as_predicted(job: Job) -> Floats:
    """float64 (FACTORS,), those of the predictions."""
    return np.array([*job.token.layer, 1.0, 1.0, 1.0])


def pass_parts(job: Job, micro_batches: Sequence[MicroBatch], passes: Sequence[Pass]) -> Floats:
    """float64 (passes, FACTORS + 1): what each factor multiplies in these passes of a data-parallel rank's
    micro-batches, and seconds of waiting. A row is 0 where nothing is predicted of a pass by itself."""
    computing, latency = job.on(without_waiting(job.cluster)), job.latency

    def seconds(forward: float, backward: float) -> Floats:
        kernels = latency.forward.slower(forward), latency.backward.slower(backward)
        attention = replace(latency, forward=kernels[0], backward=kernels[1])
        return pass_seconds(replace(computing, attention=attention), micro_batches)

    alone = seconds(1, 1)
    parts = np.zeros((FACTORS + 1, *alone.shape))
    parts[0, 0] = parts[1, 1] = np.array(job.layers)[:, None]
    parts[3:] = seconds(2, 1) - alone, seconds(1, 2) - alone, pass_seconds(job, micro_batches) - alone
    parts[2] = alone - parts[3] - parts[4] - np.tensordot(job.token.layer, parts[:2], 1)
    # A loss in chunks computes the head's gradients, too.
    chunked = job.memory.loss_chunks > 1
    head = job.token.head * np.array([m.shared_length for m in micro_batches])
    apart = parts.copy()
    apart[2, :, -1] -= head * chunked
    rows = np.zeros((len(passes), FACTORS + 1))
    for row, one in zip(rows, passes, strict=True):
        kind, place = one.kind, one.micro_batch
        if kind == "L":
            row[2] = 3 * head[place] * chunked
        elif not (job.packing.regroups and kind in "RB"):
            row[:] = (parts if kind == "FB" else apart)[:, ROWS[kind], one.stage, place].sum(axis=1)
    return rows


def fit(parts: Floats, seconds: Floats, prior: Floats) -> Floats:
    """float64 (FACTORS,), by least squares of relative errors, in which outliers count less; factors that the
    passes say little of stay near `prior`.

    Args:
        parts: of `pass_parts`.
        seconds: float64 (passes,), as measured.
    """
    predicted = (parts[:, :FACTORS] != 0).any(axis=1)
    columns = parts[predicted, :FACTORS] / seconds[predicted, None]
    target = 1 - parts[predicted, FACTORS] / seconds[predicted]
    norms = np.sqrt((columns**2).sum(axis=0))
    strength = np.diag(PRIOR * np.where(norms > 0, norms, 1.0))
    weights, factors = np.ones(len(target)), prior
    for _ in range(20):
        rows = np.concatenate([columns * weights[:, None], strength])
        # As many rows as factors have the same least squares, which are solved for each subset of them.
        few = np.linalg.cholesky(rows.T @ rows)
        aims = rows.T @ np.concatenate([target * weights, strength @ prior])
        former, factors = factors, non_negative(few.T, np.linalg.solve(few, aims))
        if np.allclose(columns @ factors, columns @ former, rtol=0, atol=SETTLED):
            break
        weights = np.sqrt(OUTLIER / np.maximum(np.abs(columns @ factors - target), OUTLIER))
    return factors


def measurements(passes: Sequence[Pass]) -> tuple[Floats, Floats]:
    """What `fit` takes of passes with their `PARTS`."""
    return np.array([p.facts[PARTS] for p in passes]), np.array([p.seconds for p in passes])


def slow_ranks(passes: Sequence[Pass], prior: Floats) -> dict[str, float]:
    """Ranks whose passes take longer than equal work on the others, and how many times as long."""
    parts, seconds = measurements(passes)
    some = np.random.default_rng(0).permutation(len(seconds))[:JUDGED]
    predicted = parts @ [*fit(parts[some], seconds[some], prior), 1.0]
    took = np.where(parts.any(axis=1), seconds, 0.0)
    names, of = np.unique([p.facts[RANK] for p in passes], return_inverse=True)
    ratios = np.bincount(of, took) / np.bincount(of, predicted)
    slow = {}
    for place, name in enumerate(names):
        over = ratios[place] / np.median(np.delete(ratios, place)) if len(names) > 1 else 1.0
        if over > SLOWER:
            slow[str(name)] = float(over)
    return slow


def calibrated(job: Job, factors: Floats, software: str, experts: float = 1.0) -> Profile:
    """The job's predictions times the factors, as a profile; the busiest rank's `experts` had so many times
    their share of the tokens."""
    *layer, linear, forward, backward = map(float, factors)
    shape, latency = job.attention_shape, job.latency
    facts = (shape.head_dim, shape.group, shape.dtype)
    entries = [
        Entry(*facts, "forward", latency.forward.slower(forward), (), "as trained", shape.v_head_dim),
        Entry(*facts, "backward", latency.backward.slower(backward), (), "as trained", shape.v_head_dim),
    ]
    cluster, alone = job.measured_cluster, replace(job, context=replace(job.context, profile=""))
    even, uneven = (
        workload(JobCost(alone.on(replace(cluster, experts=times))), np.ones(1)).sum()
        for times in (cluster.experts, experts)
    )
    slower = max(linear * even / uneven, TINY)
    rates = LinearProfile(job.dtype, cluster.linear_flops / slower, cluster.memory_bandwidth / slower)
    units = latency.units + job.sm_margin
    name, fixed = f"{cluster.name}, as trained", (layer[0], layer[1])
    return Profile(name, units, software, tuple(entries), rates, fixed, experts)
