"""Balance, delay and plan time as the job grows: N = 4, 64 and 2048 micro-batches a step, window 128K.

    python benchmarks/packing_scale.py

With N = 64 a step has about 5,700 documents, with N = 2048 about 180,000.
"""

from __future__ import annotations

from common.packing import measure, save, synthetic_lengths

from wlb_titan.documents import Documents
from wlb_titan.packing import POLICIES

STEPS = {4: 2000, 64: 400, 2048: 48}
COMPARED = ("plain", "fixed_greedy", "wlb", "wlb_lazy")


def main() -> None:
    rows = []
    print(
        f"{'N':>6} {'policy':14}{'imbalance':>10}{'p95':>8}{'delay':>8}{'max':>6}{'documents':>11}"
        f"{'plan ms':>9}{'cpu ms':>9}"
    )
    for micro_batches, steps in STEPS.items():
        # Two epochs for the longest run; more documents would only take more memory.
        lengths = synthetic_lengths(min(4_000_000, micro_batches * 91 * steps))
        documents = Documents(lengths=lengths, seed=None)
        for name in COMPARED:
            packing = POLICIES.configure(name)
            figures = measure(documents, packing, micro_batches=micro_batches, steps=steps)
            print(
                f"{micro_batches:6} {name:14}{figures['imbalance_mean']:10.4f}{figures['imbalance_p95']:8.4f}"
                f"{figures['delay_mean']:8.3f}{figures['delay_max']:6}{figures['documents']:11,.0f}"
                f"{figures['plan_ms']:9.2f}{figures['cpu_ms']:9.2f}",
                flush=True,
            )
            rows.append({"micro_batches": micro_batches, "policy": name, **figures})
    save("packing_scale", {"rows": rows})


if __name__ == "__main__":
    main()
