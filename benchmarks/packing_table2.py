"""The paper's Table 2 anew: imbalance degree and packing overhead, N = 4, window 128K, 7B model.

    python benchmarks/packing_table2.py
    wlb-titan prepare FOLDER --source python-source --granularity package
    python benchmarks/packing_table2.py --corpus FOLDER

The first plans over the synthetic lengths of `common/packing.py`, the last over a real corpus as well.
"""

from __future__ import annotations

import argparse
from typing import Any

from common.packing import measure, save, synthetic_lengths

from wlb_titan.corpus import Corpus
from wlb_titan.documents import Documents
from wlb_titan.errors import PlanError
from wlb_titan.packing import POLICIES, PackingPolicy

#        name, settings, the paper's imbalance and milliseconds
ROWS: list[tuple[str, PackingPolicy.Config, float | None, float | None]] = [
    ("original", POLICIES.configure("plain"), 1.44, 0),
    ("fixed_greedy, window 1", POLICIES.configure("fixed_greedy", global_batches=1), 1.41, 4),
    ("fixed_greedy, window 2", POLICIES.configure("fixed_greedy", global_batches=2), 1.22, 5),
    ("fixed_greedy, window 4", POLICIES.configure("fixed_greedy", global_batches=4), 1.11, 5),
    ("fixed_greedy, window 8", POLICIES.configure("fixed_greedy", global_batches=8), 1.08, 5),
    (
        "fixed_solver, window 1",
        POLICIES.configure("fixed_solver", global_batches=1, time_limit=30),
        1.40,
        467,
    ),
    (
        "fixed_solver, window 2",
        POLICIES.configure("fixed_solver", global_batches=2, time_limit=30),
        1.18,
        1488,
    ),
    (
        "fixed_solver, window 4",
        POLICIES.configure("fixed_solver", global_batches=4, time_limit=30),
        1.09,
        25313,
    ),
    ("wlb, 1 queue", POLICIES.configure("wlb", queues=1), 1.24, 8),
    ("wlb, 2 queues", POLICIES.configure("wlb", queues=2), 1.05, 20),
    ("wlb, 3 queues", POLICIES.configure("wlb", queues=3), 1.05, 23),
    ("wlb_lazy", POLICIES.configure("wlb_lazy"), None, None),
    ("wlb_lazy, tolerance 0.05", POLICIES.configure("wlb_lazy", tolerance=0.05), None, None),
]


def table(documents: Documents, steps: int, solver_steps: int) -> list[dict[str, Any]]:
    print(f"{'':26}{'imbalance':>10}{'(theirs)':>10}{'p95':>8}{'delay':>8}{'ms':>10}{'(theirs)':>10}")
    rows = []
    for name, packing, their_imbalance, their_ms in ROWS:
        count = solver_steps if packing.name == "fixed_solver" else steps
        try:
            figures = measure(documents, packing, micro_batches=4, steps=count)
        except PlanError as error:  # queues that this corpus would never empty
            print(f"{name:26}refused: {error}")
            rows.append({"method": name, "refused": str(error)})
            continue
        # As in the paper the overhead of packing several batches together is shared by their steps.
        milliseconds = figures["plan_ms_mean" if packing.name.startswith("fixed") else "plan_ms"]
        theirs = [f"({value:g})" if value is not None else "" for value in (their_imbalance, their_ms)]
        print(
            f"{name:26}{figures['imbalance_mean']:10.3f}{theirs[0]:>10}{figures['imbalance_p95']:8.3f}"
            f"{figures['delay_mean']:8.2f}{milliseconds:10.1f}{theirs[1]:>10}",
            flush=True,
        )
        rows.append({"method": name, "their_imbalance": their_imbalance, "their_ms": their_ms, **figures})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--corpus", help="folder of a prepared corpus")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--solver-steps", type=int, default=32)
    arguments = parser.parse_args()
    steps = (arguments.steps, arguments.solver_steps)
    synthetic = Documents(lengths=synthetic_lengths(600_000), seed=None)
    results: dict[str, Any] = {"synthetic": table(synthetic, *steps)}
    if arguments.corpus:
        corpus = Corpus.open(arguments.corpus)
        print(f"\n{arguments.corpus}: {len(corpus.lengths):,} documents, {corpus.lengths.sum():,} tokens")
        results["corpus"] = {
            "documents": len(corpus.lengths),
            "tokens": int(corpus.lengths.sum()),
            "rows": table(Documents(lengths=corpus.lengths), *steps),
        }
    save("packing_table2", results)


if __name__ == "__main__":
    main()
