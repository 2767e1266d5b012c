"""The output of `wlb-titan dryrun` about a rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from wlb_titan.commands.console import make_console, show_table
from wlb_titan.simulator.calls import RankCalls

LARGEST = 8  # groups of tensors that are named


def print_rank(result: dict[str, Any], world_size: int) -> None:
    """Parameters, memory by term, the largest tensors at the peak and collectives; or the rank's error.

    Args:
        result: as `wlb_titan.runtime.one_rank.dry_run` yields it, or `rank` and `error`.
    """
    console = make_console()
    console.print(f"\nRank {result['rank']} of {world_size}", style="bold", end="")
    if "error" in result:
        console.print(
            f" fails:\n{result.get('traceback', '')}{result['error']}", markup=False, soft_wrap=True
        )
        return
    place = ", ".join(f"{axis} {number}" for axis, number in result["coordinates"].items())
    console.print(
        f" ({place or 'alone'}): {result['parameters']:,} parameters in its stages, "
        f"{result['local_parameters']:,} on its GPU. Micro-batches of "
        f"{', '.join(f'{length:,}' for length in result['lengths'])} tokens.",
        markup=False,
        soft_wrap=True,
    )
    show_table(memory_rows(result))
    console.print("At the traced peak:")
    for entry in result["largest"][:LARGEST]:
        console.print(f"  {entry['gib']:8.3f} GiB  {entry['tensors']:4} x {entry['what']}", markup=False)
    if result["collectives"]:
        show_table(collective_rows(result["collectives"]))


def print_ranks(
    results: Sequence[dict[str, Any]], calls: Mapping[int, RankCalls], same: Mapping[int, int]
) -> None:
    """A row for each rank that was run: who does the same, its memory and its calls.

    Args:
        results: as of `print_rank`, without errors.
        same: for each rank of the job the one that was run for it.
    """
    alike: dict[int, list[int]] = {}
    for rank, first in same.items():
        alike.setdefault(first, []).append(rank)
    show_table(
        [
            {
                "rank": str(result["rank"]),
                "place": ", ".join(f"{axis} {number}" for axis, number in result["coordinates"].items()),
                "ranks that do the same": str(len(alike[result["rank"]])),
                "micro-batches": f"{len(result['lengths'])}, up to {max(result['lengths']):,} tokens",
                "traced GiB": f"{result['traced_gib']:.2f}",
                "calls": f"{len(calls[result['rank']].calls):,}",
            }
            for result in results
        ]
    )


def memory_rows(result: dict[str, Any]) -> list[dict[str, str]]:
    """GiB at the peak by term, predicted and traced, with their sums last.

    The trace does not tell the loss from the passes around it, so it has no term of its own there.
    """
    predicted, traced = dict(result["predicted"]), result["traced"]
    terms = sorted({*predicted, *traced}, key=lambda term: -traced.get(term, 0.0))
    rows = [_memory_row(term, predicted.get(term), traced.get(term)) for term in terms]
    return [*rows, _memory_row("total", result["predicted_gib"], result["traced_gib"])]


def _memory_row(term: str, predicted: float | None, traced: float | None) -> dict[str, str]:
    difference = f"{predicted / traced - 1:+.1%}" if term == "total" and predicted and traced else ""
    return {
        "memory": term,
        "predicted GiB": "" if predicted is None else f"{predicted:.3f}",
        "traced GiB": "" if traced is None else f"{traced:.3f}",
        "difference": difference,
    }


def collective_rows(entries: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Collectives by kind and axis, with what is predicted where a dimension of one's own says it."""
    predicted = any("predicted_gib" in entry for entry in entries)
    return [_collective_row(entry, predicted) for entry in entries]


def _collective_row(entry: dict[str, Any], predicted: bool) -> dict[str, str]:
    row = {
        "collective": entry["kind"],
        "over": entry["over"],
        "number": f"{entry['number']:,}",
        "GiB": f"{entry['gib']:.3f}",
    }
    if predicted:
        row["predicted GiB"] = f"{entry['predicted_gib']:.3f}" if "predicted_gib" in entry else ""
    return row
