"""The program that every rank runs: `torchrun ... -m wlb_titan.runtime.train --config FILE [overrides]`.

Users start it through TorchX (`torchx run wlb.train`), which computes the number of processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wlb_titan.errors import UserError, drop_peers_warnings, warn

if TYPE_CHECKING:  # torch is imported only when the ranks watch each other
    from wlb_titan.config.load import Resolved
    from wlb_titan.corpus import Corpus
    from wlb_titan.runtime.ends import Alarm

PACKAGE = Path(__file__).parents[1]
PR_SET_PDEATHSIG = 1  # of Linux' <linux/prctl.h>


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--config", "path", required=True, metavar="FILE", help="TOML file of the experiment.")
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
def main(path: str, overrides: tuple[str, ...]) -> None:
    """Trains as FILE says; OVERRIDES such as --training.steps 5 come last and win."""
    set_allocator()
    drop_peers_warnings()
    end_with_launcher(signal.SIGKILL)  # until the alarm watches it
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    warnings.showwarning = partial(show_warning, warnings.showwarning, rank)
    try:
        from wlb_titan.runtime.ends import Alarm

        with Alarm(rank, world_size) as alarm:
            end_with_launcher(0)
            sys.exit(train(path, overrides, rank, world_size, alarm))
    except UserError as error:  # the ranks cannot even reach each other
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def train(path: str, overrides: tuple[str, ...], rank: int, world_size: int, alarm: Alarm) -> int:
    """Runs an experiment in one of the launcher's processes; returns the exit status, `Stop.status` if it was
    stopped. A configuration that cannot run is refused before the dump folder is changed."""
    from wlb_titan.runtime.cpu_device import use_cpu_without_accelerator
    from wlb_titan.toml.sources import read_sources

    if read_sources(path, overrides).written().get("wlb.device") == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before anything asks CUDA for a GPU
    on_cpu = use_cpu_without_accelerator()

    import torch

    from wlb_titan.runtime.checks import validate_inputs, validate_machine
    from wlb_titan.runtime.configured import parallel_dims
    from wlb_titan.runtime.dump_folder import changed_since
    from wlb_titan.runtime.metrics import start_log
    from wlb_titan.runtime.models.load import load_config

    resolved = load_config(path, overrides, world_size=world_size)
    config, job = resolved.config, resolved.job
    if not on_cpu and config.wlb.device == "cpu":
        raise UserError(
            "wlb.device: the base asks for the CPU, but this process has found a GPU already; set it in "
            "the TOML file, which is read before."
        )
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if torch.accelerator.device_count() == 1 and shown and "," not in shown:
        processes = 1  # the launcher shows each process its own GPU
    start_log(rank, parallel_dims(config, world_size), config.parallelism.pipeline_parallel_schedule)
    if rank == 0:  # which tells the others
        if changed := changed_since(path):
            warn(changed)
        job = resolved.told(job)
    resolved.check(lambda config: validate_machine(config, job, processes))
    corpus = resolved.check(validate_inputs)
    return _run(resolved, corpus, rank, alarm)


def show_warning(
    others: Callable[..., None], rank: int, message: Warning, kind: type[Warning], file: str, *place: Any
) -> None:
    """Shows a warning of ours in a line and on rank 0, as all ranks come to the same one."""
    if PACKAGE not in Path(file).parents:
        others(message, kind, file, *place)
    elif rank == 0:
        print(f"Warning: {message}", file=sys.stderr, flush=True)


def end_with_launcher(number: int) -> None:
    """Has the kernel send this process a signal, or none (0), when its launcher is gone."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def allocator() -> str:
    """The user's setting of torch's allocator, or ours: each step needs blocks of other sizes, and segments
    that cannot grow would be cut into useless pieces."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    return next((os.environ[name] for name in names if name in os.environ), "expandable_segments:True")


def set_allocator() -> None:
    """Call it before CUDA starts."""
    os.environ["PYTORCH_ALLOC_CONF"] = allocator()


def _run(resolved: Resolved, corpus: Corpus, rank: int, alarm: Alarm) -> int:
    from torch.distributed.elastic.multiprocessing.errors import record
    from torchtitan.observability import structured_logger

    from wlb_titan.runtime.dump_folder import held
    from wlb_titan.runtime.ends import seconds_of

    config = resolved.config
    if config.wlb.stop_after:
        alarm.stop.after(seconds_of(config.wlb.stop_after))
    with held(Path(config.dump_folder)) if rank == 0 else contextlib.nullcontext():
        structured_logger.init_structured_logger(
            source="training", output_dir=config.dump_folder, enable=config.debug.enable_structured_logging
        )
        # `record` hands this rank's traceback to the launcher.
        return record(_build_and_train)(resolved, corpus, rank, alarm)


def _build_and_train(resolved: Resolved, corpus: Corpus, rank: int, alarm: Alarm) -> int:
    import torch

    from wlb_titan.runtime.bench import BenchTrainer
    from wlb_titan.runtime.checkpoints import explained, move_aside
    from wlb_titan.runtime.dump_folder import note_beginning

    config = resolved.config
    benches = bool(config.wlb.bench.policies)
    build = BenchTrainer if benches else lambda config, corpus: config.build(corpus=corpus)
    trainer = resolved.check(lambda config: build(config, corpus))
    folder = Path(config.dump_folder)
    begun = False

    def begin(step: int) -> None:
        nonlocal begun
        begun = True
        if rank == 0 and not benches:
            if not config.checkpoint.load_only:
                move_aside(folder / config.checkpoint.folder, trainer.beginning)
            note_beginning(folder, resolved.to_toml(), step)

    try:
        if config.checkpoint.create_seed_checkpoint:
            if done := alarm.stop.goes_on():
                begin(0)
                trainer.finite.check(trainer, saves=True)
                trainer.checkpointer.save(curr_step=0, last_step=True)
        else:
            done = trainer.train(begin, alarm.stop.goes_on)
    except BaseException as error:  # torch's CheckpointException is no Exception
        raise explained(error, config, trainer.beginning.step, saving=begun) from error
    alarm.stop.leave()
    alarm.close()
    trainer.close()
    torch.distributed.destroy_process_group()
    return 0 if done else alarm.stop.status


if __name__ == "__main__":
    status = 0
    try:
        main()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    # A normal exit sometimes ends in SIGABRT, from threads of torch's communication.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
