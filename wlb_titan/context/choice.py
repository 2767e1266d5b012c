"""Which sharding a micro-batch gets: the policies of [wlb.sharding] (paper section 5.3)."""

from __future__ import annotations

from wlb_titan.context.document import per_document, per_document_round_robin
from wlb_titan.context.hybrid import hybrid
from wlb_titan.context.layout import Ints, Sharding
from wlb_titan.context.sequence import per_sequence
from wlb_titan.cost.attention_latency import AttentionLatency, slowest
from wlb_titan.errors import PlanError
from wlb_titan.settings import ShardingSettings


def choose(
    settings: ShardingSettings,
    lengths: Ints,
    total: int,
    ranks: int,
    latency: AttentionLatency,
    *,
    micro_batch: str = "The micro-batch",
) -> tuple[str, Sharding]:
    """Shards a micro-batch as the settings say.

    `adaptive` takes the faster of per_sequence and per_document, `hybrid` the fastest of these two and the
    hybrid sharding, by the predicted time of the slowest rank, forward and backward. Of equals the first is
    taken.

    Args:
        settings: the policy.
        lengths: int64 (n,), tokens of the documents in sequence order, each at least 1.
        total: tokens of the sequence with its padding.
        ranks: context-parallel degree.
        latency: predicts attention time.
        micro_batch: names it in errors.

    Returns:
        How the micro-batch is sharded in the end (`per_sequence`, `per_document` or `hybrid`), and the
        sharding.

    Raises:
        PlanError: there are fewer tokens than ranks, or the total does not divide by 2 x ranks.
    """
    _check(lengths, total, ranks, micro_batch)
    cut = per_document if settings.remainder == "spread" else per_document_round_robin
    if settings.policy == "per_sequence":
        return "per_sequence", per_sequence(lengths, total, ranks)
    if settings.policy == "per_document":
        return "per_document", cut(lengths, total, ranks)
    shardings = {
        "per_sequence": per_sequence(lengths, total, ranks),
        "per_document": cut(lengths, total, ranks),
    }
    if settings.policy == "hybrid":
        shardings["hybrid"] = hybrid(lengths, total, ranks, latency)
    return min(shardings.items(), key=lambda named: slowest(latency.seconds(named[1])))


def _check(lengths: Ints, total: int, ranks: int, micro_batch: str) -> None:
    tokens = int(lengths.sum())
    if tokens < ranks:
        raise PlanError(
            f"{micro_batch} has {tokens} tokens, fewer than the {ranks} context-parallel ranks that share it."
            " Use a smaller context-parallel degree, a longer context window or longer documents."
        )
    if total % (2 * ranks):
        raise PlanError(
            f"{micro_batch} has {total} tokens with its padding, which {ranks} context-parallel ranks cannot "
            f"cut into {2 * ranks} equal chunks. Pad it to a multiple of {2 * ranks}."
        )
    if total < tokens:
        raise PlanError(f"{micro_batch} has documents of {tokens} tokens but room for only {total}.")
