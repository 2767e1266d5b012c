"""The paper's tables and figures in simulation, beside the paper's figures.

    python benchmarks/reproduce/run.py              # about 10 minutes on one core
    python benchmarks/reproduce/run.py --page-only  # docs/reproduction.md anew from the last results

Writes benchmarks/results/cpu/reproduction.json, docs/reproduction.md and docs/reproduction/*.svg. What is
assumed and what is calibrated stands in paper.py.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from typing import Any

import experiments
import numpy as np
from experiments import RESULTS
from page import write_page
from paper import CLUSTER, SLOWDOWN, TAIL, calibrated_slowdown, configuration, forward_imbalance, loaded
from pictures import draw_all

from wlb_titan import __version__


def measured(steps: int, results: dict[str, Any], only: list[str]) -> dict[str, Any]:
    """All experiments or only some of them, with a line on the console for each."""
    lengths = loaded(131072)
    results["setup"] = {
        "wlb_titan": __version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "cluster": CLUSTER,
        "tail": TAIL,
        "slowdown": SLOWDOWN,
        "steps": steps,
        "imbalance_uncalibrated": forward_imbalance(
            configuration("7B-128K", slowdown=1.0), experiments.PLAIN, 4 * steps
        ),
        "tokens_below_half_the_window": float(lengths[lengths < 65536].sum() / lengths.sum()),
    }
    todo = {
        "calibrated_slowdown": lambda: calibrated_slowdown(),
        "table_2": lambda: experiments.table_2(4 * steps, 8),
        "large_job": lambda: experiments.large_job(3),
        "figure_6": lambda: experiments.figure_6(2 * steps),
        "figure_7": experiments.figure_7,
        "figure_10": experiments.figure_10,
        "figure_12": lambda: experiments.figure_12(steps),
        "figure_12_uncalibrated": lambda: experiments.figure_12(steps, slowdown=1.0, ours=False),
        "figure_13": lambda: experiments.figure_13(2 * steps),
        "figure_14": lambda: experiments.figure_14(steps),
        "figure_15": lambda: experiments.figure_15(2 * steps),
        "token_delay": lambda: experiments.token_delay(2 * steps),
        "scale": lambda: experiments.scale(3),
        "speed": experiments.speed,
    }
    for name, run in todo.items():
        if only and name not in only:
            continue
        begin = time.perf_counter()
        results[name] = run()
        print(f"{name:24} {time.perf_counter() - begin:6.1f} s", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=50, help="steps simulated for each bar of a figure")
    parser.add_argument("--page-only", action="store_true", help="draw and write from the last results")
    parser.add_argument("--only", action="append", default=[], help="measure this part alone, such as scale")
    arguments = parser.parse_args()
    path = RESULTS / "reproduction.json"
    if not arguments.page_only:
        results = json.loads(path.read_text()) if arguments.only else {}
        results = measured(arguments.steps, results, arguments.only)
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    results = json.loads(path.read_text())
    draw_all(results)
    print(f"wrote {write_page(results)}")


if __name__ == "__main__":
    main()
