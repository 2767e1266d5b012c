"""How near hybrid sharding's choice is to that of a long search, by the same predicted time.

Micro-batches of `wlb_lazy` (7B, windows of 131,072 tokens, H100 and RoCE) are divided by `adaptive`, by
`hybrid`, and by a search that moves one to three documents to other places 2,000 times, at random, and keeps
what is predicted faster; half of its steps begin with hybrid's choice, half with documents over all ranks.
"Layer" is attention, the exchange of keys and all else of a layer; "over search" the mean and the worst
micro-batch's layer over the search's.
"""

from __future__ import annotations

import argparse
import time
from itertools import product
from typing import Any

import numpy as np
from common import machine, save, show

from wlb_titan.context.hybrid import Hybrid
from wlb_titan.context.layout import Joined
from wlb_titan.context.places import search
from wlb_titan.context.strategy import STRATEGIES
from wlb_titan.cost.models import PAPER_MODELS
from wlb_titan.dimensions.degrees import Degrees
from wlb_titan.documents import Documents
from wlb_titan.documents.lengths import NAMED
from wlb_titan.job import Job
from wlb_titan.packing import POLICIES
from wlb_titan.plan import MicroBatch

CONTEXT, TENSOR, LENGTHS = (2, 4, 8, 16, 32), (1, 8), ("paper", "code", "prolong", "web")
STEPS = 2000  # of the search
COLUMNS = {
    "CP": "{context}",
    "TP": "{tensor}",
    "lengths": "{lengths}",
    "adaptive, ms": "{adaptive:.2f}",
    "hybrid": "{hybrid:.2f}",
    "search": "{search:.2f}",
    "layer over search": "{over_search:.3f}",
    "worst": "{worst:.3f}",
    "adaptive's layer": "{adaptive_over_search:.3f}",
    "processor, ms": "{processor_ms:.1f}",
}


def searched(strategy: Hybrid, micro_batch: MicroBatch) -> float:
    """Predicted seconds of a layer's attention and exchange after the search."""
    packs = Joined.of([(micro_batch.lengths, micro_batch.length, micro_batch.elsewhere)])
    large, places, share = strategy.large(packs), strategy.places, packs.totals // strategy.ranks
    lengths, everywhere = large.lengths[:, 0], large.everywhere[:, 0]
    last, spare = len(places.level) - 1, len(places.sizes) - 2
    rng = np.random.default_rng(0)
    found = []
    for chosen in (search(places, large, share)[:, 0], np.full(len(lengths), last)):
        least = float(strategy.predicted(packs, [strategy.spread(packs, large, chosen[:, None])])[0, 0])
        for _ in range(STEPS // 2):
            moved = chosen.copy()
            moved[rng.integers(len(chosen), size=rng.integers(1, 4))] = rng.integers(last + 1)
            taken = places.has[:, moved] @ (lengths / places.sizes[places.level[moved]])
            if (taken > share - spare).any() or (moved[everywhere] != last).any():
                continue
            seconds = float(strategy.predicted(packs, [strategy.spread(packs, large, moved[:, None])])[0, 0])
            if seconds <= least:
                chosen, least = moved, seconds
        found.append(least)
    return min(found)


def compared(context: int, tensor: int, name: str, count: int) -> dict[str, Any]:
    job = Job(
        window=131072,
        micro_batches=8,
        model=PAPER_MODELS["7B"],
        degrees=Degrees(tensor=tensor, context=context, pipeline=4, shard=2),
        packing=POLICIES.configure("wlb_lazy"),
        context=STRATEGIES.configure("hybrid"),
    )
    planner = job.planner(Documents(lengths=NAMED[name].draw(), seed=0))
    strategy, drafts = job.strategy, []
    while len(drafts) < count:
        drafts += planner.next(sharded=()).packs
    seconds, layer, processor = [], [], 0.0
    for draft in drafts[:count]:
        begin = time.process_time()
        packs = Joined.of([(draft.lengths, draft.length, draft.elsewhere)])
        _, tried = zip(*strategy.candidates(packs), strict=True)
        predicted = strategy.predicted(packs, tried)[:, 0].tolist()
        processor += time.process_time() - begin
        seconds.append((min(predicted[:2]), min(predicted), searched(strategy, draft)))
        token = job.token
        layer.append(draft.length * (3 * (token.matrices + token.elements) + 2 * token.tensor))
    adaptive, hybrid, long = np.array(seconds).T
    rest = np.array(layer)
    return {
        "context": context,
        "tensor": tensor,
        "lengths": name,
        "adaptive": adaptive.mean() * 1e3,
        "hybrid": hybrid.mean() * 1e3,
        "search": long.mean() * 1e3,
        "over_search": float((hybrid + rest).sum() / (long + rest).sum()),
        "worst": float(((hybrid + rest) / (long + rest)).max()),
        "adaptive_over_search": float((adaptive + rest).sum() / (long + rest).sum()),
        "processor_ms": processor / count * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--micro-batches", type=int, default=4)
    count = parser.parse_args().micro_batches
    found = show(COLUMNS, (compared(*case, count) for case in product(CONTEXT, TENSOR, LENGTHS)))
    over = [row["over_search"] for row in found]
    print(f"layer over search: mean {np.mean(over):.3f}, worst {max(row['worst'] for row in found):.3f}")
    save("sharding", {**machine(), "micro_batches": count, "rows": found})


if __name__ == "__main__":
    main()
