"""A replay of a traced step: the time of its measured passes with a device for each process.

Processes that share cores wait for each other where they would not have to, and what else runs on a machine
slows them down. Each pass' own processor time has neither in it; so the step is put together from these times
as the simulator puts one together from predicted ones: every rank runs its passes in the order in which it
ran them, each as soon as its data is there, which take no time on their way.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from wlb_titan.pipeline.graph import PassTimes, PipelineGraph
from wlb_titan.pipeline.schedule import PipelineShape
from wlb_titan.plan import Action
from wlb_titan.simulator.trace import COMPUTED, Span

NAME = re.compile(r"(FB|[FLBIW])(\d+)")


def replayed_seconds(spans: Sequence[Span]) -> float | None:
    """Seconds of the passes of a step, from its first to its last.

    Args:
        spans: spans of the step's trace (`wlb.trace_every`), all ranks'.

    Returns:
        None where it cannot be told: passes without processor time (those of an accelerator), or others than
        forward and backward ones.
    """
    replicas: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        if COMPUTED not in span.args or not NAME.fullmatch(span.name):
            return None
        replicas[span.process].append(span)
    if not replicas:
        return None
    if all(span.name.startswith("FB") for span in spans):  # replicas meet in every micro-batch
        most: dict[str, float] = defaultdict(float)
        for span in spans:
            most[span.name] = max(most[span.name], float(span.args[COMPUTED]))
        return sum(most.values())
    return max(_pipeline(own) for own in replicas.values())


def _pipeline(spans: Sequence[Span]) -> float:
    """Seconds of one replica. Ranks that share a pipeline rank's passes count as the slowest of them."""
    ranks: dict[int, dict[Action, float]] = defaultdict(dict)
    losses: dict[tuple[int, int], float] = defaultdict(float)
    for span in sorted(spans, key=lambda one: one.start):
        found = NAME.fullmatch(span.name)
        assert found is not None
        kind, place, stage = found[1], int(found[2]), int(span.args["stage"])
        seconds = float(span.args[COMPUTED])
        if kind == "L":
            losses[stage, place] = max(losses[stage, place], seconds)
            continue
        passes = ranks[_rank(span.track)]
        action = Action(kind, stage, place)  # type: ignore[arg-type]
        passes[action] = max(passes.get(action, 0.0), seconds)
    stages = 1 + max(action.stage for passes in ranks.values() for action in passes)
    n = 1 + max(action.place for passes in ranks.values() for action in passes)
    times = PassTimes(*np.zeros((3, stages, n, 1)))
    for passes in ranks.values():
        for action, seconds in passes.items():
            of_kind = {"F": times.forward, "W": times.weights}.get(action.kind, times.inputs)
            of_kind[action.stage, action.place] = seconds
    for (stage, place), seconds in losses.items():
        times.forward[stage, place] += seconds
    shape = PipelineShape(_schedule(ranks), len(ranks), stages // len(ranks))
    graph = PipelineGraph(shape, n, [list(ranks[rank]) for rank in sorted(ranks)])
    return float(graph.ends(times).max())


def _rank(track: str) -> int:
    """The pipeline rank that a track names; 0 without a pipeline."""
    words = track.split()
    return int(words[words.index("pp") + 1]) if "pp" in words else 0


def _schedule(ranks: dict[int, dict[Action, float]]) -> str:
    """A schedule that lays stages out as these ranks have them: in turn, or there and back again."""
    back = any(action.stage == len(ranks) for action in ranks[len(ranks) - 1]) and len(ranks) > 1
    return "ZBVZeroBubble" if back else "1F1B"
