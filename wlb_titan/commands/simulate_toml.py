"""`wlb-titan simulate --search --write`: the winner of a search as a TOML file that trains."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from wlb_titan.commands.errors import writing
from wlb_titan.commands.job import Asked
from wlb_titan.commands.report.simulate import gain
from wlb_titan.config.build import Entry
from wlb_titan.config.values import to_text
from wlb_titan.config.writing import document
from wlb_titan.errors import ConfigError, PlanError, UserError
from wlb_titan.job import Job
from wlb_titan.simulator.search import Search

SOURCE = "searched"


def check_writable(path: Path, strangers: list[str]) -> None:
    """Raises PlanError, before anything is searched, if a winner could not be written to `path`.

    Args:
        strangers: names of options that were given and that no key says.
    """
    if path.exists():
        raise PlanError(f"--write: {path} exists; name another file, or remove it.")
    if strangers:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in strangers)
        raise PlanError(f"--write: no key says what {names} changed; leave that out.")


def write_winner(path: Path, asked: Asked, result: Search) -> None:
    """Writes a file that trains as the fastest job found, and loads it to see that.

    It extends the file that was searched from, with the changes of the command line.

    Raises:
        UserError: the file cannot be written.
        ConfigError: what the file sets besides does not go together with the winner, such as a key of another
            packing policy; nothing is written then.
    """
    best = result.found[0]
    parent = Path(os.path.relpath(asked.file.resolve(), path.resolve().parent)).as_posix()
    values: dict[str, Any] = {"extends": parent, "dump_folder": f"outputs/{path.stem}", **asked.changes}
    values |= winner_values(best.job)
    head = (
        f"The fastest of {len(result.found)} candidates of `wlb-titan simulate {asked.file} --search --gpus "
        f"{best.job.degrees.ranks}`.",
        f"Predicted on {best.job.cluster.name}: {best.seconds.mean():.3f} s a step, "
        f"{best.tokens_per_second:,.0f} tokens/s, {best.mfu:.1%} MFU,",
        f"{best.peak_memory.total / 2**30:.1f} GiB on the fullest GPU.",
        gain(result),
    )
    entries = [Entry(tuple(key.split(".")), value, SOURCE, to_text(value)) for key, value in values.items()]
    text = "".join(f"# {line}\n" for line in head) + document(entries)
    with writing(f"--write: {path}"):
        path.write_text(text, encoding="utf-8")
    try:
        _check(path, best.job)
    except UserError as error:
        path.unlink()
        raise ConfigError(
            f"--write: the fastest job cannot be written as a file that extends {asked.file}: {error}"
        ) from error


def winner_values(job: Job) -> dict[str, Any]:
    """By dotted key what makes a configuration of the same model and window this job."""
    degrees, policy = job.degrees, job.policy
    values: dict[str, Any] = {
        "wlb.packing.policy": policy.packing,
        "wlb.sharding.policy": policy.sharding,
        "wlb.pipeline.order": policy.order,
        "training.local_batch_size": job.replica_micro_batches,
        "training.global_batch_size": job.micro_batches,
        "parallelism.tensor_parallel_degree": degrees.tensor,
        "parallelism.context_parallel_degree": degrees.context,
        "parallelism.pipeline_parallel_degree": degrees.pipeline,
        "parallelism.data_parallel_shard_degree": degrees.shard,
        "parallelism.data_parallel_replicate_degree": degrees.replicate,
        "parallelism.expert_parallel_degree": degrees.expert,
    }
    if degrees.pipeline > 1:
        from wlb_titan.runtime.pipeline.schedules import keys_of_stages

        values["parallelism.pipeline_parallel_schedule"] = job.schedule
        stages = keys_of_stages(job.model.layers, job.shape.stages)
        values |= {f"parallelism.{key}": value for key, value in stages.items()}
    return values


def _check(path: Path, job: Job) -> None:
    from wlb_titan.runtime.job import job_of, parallel_dims
    from wlb_titan.runtime.models.load import load_config

    config = load_config(path, world_size=job.degrees.ranks).config
    loaded = job_of(config, parallel_dims(config, job.degrees.ranks))
    for name in ("degrees", "micro_batches", "window", "policy", "layers"):
        assert getattr(loaded, name) == getattr(job, name), f"{path}: not the {name} that were searched"
    assert job.degrees.pipeline == 1 or loaded.shape == job.shape, (
        f"{path}: not the pipeline that was searched"
    )
