"""What a planner holds in memory over as many documents as a million steps of the paper's job read.

    python benchmarks/packing_memory.py

A step with N = 2048 reads what 512 steps with N = 4 read, so 2,000 such steps stand for 1,024,000. Resident
memory is read after every tenth of them. The corpus has four million documents and is read many times over.
"""

from __future__ import annotations

from typing import Any

import click
from common.packing import planner_of, save, synthetic_lengths

from wlb_titan.documents import Documents
from wlb_titan.packing import POLICIES

MICRO_BATCHES = 2048


def resident_mib() -> float:
    """Resident memory of this process."""
    with open("/proc/self/status") as file:
        (line,) = [line for line in file if line.startswith("VmRSS")]
    return int(line.split()[1]) / 1024


def run(policy: str, steps: int) -> dict[str, Any]:
    """Plans so many steps; resident memory and waiting documents after every tenth of them."""
    corpus = Documents(lengths=synthetic_lengths(4_000_000))
    planner = planner_of(corpus, POLICIES.configure(policy), micro_batches=MICRO_BATCHES)
    memory, waiting, documents = [], [], 0
    for step in range(1, steps + 1):
        plan = planner.next()
        documents += sum(len(m.documents) for m in plan.micro_batches)
        if step % (steps // 10) == 0:
            memory.append(resident_mib())
            waiting.append(plan.waiting_documents)
            print(
                f"{policy:10} {step:6,} steps {documents:13,} documents {memory[-1]:8.1f} MiB "
                f"{waiting[-1]:7,} waiting",
                flush=True,
            )
    return {
        "policy": policy,
        "steps": steps,
        "micro_batches": MICRO_BATCHES,
        "documents": documents,
        "resident_mib": memory,
        "waiting_documents": waiting,
    }


@click.command()
@click.option("--steps", default=2000, show_default=True, help="Steps of each policy.")
def main(steps: int) -> None:
    """Plan very many documents and watch the memory."""
    save("packing_memory", {"rows": [run(policy, steps) for policy in ("wlb", "wlb_lazy")]})


if __name__ == "__main__":
    main()
