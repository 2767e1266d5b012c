"""What several benchmarks share: lengths, cost model, a planner, and where results lie.

The lengths are made so that the original packing is as unbalanced as the paper's (1.44 with N = 4, a window
of 128K and the 7B model) and its other facts hold: most documents are short, the longest fill the window, and
more than 75 % of tokens lie in documents shorter than half the window.

- 99.4 % of documents: log-normal, median 460 tokens, sigma 1.3;
- 0.6 %: Pareto with exponent 0.5 between 16K and 1M tokens;
- none below 16 tokens, and those above the window are truncated to it, as the paper's loader does.

The work of a document is that of LLaMA2-7B in FLOPs, forward and backward, at equal efficiency:
3.5 x 262144 d^2 for attention (causal, 2 x 4096 x 32 a pair, 2.5 times that in the backward pass) and
3 x 13.2e9 d for linear layers. It needs no device to be reproduced: quadratic:917504,3.96e10.
"""

from __future__ import annotations

import json
import os
import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from wlb_titan import __version__
from wlb_titan.arrays import Ints
from wlb_titan.documents import Documents
from wlb_titan.job import Job
from wlb_titan.packing import PackingPolicy
from wlb_titan.planner import Planner

WINDOW = 131072
COST_MODEL = "quadratic:917504,3.96e10"
RESULTS = Path(__file__).parent / "results" / "cpu"


def synthetic_lengths(documents: int, seed: int = 1) -> Ints:
    """int64 (documents,), tokens; see the module's text."""
    rng = np.random.default_rng(seed)
    lengths = np.exp(rng.normal(np.log(460), 1.3, documents))
    tail = rng.random(documents) < 0.006
    low, high = (16384**-0.5, (8 * WINDOW) ** -0.5)
    lengths[tail] = (low - rng.random(int(tail.sum())) * (low - high)) ** -2.0
    return np.clip(lengths.astype(np.int64), 16, WINDOW)


def planner_of(
    documents: Documents, packing: PackingPolicy.Config, *, micro_batches: int, window: int = WINDOW
) -> Planner:
    """A planner of packing alone: one rank, COST_MODEL, micro-batches of at most two windows."""
    return Job(
        window=window,
        micro_batches=micro_batches,
        packing=replace(packing, cost_model=COST_MODEL),
        memory_unknown="a planner",  # so that two windows are the bound
    ).planner(documents)


def save(name: str, results: dict[str, Any]) -> None:
    """Writes RESULTS/name.json with what it was measured on."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    machine = {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],  # processes that wanted the cores besides; wall times suffer from them
    }
    head = {
        "wlb_titan": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": machine,
        "window": WINDOW,
        "cost_model": COST_MODEL,
    }
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({**head, **results}, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path}")
