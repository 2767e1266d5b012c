"""The timeline of a pipeline's step, time to scale, under each packing policy.

Predicted times are the cost model's, all stages take equal shares of them, and communication is free: what
the order `best` assumes too.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

import numpy as np

from wlb_titan.commands.plan_figures import FAINT, STYLE, plt, svg
from wlb_titan.documents import Documents
from wlb_titan.job import Job
from wlb_titan.packing.slim.asymmetric import last_needed
from wlb_titan.packing.slim.slices import slice_work
from wlb_titan.pipeline.graph import PassTimes, PipelineGraph
from wlb_titan.plan import ByPass, Flow, MicroBatch
from wlb_titan.policies import Policy
from wlb_titan.simulator.replicas import parts
from wlb_titan.simulator.timeline import MEASURED
from wlb_titan.timeline import Span

STEP_SHOWN = 10  # queues have filled
PASS_COLORS = {
    **{"F": "#6aa5de", "R": "#4a7fb5", "L": "#c99a4b"},
    **{"B": "#2f5f98", "I": "#2f5f98", "W": "#9bb8a7"},
}


def planned_timelines(jobs: Sequence[Job], documents: Documents, steps: int) -> dict[str, list[Span]]:
    """The first data-parallel rank's first pipeline run of one step, first under `plain` as it was packed.

    Args:
        jobs: with a pipeline, under each packing policy.
        documents: what they train on.
        steps: the last of so many is taken, or the tenth.
    """
    before = jobs[0].under(Policy("plain", jobs[0].sharding.name))
    variants = {"plain, as_packed": before}
    variants |= {f"{job.packing.name}, {job.order.name}": job for job in jobs}
    timelines = {}
    for name, job in variants.items():
        planner = job.planner(documents)
        for _ in range(min(steps, STEP_SHOWN)):
            plan = planner.next()
        shown, flow = plan.replica(0), None
        if plan.flows is not None:  # all in one run
            flow = plan.flows[0]
        elif job.run:
            shown = shown.each(operator.getitem, slice(job.run))
        timelines[name] = pipeline_spans(name, shown, job, flow)
    return timelines


def pipeline_spans(
    process: str,
    run: ByPass[tuple[MicroBatch, ...]],
    job: Job,
    flow: Flow | None = None,
) -> list[Span]:
    """Every pass of the micro-batches, a track for each rank, times in the cost model's unit.

    Args:
        process: of the spans.
        run: the micro-batches that go through the pipeline together.
        job: of which they are.
        flow: the order of their passes; None is the schedule's own.
    """
    model = job.cost_model
    of_backward = model.backward if run.same else model.recomputed
    forward, backward = (
        np.array([slice_work(work, m.documents, m.slices).sum() / m.sharers for m in packs])
        for work, packs in zip((model.forward, of_backward), run, strict=True)
    )
    times = PassTimes.equal_stages(forward[:, None], backward[:, None], job.shape)
    needed = None if flow is None else last_needed(*run.each(parts))
    graph = PipelineGraph(job.shape, len(run.forward), flow, needed)
    spans = []
    for action, end in zip(graph.actions, graph.ends(times)[:, 0].tolist(), strict=True):
        seconds = float(times.of(action)[0])
        rank = job.shape.rank_of(action.stage)
        facts = {"stage": action.stage, "tokens": run.of(action.kind)[action.place].length}
        name = f"{action.kind}{action.place}"
        spans.append(Span(process, f"pp {rank}", name, end - seconds, seconds, facts))
    return sorted(spans, key=lambda one: (one.track, one.start))


def pipeline_timeline(timelines: Mapping[str, Sequence[Span]]) -> str:
    """The text of an SVG: a picture for each policy, a row for each rank, a box for each pass.

    Policies train on other documents in a step: times are relative to the work of a rank in it. Passes that
    did not run themselves, where others did, are pale.
    """
    rows = {name: sorted({s.track for s in spans}) for name, spans in timelines.items()}
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            len(timelines),
            1,
            figsize=(10, sum(0.5 + 0.32 * len(tracks) for tracks in rows.values()) + 0.5),
            sharex=True,
            squeeze=False,
        )
        for one, (name, spans) in zip(axes[:, 0], timelines.items(), strict=True):
            unit = sum(s.duration for s in spans) / len(rows[name])
            end = max(s.start + s.duration for s in spans) / unit
            one.set_title(f"{name}: {1 - 1 / end:.1%} bubble")
            for s in spans:
                row, left, width = rows[name].index(s.track), s.start / unit, s.duration / unit
                one.barh(
                    *(row, width, 0.86, left),
                    color=PASS_COLORS[s.name[0]],
                    alpha=1.0 if s.args.get("time", MEASURED) == MEASURED else 0.45,
                    edgecolor="white",
                    linewidth=0.5,
                )
                if width > 0.018:
                    one.text(
                        *(left + width / 2, row, s.name[1:]),
                        ha="center",
                        va="center",
                        color="white",
                        fontsize=8,
                    )
            one.axvline(end, color=FAINT, linewidth=1)
            one.set_yticks(range(len(rows[name])), rows[name])
            one.invert_yaxis()
            one.grid(visible=False)
        axes[-1, 0].set_xlabel("time / work of a rank; light: forward, dark: backward")
        return svg(figure)
