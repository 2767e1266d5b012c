"""The paper's tables and figures in simulation, beside the paper's figures.

    python benchmarks/reproduction.py              # about 10 minutes on one core
    python benchmarks/reproduction.py --page-only  # docs/reproduction.md again from the last results
    python benchmarks/reproduction.py --only figure_12

Writes benchmarks/results/cpu/reproduction.json, docs/reproduction.md and docs/reproduction/*.svg. What the
papers state is in stated.toml, what is assumed in paper.py. Every experiment runs under every combination of
what is not stated, and its results are ranges; what takes long and hardly depends on it, under `ONE` of them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from common import machine, save, saved
from reproduce import experiments
from reproduce.page import write_page
from reproduce.paper import CLUSTER, SETTINGS, Setting, calibrated
from reproduce.pictures import draw_all

from wlb_titan.documents.lengths import NAMED

ONE = 8  # of SETTINGS: attention as in Table 2, 2 stages a rank, no TP exposed


EVERYWHERE: dict[str, Callable[[Setting, int], Any]] = {
    "table_2": lambda setting, steps: experiments.table_2(setting, 4 * steps, 4),
    "large_job": lambda setting, steps: experiments.large_job(setting, 4),
    "figure_7": lambda setting, steps: experiments.figure_7(setting),
    "figure_10": lambda setting, steps: experiments.figure_10(setting),
    "figure_12": experiments.figure_12,
    "figure_13": lambda setting, steps: experiments.figure_13(setting, 2 * steps),
    "figure_14": experiments.figure_14,
    "figure_15": lambda setting, steps: experiments.figure_15(setting, 2 * steps),
    "delay": lambda setting, steps: experiments.token_delay(setting, 2 * steps),
}
"""What is simulated under every setting."""

UNDER_ONE: dict[str, Callable[[Setting, int], Any]] = {
    "figure_6": lambda setting, steps: experiments.figure_6(setting, 2 * steps),
    "other_lengths": experiments.other_lengths,
    "scale": lambda setting, steps: experiments.scale(setting, 3),
}
"""What is simulated under `ONE`."""


def measured(steps: int) -> dict[str, Any]:
    """All experiments, with a line on the console for each setting."""
    results: dict[str, Any] = {
        "setup": {
            **machine(),
            "cluster": CLUSTER,
            "lengths": {"median": NAMED["paper"].median, "sigma": NAMED["paper"].sigma},
            "steps": steps,
            "one": ONE,
        },
        "figure_3": experiments.figure_3(),
        "settings": {},
    }
    for number, bare in enumerate(SETTINGS):
        begin = time.perf_counter()
        setting = calibrated(bare, steps)
        found = {name: simulated(setting, steps) for name, simulated in EVERYWHERE.items()}
        found["setting"] = asdict(setting)
        results["settings"][str(setting)] = found
        both = found["figure_13"]
        print(
            f"{setting}: {setting.linear_flops / 1e12:.0f} TFLOP/s, slowdown {setting.slowdown:.2f}, "
            f"step {both['wlb/adaptive step_seconds']:.2f} s, both {both['wlb/adaptive']:.3f}, "
            f"{time.perf_counter() - begin:.0f} s",
            flush=True,
        )
        if number == ONE:
            results |= {name: simulated(setting, steps) for name, simulated in UNDER_ONE.items()}
    return results


def again(results: dict[str, Any], name: str, steps: int) -> None:
    """One of these anew, under the settings as they were calibrated."""
    if name in UNDER_ONE:
        one = list(results["settings"].values())[results["setup"]["one"]]["setting"]
        results[name] = UNDER_ONE[name](Setting(**one), steps)
        return
    for key, found in results["settings"].items():
        begin = time.perf_counter()
        found[name] = EVERYWHERE[name](Setting(**found["setting"]), steps)
        print(f"{key}: {time.perf_counter() - begin:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="steps simulated for each bar of a figure")
    parser.add_argument("--page-only", action="store_true", help="draw and write from the last results")
    parser.add_argument("--only", choices=[*EVERYWHERE, *UNDER_ONE], help="simulate this anew, keep the rest")
    arguments = parser.parse_args()
    anew = not (arguments.page_only or arguments.only)
    results = measured(arguments.steps) if anew else saved("reproduction")
    if arguments.only:
        again(results, arguments.only, arguments.steps)
    if not arguments.page_only:
        save("reproduction", results)
    results["loss_curves"] = saved("loss_curves")
    draw_all(results)
    print(f"wrote {write_page(results)}")


if __name__ == "__main__":
    main()
