"""What is simulated for each table and figure of the paper; every function gives plain numbers."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from reproduce.lengths import WINDOW, carried, documents, dropped, stated
from reproduce.paper import (
    LLAMA_405B,
    PAPER_DEGREES,
    Setting,
    attention,
    configuration,
    forward_imbalance,
    scenario,
)

from wlb_titan.context.layout import per_document, per_sequence
from wlb_titan.cost.models import PAPER_MODELS
from wlb_titan.dimensions.degrees import Degrees
from wlb_titan.job import Policy
from wlb_titan.packing import POLICIES, PackingPolicy
from wlb_titan.packing.predicted import attention_seconds
from wlb_titan.plan import DELAY, LENGTH
from wlb_titan.simulator.choice import Scenario

PLAIN = Policy("plain", "per_sequence")
FIXED = (Policy("fixed_greedy", "per_sequence"), Policy("fixed_greedy", "per_document"))
WLB = Policy("wlb", "adaptive")
OURS = (Policy("wlb_lazy", "hybrid"), Policy("wlb_lazy", "hybrid", "best"))
SLIM = Policy("slim", "hybrid")


def speedups(one: Scenario, policies: tuple[Policy, ...], steps: int) -> dict[str, Any]:
    """Each policy's tokens per second over Plain-4D's, and facts of Plain-4D's step."""
    plain = one.predict(PLAIN, steps)
    result: dict[str, Any] = {
        "plain": {
            "step_seconds": float(plain.seconds.mean()),
            "mfu": plain.mfu,
            "bubble": plain.bubble,
            "checkpointing": one.job.memory.checkpointing,
            "max_length": one.job.under(WLB).longest_micro_batch,
        }
    }
    for policy in policies:
        prediction = one.predict(policy, steps)
        result[str(policy)] = prediction.tokens_per_second / plain.tokens_per_second
        result[f"{policy} step_seconds"] = float(prediction.seconds.mean())
    return result


def table_2(setting: Setting, steps: int, solver_steps: int) -> list[dict[str, Any]]:
    """Imbalance degree of forward latency and milliseconds of packing, N = 4, 7B-128K."""
    rows: list[tuple[str, PackingPolicy.Config, float | None, float | None]] = [
        ("Original Packing", POLICIES.configure("plain"), 1.44, 0),
        ("Fixed-Len Greedy, 1 global batch", POLICIES.configure("fixed_greedy", global_batches=1), 1.41, 4),
        ("Fixed-Len Greedy, 2", POLICIES.configure("fixed_greedy", global_batches=2), 1.22, 5),
        ("Fixed-Len Greedy, 4", POLICIES.configure("fixed_greedy", global_batches=4), 1.11, 5),
        ("Fixed-Len Greedy, 8", POLICIES.configure("fixed_greedy", global_batches=8), 1.08, 5),
        ("Fixed-Len Solver, 1", POLICIES.configure("fixed_solver", global_batches=1), 1.40, 467),
        ("Fixed-Len Solver, 2", POLICIES.configure("fixed_solver", global_batches=2), 1.18, 1488),
        ("Fixed-Len Solver, 4", POLICIES.configure("fixed_solver", global_batches=4), 1.09, 25313),
        ("WLB-LLM, 1 queue", POLICIES.configure("wlb", queues=1), 1.24, 8),
        ("WLB-LLM, 2 queues", POLICIES.configure("wlb", queues=2), 1.05, 20),
        ("WLB-LLM, 3 queues", POLICIES.configure("wlb", queues=3), 1.05, 23),
        ("wlb_lazy (ours)", POLICIES.configure("wlb_lazy"), None, None),
    ]
    result = []
    for name, packing, theirs, their_ms in rows:
        count = solver_steps if packing.name == "fixed_solver" else steps
        one = configuration(setting, "7B-128K", packing=packing)
        plans = one.plans(Policy(packing.name), count)
        # The overhead of packing several batches together is shared by their steps, as in the paper.
        mean = np.mean if packing.name.startswith("fixed") else np.median
        result.append(
            {
                "method": name,
                "imbalance": forward_imbalance(one, plans),
                "theirs": theirs,
                "ms": float(mean([plan.plan_ms for plan in plans[:50]])),
                "their_ms": their_ms,
                "delay": float(np.mean([plan.delay for plan in plans[:50]])),
            }
        )
    return result


def large_job(setting: Setting, steps: int) -> dict[str, Any]:
    """Figures 1 and 4: computation of every GPU of the 405B job, (TP, CP, PP, DP) = (8, 16, 16, 4), 128K."""
    degrees = Degrees(tensor=8, context=16, pipeline=16, shard=4)
    one = scenario(setting, LLAMA_405B, degrees, WINDOW)
    token = one.job.token
    attention_of, computation_of = [], []
    for plan in one.plans(PLAIN, steps):
        attending = np.zeros((4, 16))
        tokens = np.zeros(4)
        for m in plan.micro_batches:
            attending[m.dp_rank] += attention_seconds(m, one.job).sum(axis=1)
            tokens[m.dp_rank] += m.length
        linear = 3 * tokens[:, None] * (token.matrices + token.elements)
        attention_of.append(attending)
        computation_of.append(attending + linear)
    a, c = np.array(attention_of), np.array(computation_of)

    def spread(values: np.ndarray) -> float:
        """Largest over mean of the others, mean of the steps."""
        flat = values.reshape(len(values), -1)
        most = flat.max(axis=1)
        return float((most / ((flat.sum(axis=1) - most) / (flat.shape[1] - 1))).mean())

    return {
        "slowest_gpu_computation": spread(c),
        "slowest_gpu_attention": spread(a),
        "slowest_gpu_attention_of_all_steps": spread(a.sum(axis=0, keepdims=True)),
        "steps": steps,
        "data_parallel_attention": spread(a.mean(axis=2)),
        "context_parallel_attention": float((a.max(axis=2) / a.mean(axis=2)).mean()),
        "attention": a[0].tolist(),
    }


def figure_3() -> dict[str, Any]:
    """Lengths of documents, and their mean by position, with the rest of cut documents carried on or lost."""
    lengths = documents()
    return {
        "carried": stated(carried(lengths, WINDOW)),
        "dropped": stated(dropped(lengths[:100_000], WINDOW)),
        "histogram": np.histogram(np.log2(carried(lengths, WINDOW)), bins=np.arange(4, 18))[0].tolist(),
    }


def figure_6(setting: Setting, steps: int) -> dict[str, Any]:
    """Packing over more global batches: imbalance of attention, Max_Attn / Avg_Attn in squares of lengths."""
    result: dict[str, Any] = {"window": [1, 2, 4, 8, 16], "imbalance": []}
    for window in result["window"]:
        packing = POLICIES.configure("fixed_greedy", global_batches=window)
        plans = configuration(setting, "7B-128K", packing=packing).plans(Policy("fixed_greedy"), steps)
        squares = [
            [float((m.documents[:, LENGTH] ** 2.0).sum()) for m in plan.micro_batches] for plan in plans
        ]
        result["imbalance"].append(float(np.mean(np.max(squares, axis=1) / np.mean(squares, axis=1))))
    return result


def figure_7(setting: Setting) -> dict[str, Any]:
    """Latency of attention and of everything else by document length, 7B-128K, one layer's worth of all."""
    one = configuration(setting, "7B-128K")
    d = 2 ** np.arange(9, 18)
    attending = one.job.latency.work(d, d)[0] / one.job.degrees.context * one.job.model.layers
    total = one.job.cost_model.forward(d)
    fine = np.arange(1024, 262144, 1024)
    share = one.job.latency.work(fine, fine)[0] / one.job.degrees.context * one.job.model.layers
    linear = one.job.cost_model.forward(fine) - share
    return {
        "tokens": d.tolist(),
        "attention": attending.tolist(),
        "linear": (total - attending).tolist(),
        "equal_at": int(fine[np.argmax(share > linear)]),
    }


def figure_10(setting: Setting) -> dict[str, Any]:
    """The attention kernel by query length: latency of many short segments, and achieved TFLOP/s."""
    latency = attention(PAPER_MODELS["7B"], 8, setting)
    lengths = [16, 32, 64, 96, 128, 160, 192, 224, 256]
    result: dict[str, Any] = {"q_len": lengths, "kv_len": 4096, "seconds": [], "tflops": []}
    for q in lengths:
        count = 512
        kernel = latency.forward
        work = kernel.work(np.full(count, q), np.full(count, 4096)).sum()
        seconds = float(kernel.launch + work * latency.heads / latency.units)
        flops = 4 * 128 * latency.heads * count * q * (4096 - (q - 1) / 2)
        result["seconds"].append(seconds)
        result["tflops"].append(float(flops / seconds / 1e12))
    return result


def figure_12(setting: Setting, steps: int) -> dict[str, Any]:
    """All configurations of Table 1."""
    policies = (*FIXED, WLB, *OURS, SLIM)
    return {name: speedups(configuration(setting, name), policies, steps) for name in PAPER_DEGREES}


def other_lengths(setting: Setting, steps: int) -> dict[str, Any]:
    """7B-128K on lengths of an open implementation of WLB-LLM, and their tokens in long documents."""
    result = {}
    for name in ("paper", "wlbllm", "prolong"):
        lengths = documents(name)
        one = configuration(setting, "7B-128K", lengths=name)
        result[name] = speedups(one, (WLB, OURS[1], SLIM), steps)
        result[name]["long"] = float(lengths[lengths >= WINDOW // 2].sum() / lengths.sum())
    return result


def figure_13(setting: Setting, steps: int) -> dict[str, Any]:
    """One optimization after the other, 7B-128K."""
    policies = (
        Policy("plain", "per_document"),
        Policy("plain", "adaptive"),
        Policy("wlb", "per_sequence"),
        WLB,
    )
    one = configuration(setting, "7B-128K")
    result = speedups(one, policies, steps)
    result["context_imbalance"] = {
        policy.packing: _context_imbalance(one, policy, steps) for policy in (PLAIN, Policy("wlb"))
    }
    return result


def _context_imbalance(one: Scenario, policy: Policy, steps: int) -> float:
    """Attention of the slowest context-parallel rank over the mean's, of all micro-batches together."""
    plans = one.plans(policy, steps)
    seconds = np.array([attention_seconds(m, one.job).sum(axis=1) for p in plans for m in p.micro_batches])
    return float(seconds.max(axis=1).sum() / seconds.mean(axis=1).sum())


def figure_14(setting: Setting, steps: int) -> dict[str, Any]:
    """7B with windows of 32K to 160K, at the degrees of 7B-128K."""
    return {
        f"{k}K": speedups(
            scenario(setting, PAPER_MODELS["7B"], PAPER_DEGREES["7B-128K"], k * 1024),
            (*FIXED, WLB, *OURS[1:]),
            steps,
        )
        for k in (32, 64, 96, 128, 160)
    }


def figure_15(setting: Setting, packs: int) -> dict[str, Any]:
    """A 7B layer on 4 context-parallel ranks: forward and backward by sharding."""
    result = {}
    for window, tensor in ((65536, 4), (131072, 8)):
        one = scenario(setting, PAPER_MODELS["7B"], Degrees(tensor=tensor, context=4, pipeline=1), window)
        token, latency = one.job.token, one.job.latency
        computed = 3 * (token.matrices + token.elements) * window
        exposed = token.tensor - min(setting.hidden * token.tensor, token.matrices)
        communicated = 2 * (exposed + token.context) * window
        seconds: dict[str, list[float]] = {"per_sequence": [], "per_document": []}
        for plan in one.plans(Policy("plain"), packs):
            lengths = plan.micro_batches[0].documents[:, LENGTH]
            for name, shard in (("per_sequence", per_sequence), ("per_document", per_document)):
                attending = latency.seconds(shard(lengths, window, 4)).max(axis=0).sum()
                seconds[name].append(attending + computed + communicated)
        sequence, document = np.array(seconds["per_sequence"]), np.array(seconds["per_document"])
        best = np.minimum(sequence, document)
        result[f"{window // 1024}K"] = {
            "per_document": float(sequence.sum() / document.sum()),
            "adaptive": float(sequence.sum() / best.sum()),
            "adaptive_over_per_document": float(document.sum() / best.sum()),
            "per_sequence_is_faster": float((sequence < document).mean()),
        }
    return result


def token_delay(setting: Setting, steps: int) -> float:
    """Iterations that a token waits under wlb, 7B-128K (section 6.4: 0.5)."""
    plans = configuration(setting, "7B-128K").plans(Policy("wlb"), steps)
    waited = sum(int(m.documents[:, LENGTH] @ m.documents[:, DELAY]) for p in plans for m in p.micro_batches)
    return waited / sum(plan.tokens for plan in plans)


def scale(setting: Setting, steps: int) -> list[dict[str, Any]]:
    """The same job at 1K, 8K and 100K GPUs: speedup, processor time and memory of planning and simulating."""
    result = []
    for gpus, degrees in (
        (1024, Degrees(tensor=8, context=16, pipeline=4, shard=2)),
        (8192, Degrees(tensor=8, context=16, pipeline=16, shard=4)),
        (98304, Degrees(tensor=8, context=16, pipeline=16, shard=48)),
    ):
        assert degrees.ranks == gpus
        n = 16 * degrees.data
        one = scenario(setting, PAPER_MODELS["70B"], degrees, WINDOW, micro_batches=n)
        row: dict[str, Any] = {"gpus": gpus, "micro_batches": n}
        plain_rate = None
        for policy in (PLAIN, FIXED[1], WLB, OURS[0]):
            count = steps if gpus < 50_000 else 1
            begin = time.process_time()
            plans = one.plans(policy, count, warm_up=2)
            planned = time.process_time()
            prediction = one.simulate(policy, plans)
            end = time.process_time()
            plain_rate = plain_rate or prediction.tokens_per_second
            row[str(policy)] = {
                "speedup": prediction.tokens_per_second / plain_rate,
                "step_seconds": float(prediction.seconds.mean()),
                "planning_seconds": (planned - begin) / (count + 2),
                "simulating_seconds": (end - planned) / count,
                "plan_mib": _plan_bytes(plans[-1]) / 2**20,
            }
        result.append(row)
    return result


def _plan_bytes(plan: Any) -> int:
    """Bytes of the arrays of one plan."""
    return sum(m.documents.nbytes + sum(rank.nbytes for rank in m.ranks or ()) for m in plan.micro_batches)
