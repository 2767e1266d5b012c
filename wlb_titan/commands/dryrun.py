"""`wlb-titan dryrun`: a whole step of a big job on this machine, without its GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wlb_titan.commands.console import print_choice
from wlb_titan.commands.dryrun_report import print_rank
from wlb_titan.errors import UserError
from wlb_titan.memory.fits import usable_share
from wlb_titan.memory.peak import GIB

if TYPE_CHECKING:
    from wlb_titan.config import Resolved

DEFAULT_STEP = 9
"""By then the queues of balancing policies have filled."""

SYNTHETIC_TOKENS = 1 << 26
"""At most so many, of a corpus that stands for one that is not here: 256 MiB on the disk, for a moment."""


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED, metavar="[--SECTION.KEY VALUE]...")
@click.option(
    "--rank",
    "ranks",
    default="first,last",
    show_default=True,
    metavar="N,...",
    help="Global ranks to run, each in a process of its own; first and last are those of the job, which are "
    "of the first and of the last pipeline rank.",
)
@click.option(
    "--policy",
    metavar="PACKING[:SHARDING[:ORDER]]",
    help="Policies instead of the file's, such as wlb_lazy:hybrid:best.",
)
@click.option(
    "--world-size",
    type=click.IntRange(min=1),
    metavar="N",
    help="GPUs of the job; by default as many as the configured degrees need.",
)
@click.option(
    "--step",
    type=click.IntRange(min=1),
    default=DEFAULT_STEP,
    show_default=True,
    help="Step of the plan to run.",
)
@click.option(
    "--device-gib",
    type=click.FloatRange(min=0, min_open=True),
    metavar="GIB",
    help="Memory of a GPU: bounds the length of micro-batches as the job would, and says whether it fits.",
)
@click.option(
    "--output", type=click.Path(path_type=Path), metavar="FILE.json", help="Write the results as JSON."
)
def dryrun(
    file: Path,
    overrides: tuple[str, ...],
    ranks: str,
    policy: str | None,
    world_size: int | None,
    step: int,
    device_gib: float | None,
    output: Path | None,
) -> None:
    """Run one step of FILE's job on this machine, without its GPUs: run it before you queue for a cluster.

    Each rank that is asked for is built and parallelised as the job builds it, on tensors that have shapes
    but no memory and in a process group that has no other processes, and runs a whole planned step: forward,
    backward, clipping, optimizer. Reported are its parameters, its collectives, the traced peak of its
    memory beside the predicted one, and any error as the job would meet it.

    Takes some seconds to a minute a rank, and about 1 GiB of memory. Nothing is trained, loaded or saved. If
    the corpus is not on this machine, documents of synthetic lengths take its place.
    """
    from wlb_titan.runtime.load import load_config

    words = [*overrides, *_policy_words(policy)]
    resolved = load_config(file, words, world_size)
    config = resolved.config
    # torchtitan takes seconds to import, so that is left until the file has been found good.
    from wlb_titan.runtime.corpus import open_corpus
    from wlb_titan.runtime.job import cluster_at_hand, degrees_product, documents_of, job_of, parallel_dims
    from wlb_titan.simulator.choice import choose

    world_size = world_size or degrees_product(config)
    numbers = _numbers(ranks, world_size)
    job = job_of(config, parallel_dims(config, world_size))
    if device_gib is not None:
        job = job.on(replace(job.cluster, memory=device_gib * GIB))
    if not config.wlb.cluster:  # the ranks' processes do not see the device
        words += ["--wlb.cluster", cluster_at_hand(config.wlb.device)]
    with tempfile.TemporaryDirectory(prefix="wlb-dryrun-") as folder:
        words += ["--dump_folder", folder, *_corpus_words(resolved, job.micro_batches, step, Path(folder))]
        if job.undecided:
            settings = load_config(file, words, world_size).config.wlb.corpus
            choice = choose(
                job, documents_of(settings, open_corpus(settings), config.wlb.validation.hold_out)
            )
            print_choice(choice)
            job = choice.job
            words += _policy_words(str(job.policy))
        slices = job.packing.owner.slices
        bound = "" if slices else f", micro-batches of at most {job.longest_micro_batch:,} tokens"
        click.echo(f"Step {step} of {file}{bound}.")
        words = ["--device-bytes", str(job.cluster.memory), str(file), *words]
        results = _run(words, numbers, world_size, step, Path(folder))
    if output is not None:
        _write(output, results)
    for result in results:
        print_rank(result, world_size)
    if device_gib is not None:
        _say_whether_it_fits(results, device_gib, usable_share(slices))
    if any("error" in result for result in results):
        sys.exit(1)


def _policy_words(policy: str | None) -> list[str]:
    """Overrides of the configuration; an unknown policy is refused with the configuration."""
    if policy is None:
        return []
    keys = ("--wlb.packing.policy", "--wlb.sharding.policy", "--wlb.pipeline.order")
    parts = [part.strip() for part in policy.split(":")]
    if len(parts) > len(keys):
        raise UserError(f"--policy: {policy!r} has too many parts; a policy is packing[:sharding[:order]].")
    return [word for key, part in zip(keys, parts, strict=False) for word in (key, part)]


def _numbers(ranks: str, world_size: int) -> list[int]:
    """The global ranks that `--rank` names, in its order."""
    numbers = []
    for word in ranks.split(","):
        text = {"first": "0", "last": str(world_size - 1)}.get(word.strip(), word.strip())
        if not (text.isascii() and text.isdigit() and int(text) < world_size):
            raise UserError(
                f"--rank: {word.strip()!r} is none of the job's {world_size} ranks; name numbers from 0 to "
                f"{world_size - 1}, first or last, with commas between them."
            )
        numbers.append(int(text))
    return list(dict.fromkeys(numbers))


def _corpus_words(resolved: Resolved, micro_batches: int, step: int, folder: Path) -> list[str]:
    """Overrides that name a corpus: the configured one, or synthetic lengths if it is not on this machine.

    Args:
        resolved: the configuration.
        micro_batches: of the whole job in a step.
        step: of the plan, that is reached.
        folder: for a synthetic corpus.
    """
    from wlb_titan.corpus.synthetic import SHAPE, long_tailed_lengths, write_synthetic_corpus
    from wlb_titan.runtime.validation import validate_corpus

    corpus = resolved.config.wlb.corpus
    paths = [source.path for source in corpus.sources] or [corpus.path]
    # Megatron's files are named without their endings.
    missing = [path for path in paths if not (Path(path).exists() or Path(f"{path}.bin").exists())]
    if not missing:
        resolved.check(validate_corpus)
        return []
    click.echo(
        f"There is no corpus at {', '.join(missing)}: planning on synthetic lengths instead, {SHAPE}. The "
        "job's own plan needs its corpus here (`wlb-titan prepare`).",
        err=True,
    )
    window = resolved.config.training.seq_len
    tokens = min((step + 1) * micro_batches * window, SYNTHETIC_TOKENS)
    write_synthetic_corpus(folder / "corpus", long_tailed_lengths(tokens, window))
    alone = ["--wlb.corpus.sources", "[]"] if corpus.sources else []
    return ["--wlb.corpus.path", str(folder / "corpus"), "--wlb.corpus.tokenizer", "", *alone]


def _run(
    words: list[str], ranks: list[int], world_size: int, step: int, folder: Path
) -> list[dict[str, Any]]:
    """A process for each rank, as many at a time as there are cores.

    Args:
        words: options of all ranks, the file and its overrides.
        ranks: global ranks.
        world_size: of the job.
        step: of the plan.
        folder: for what they find.
    """

    def run(rank: int) -> dict[str, Any]:
        result = folder / f"rank{rank}.json"
        command = [sys.executable, "-m", "wlb_titan.runtime.dryrun", "--rank", str(rank)]
        command += ["--world-size", str(world_size), "--step", str(step), "--result", str(result)]
        # An accelerator that is there is not used: tensors have no memory, and the trace is of the CPU.
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        process = subprocess.run(
            [*command, *words], env=environment, capture_output=True, text=True, check=False
        )
        if result.exists():
            found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
            return found
        tail = process.stderr.strip()[-2000:]
        return {"rank": rank, "error": f"the process ended with exit code {process.returncode}: {tail}"}

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(run, ranks))


def _write(output: Path, results: list[dict[str, Any]]) -> None:
    try:
        output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--output: {output} cannot be written: {error.strerror}.") from error


def _say_whether_it_fits(results: list[dict[str, Any]], device_gib: float, usable: float) -> None:
    traced = [result["traced_gib"] for result in results if "error" not in result]
    if traced:
        share = max(traced) / device_gib
        verdict = "fits" if share <= usable else "leaves too little room" if share <= 1 else "does not fit"
        click.echo(
            f"\nThe fullest of these ranks needs {max(traced):.2f} of {device_gib:g} GiB, {share:.0%}: it "
            f"{verdict} (up to {usable:.0%} leaves room for fragmentation, CUDA and NCCL)."
        )
