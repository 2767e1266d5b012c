"""Whether the balancing policies are ever worse than `plain`: imbalance on many corpora, windows and N.

    wlb-titan prepare FILES
    python benchmarks/packing_never_worse.py --files FILES

Six corpora are drawn, one is Python source. Work is that of the 7B model in FLOPs, as
`common/packing.py` says.
"""

from __future__ import annotations

import warnings
from typing import Any

import click
import numpy as np
from common.packing import planner_of, save, synthetic_lengths
from numpy.typing import NDArray

from wlb_titan.corpus import Corpus
from wlb_titan.documents import Documents
from wlb_titan.packing import POLICIES
from wlb_titan.summary import Summary

COMPARED = ("plain", "wlb", "wlb_lazy")
WINDOWS = (1024, 4096, 131072)
DOCUMENTS = 200_000


def drawn() -> dict[str, NDArray[np.int64]]:
    """Six corpora of made-up lengths, from equal ones to a tail without end."""
    rng = np.random.default_rng(1)
    return {
        "the paper's tail": synthetic_lengths(DOCUMENTS),
        "log-normal 1.0": rng.lognormal(6.5, 1.0, DOCUMENTS).astype(np.int64) + 2,
        "log-normal 2.0": rng.lognormal(6.5, 2.0, DOCUMENTS).astype(np.int64) + 2,
        "Pareto 1.2": (rng.pareto(1.2, DOCUMENTS) * 300).clip(2, 2**22).astype(np.int64),
        "uniform": rng.integers(2, 4096, DOCUMENTS),
        "equal": np.full(DOCUMENTS, 700),
    }


def measure(lengths: Any, policy: str, window: int, micro_batches: int, steps: int) -> dict[str, Any]:
    packing = POLICIES.configure(policy)
    planner = planner_of(Documents(lengths=lengths), packing, micro_batches=micro_batches, window=window)
    for _ in range(8):
        planner.next()
    return Summary.of((planner.next() for _ in range(steps)), window).figures()


@click.command()
@click.option("--files", help="Corpus of Python files.")
@click.option("--steps", default=200, show_default=True)
def main(files: str | None, steps: int) -> None:
    """Compare imbalance, mean and 95th percentile."""
    corpora: dict[str, Any] = drawn()
    if files:
        corpora["files"] = Corpus.open(files).lengths
    rows = []
    print(f"{'corpus':18}{'window':>8}{'N':>4}" + "".join(f"{p:>20}{'delay':>7}" for p in COMPARED))
    for name, lengths in corpora.items():
        for window in WINDOWS:
            for micro_batches in (4, 16):
                row: dict[str, Any] = {"corpus": name, "window": window, "micro_batches": micro_batches}
                line = f"{name:18}{window:8}{micro_batches:4}"
                for policy in COMPARED:
                    with warnings.catch_warnings(record=True) as said:
                        warnings.simplefilter("always")
                        try:
                            figures = measure(lengths, policy, window, micro_batches, steps)
                        except Exception as error:
                            row[policy] = str(error)
                            line += f"{'error':>20}{'':7}"
                            continue
                    row[policy] = {**figures, "said": [str(warning.message) for warning in said]}
                    mark = "!" if said else " "
                    both = f"{figures['imbalance_mean']:.4f} {figures['imbalance_p95']:.4f}{mark}"
                    line += f"{both:>20}{figures['delay_mean']:7.2f}"
                print(line, flush=True)
                rows.append(row)
    save("packing_never_worse", {"steps": steps, "rows": rows})


if __name__ == "__main__":
    main()
