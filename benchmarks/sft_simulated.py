"""What balance is predicted to gain in supervised fine-tuning: conversations, on 8 GPUs.

    python benchmarks/sft_simulated.py

Made-up conversations (`chat` of wlb_titan/documents/lengths.py: 95 % below 4,096 tokens, one of 4,300 above
32,768), a model of 7B (LLaMA-2's shape) with full activation checkpointing, 256K tokens a step or one window
a data-parallel rank, on one host of H100s, in simulation. Compared:

- `plain`: windows of exactly so many tokens, conversations cut at their ends;
- `greedy`: torchtitan's packing for fine-tuning: the next conversation begins a new window where it does not
  fit, and the rest of the window is padding; nothing is cut;
- `wlb_lazy`: balanced, of different lengths, conversations whole.

Tokens a second are those of conversations, without padding. `whole` is the share of conversations that no
window cuts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from common.packing import save
from rich.console import Console
from rich.table import Table

from wlb_titan.context import STRATEGIES
from wlb_titan.cost.cluster import load_cluster
from wlb_titan.cost.degrees import Degrees
from wlb_titan.documents import Documents
from wlb_titan.documents.lengths import NAMED
from wlb_titan.job import Job
from wlb_titan.memory.layer import MemorySettings
from wlb_titan.packing import POLICIES
from wlb_titan.packing.plain import Plain
from wlb_titan.packing.policy import Packing
from wlb_titan.plan import ID, LENGTH, Plan
from wlb_titan.simulator.step import simulate

STEPS = 60
TOKENS = 262144  # of a step, at least
CASES = ((8192, 1), (16384, 1), (32768, 1), (32768, 2), (65536, 2), (131072, 4))
"""Window, and context-parallel ranks; the others of 8 are data-parallel."""


class Greedy(Plain):
    """Windows that begin with a whole conversation each, as torchtitan packs."""

    @dataclass(kw_only=True, slots=True)
    class Config(Plain.Config):
        pass

    def next(self) -> Packing:
        packs = []
        for _ in range(self._micro_batches):
            room, pieces = self._stream.window, []
            while True:
                ahead = self._stream.state_dict()
                piece = self._stream.arrive(1)
                if int(piece[:, LENGTH].sum()) > room:
                    self._stream.load_state_dict(ahead)
                    break
                room -= int(piece[:, LENGTH].sum())
                pieces.append(piece)
            packs.append(np.pad(np.concatenate(pieces), ((0, 0), (0, 1))))
        return Packing(packs)


def whole(plans: list[Plan]) -> float:
    """Share of the conversations of these steps that lie in one piece."""
    pieces = np.concatenate([pack.documents for plan in plans for pack in plan.packs])
    counts = np.unique(pieces[:, ID], return_counts=True)[1]
    return float((counts == 1).mean())


def main() -> None:
    """Prints a row for each window and packing."""
    lengths = np.minimum(NAMED["chat"].draw(), 32768)
    table = Table(
        "window", "CP x DP", "packing", "tokens/s", "gain", "imbalance", "padding", "whole", "peak GiB"
    )
    rows = []
    for window, context in CASES:
        ranks = 8 // context
        # A conversation above the window is cut by all; that is rare, and the rest is made for the window.
        documents = Documents(lengths=np.minimum(lengths, window))
        base = 0.0
        for name, packing, sharding in (
            ("plain", POLICIES.configure("plain"), "per_sequence"),
            ("greedy", Greedy.Config(), "per_sequence"),
            ("wlb_lazy", POLICIES.configure("wlb_lazy"), "hybrid"),
        ):
            job = Job(
                window=window,
                micro_batches=max(TOKENS // window, ranks),
                degrees=Degrees(context=context, shard=ranks),
                cluster=load_cluster("h100_roce"),
                memory=MemorySettings(checkpointing="full", window=window),
                packing=packing,
                sharding=STRATEGIES.configure(sharding),
            )
            job = replace(job, packing=replace(packing))
            plans = job.plans(documents, STEPS)
            found = simulate(job, plans)
            tokens = sum(plan.tokens for plan in plans) / float(found.seconds.sum())
            base = base or tokens
            padding = sum(plan.padding for plan in plans) / sum(plan.tokens + plan.padding for plan in plans)
            imbalance = float(np.mean([plan.imbalance for plan in plans]))
            row = {
                "window": window,
                "degrees": f"{context} x {ranks}",
                "packing": name,
                "tokens_per_second": tokens,
                "gain": tokens / base,
                "imbalance": imbalance,
                "padding": padding,
                "whole": whole(plans),
                "peak_gib": found.peak_memory.total / 2**30,
            }
            rows.append(row)
            table.add_row(
                *(f"{window >> 10}K", row["degrees"], name, f"{tokens:,.0f}", f"{row['gain']:.2f}x"),
                *(f"{imbalance:.3f}", f"{padding:.1%}", f"{row['whole']:.1%}", f"{row['peak_gib']:.1f}"),
            )
    Console(width=120).print(table)
    save("sft_simulated", {"rows": rows})


if __name__ == "__main__":
    main()
