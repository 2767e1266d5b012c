"""`wlb-titan simulate --search`: degrees, schedules and policies, ranked, and a file of the best."""

from __future__ import annotations

import os
import shlex
import time
from pathlib import Path
from typing import Any

from wlb_titan.commands import command_line as cli
from wlb_titan.dimensions.dimension import TORCHTITAN
from wlb_titan.files import save
from wlb_titan.job import Job, Policy
from wlb_titan.runtime.models.load import Loaded, load_config
from wlb_titan.simulator.choice import Scenario
from wlb_titan.simulator.search import Search, pipeline_words, search
from wlb_titan.toml.build import dotted
from wlb_titan.toml.sources import COMMAND_LINE
from wlb_titan.toml.values import to_text

SEARCH_SECONDS = 300.0
SHOWN = 12  # candidates


def print_search(asked: cli.Asked, policies: list[Policy], steps: int, gpus: int, write: Path | None) -> None:
    """Searches degrees of so many GPUs, prints what came of it, and may write the best into a file."""
    end = time.monotonic() + SEARCH_SECONDS
    with cli.progress() as report:
        goes_on = lambda what: time.monotonic() < end  # noqa: E731
        scenario = Scenario(asked.job, asked.documents)
        result = search(scenario, gpus, policies, steps, goes_on, report, asked.loaded.told)
    cli.show_table(search_rows(result)[:SHOWN])
    cli.say(gain(result))
    if result.untried:
        cli.say(f"There was no time in {SEARCH_SECONDS:g} s for {result.untried} other ways to run the job.")
    words = winner_words(result.found[0].job, asked.loaded)
    if write is not None:
        write_best(write, words, asked.loaded, gpus)
        file = shlex.quote(str(write))
        cli.say(f"{write} has the best. To run it: wlb-titan train {file}; by Slurm: wlb-titan slurm {file}")
    elif words:
        cli.say(f"To run it: {shlex.join(words)}")


def search_rows(result: Search) -> cli.Rows:
    """A row for each candidate, the fastest first."""
    best = result.found[0].flops_per_second
    return [
        {
            "degrees": str(prediction.job.degrees),
            "schedule": pipeline_words(prediction.job),
            "policy": str(prediction.job.policy),
            "L_max": f"{prediction.job.longest_micro_batch:,}",
            **prediction.figures(),
            "of best": f"{prediction.flops_per_second / best:.1%}",
        }
        for prediction in result.found
    ]


def gain(result: Search) -> str:
    """A sentence on what the best gains over the configured job."""
    best, configured = result.found[0], result.configured
    if configured is None:
        return "No gain is reported: the configured job needs another number of GPUs, or does not fit."
    words = [f"{run.job.degrees}, {pipeline_words(run.job)}, {run.job.policy}" for run in (best, configured)]
    return (
        f"The best ({words[0]}) does {best.flops_per_second / configured.flops_per_second:.2f}x the FLOPs "
        f"and {best.tokens_per_second / configured.tokens_per_second:.2f}x the tokens a second of the "
        f"configured job at its best ({words[1]})."
    )


def winner_words(job: Job, loaded: Loaded) -> list[str]:
    """Overrides that turn a configuration of the same model and window into this job."""
    degrees, policy = job.degrees, job.policy
    wanted: dict[str, Any] = {
        "wlb.policy": "/".join(policy),
        "training.local_batch_size": job.replica_micro_batches,
        "training.global_batch_size": job.micro_batches,
    }
    wanted |= {f"parallelism.{cls.key}": getattr(degrees, name) for name, cls in TORCHTITAN.items()}
    if degrees.pipeline > 1:
        from wlb_titan.runtime.pipeline.build import keys_of_stages

        wanted["parallelism.pipeline_parallel_schedule"] = job.schedule
        stages = keys_of_stages(job.model.layers, job.shape.stages)
        wanted |= {f"parallelism.{key}": value for key, value in stages.items()}
    configured = {dotted(entry.path): entry.value for entry in loaded.entries}
    words = []
    for key, value in wanted.items():
        if value != configured.get(key):
            text = "none" if value is None else value if isinstance(value, str) else to_text(value)
            words += [f"--{key}", text]
    return words


def write_best(write: Path, words: list[str], loaded: Loaded, gpus: int) -> None:
    """A file that extends the loaded one by what was typed and by the winner's words, and dumps into a folder
    of its own, lest it resume the other's run."""
    file, dumps = Path(loaded.file), Path(loaded.config.dump_folder)
    if loaded.provenance["dump_folder"] != COMMAND_LINE:
        words = ["--dump_folder", str(dumps.parent / write.stem), *words]
    best = load_config(file, [*loaded.overrides, *words], gpus)
    with cli.writing(f"--write: {write}"):
        extended = os.path.relpath(file.parent.resolve() / file.name, write.parent.resolve())
        save(write, best.extending(extended))
