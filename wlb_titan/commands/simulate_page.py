"""The page of `wlb-titan simulate`: what the best policy gains and why, and what to try next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from wlb_titan.commands import command_line as cli
from wlb_titan.commands import page
from wlb_titan.errors import UserError
from wlb_titan.job import Job, Policy
from wlb_titan.runtime.models.load import load_config
from wlb_titan.simulator.replicas import step_timeline
from wlb_titan.simulator.step import Prediction
from wlb_titan.summary import Estimate

Steps = Mapping[Policy, page.Timed]
WORTH = 0.03  # share of a step from which a part is worth a remedy
MOST = 4  # remedies on a page


def best_of(predictions: Mapping[Policy, Prediction]) -> Policy:
    """The policy that does most FLOPs a second of those that fit, or of all."""
    fitting = [policy for policy, prediction in predictions.items() if prediction.fits]
    return max(fitting or predictions, key=lambda policy: predictions[policy].flops_per_second)


def timed(policy: Policy, prediction: Prediction) -> page.Timed:
    """With the passes of the step that does most nearly as many FLOPs a second as all of them."""
    speed, flops = prediction.flops_per_second, prediction.flops
    number = int(abs(flops / prediction.seconds - speed).argmin())
    passes = step_timeline(prediction.job, prediction.plans[number], str(policy))
    return page.Timed(prediction.parts(), speed, passes, float(flops[number]))


def write_report(
    folder: Path, asked: cli.Asked, steps: Steps, best: Job, gain: Estimate, last: Sequence[str]
) -> Path:
    """The baseline is the first of the policies, `best` the job under the best; `last` are sections."""
    base, own = next(iter(steps)), best.policy
    drawn = {str(p): s if p in (base, own) else s._replace(flops=0.0) for p, s in steps.items()}
    tries = remedies(asked, best, steps)
    if asked.lengths is None:
        dryrun = page.try_next("dryrun", asked.typed, "--wlb.policy", str(own))
        tries.append((f"Whether {own} runs, and what it takes, traced on this machine:", dryrun))
    which = "The step nearest to the mean, of its slowest data-parallel replica"
    return page.write_page(
        folder,
        title=f"{Path(asked.loaded.file).stem} on {best.degrees.ranks} GPUs: what balance is worth",
        answer=page.gained(str(own), gain, str(base)) + page.waits(drawn, str(own), str(base)),
        about=page.described(asked.job, asked.documents),
        sections=[*page.time_sections(drawn, "predicted", which), page.next_section(tries), *last],
    )


def remedies(asked: cli.Asked, best: Job, steps: Steps) -> list[tuple[str, str]]:
    """What the job can do, and does not yet, about the largest parts of its step, and how to predict it."""
    tries: dict[str, str] = {}
    parts, known, own = steps[best.policy].parts, remedies_of(best, asked), ["--wlb.policy", best.policy]
    unchanged, whole = _job(asked, own), sum(parts.values())
    for part in sorted(parts, key=parts.__getitem__, reverse=True):
        said = f"{part[0].upper()}{part[1:]} takes {parts[part] / whole:.0%} of {best.policy}'s step. "
        for why, more in known.get(part, []) if parts[part] >= WORTH * whole and len(tries) < MOST else []:
            words = more if own[0] in more else [*own, *more]
            command, job = page.try_next("simulate", asked.typed, *map(str, words)), _job(asked, words)
            if command in tries or job is None or (job.policy != best.policy and job.policy in steps):
                continue
            if job != unchanged or "--search" in words:
                tries[command], said = f"{said}{why}:", ""
    return [(why, command) for command, why in tries.items()][:MOST]


def _job(asked: cli.Asked, words: Sequence[object]) -> Job | None:
    """The job with these keys; None where it is not possible."""
    keys = [*asked.loaded.overrides, *(str(word) for word in words if word != "--search")]
    with suppress(UserError):
        return load_config(asked.loaded.file, keys, asked.world_size).job
    return None


def remedies_of(job: Job, asked: cli.Asked) -> dict[str, list[tuple[str, list[Any]]]]:
    """By part of a step, what may shorten it, and words of the command line."""
    from wlb_titan.runtime.pipeline.build import keys_of_stages

    degrees, context = job.degrees, "hybrid" if job.degrees.context > 1 else job.policy.context
    lazy = Policy("wlb_lazy", context, "best" if degrees.pipeline > 1 else job.policy.order)
    sizes = ("local", 2 * job.replica_micro_batches), ("global", 2 * job.micro_batches)
    more = [word for name, size in sizes for word in (f"--training.{name}_batch_size", size)]
    most = job.model.layers // degrees.pipeline if job.schedule in ("1F1B", "Interleaved1F1B") else 0
    chunks = range(job.chunks + 1, most + 1)
    ways = (keys_of_stages(job.model.layers, number * degrees.pipeline) for number in chunks)
    keys = next((keys for keys in ways if keys.pop("module_fqns_per_model_part") is None), {})
    stages = [word for key, value in keys.items() for word in (f"--parallelism.{key}", value)]
    stages += ["--parallelism.pipeline_parallel_schedule", "Interleaved1F1B"]
    search = ("Other degrees of as many GPUs", ["--search"])
    hybrid = ("Short documents stay whole", ["--wlb.policy", job.policy._replace(context=context)])
    twice = ["--parallelism.context_parallel_degree", 2 * degrees.context]
    return {
        "waiting in the pipeline": [
            ("Documents in slices", ["--wlb.policy", Policy("slim", context)]),
            ("Twice the micro-batches in a step, which changes training", more),
            ("More stages on each rank", stages if keys else []),
            search,
        ],
        "waiting for replicas": [("Micro-batches of equal work", ["--wlb.policy", lazy]), search],
        "slowest CP rank": [hybrid],
        "context parallelism": [hybrid, ("Keys behind attention", ["--wlb.context.groups", "auto"])],
        "tensor parallelism": [search],
        "experts' exchange": [search],
        "data parallelism": [search],
        "recomputed": [("Twice the GPUs", twice)],
    }
