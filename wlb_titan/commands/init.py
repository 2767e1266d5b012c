"""`wlb-titan init`: a first experiment for the machine at hand."""

from __future__ import annotations

import os
from pathlib import Path

import click

from wlb_titan.commands.command_line import writing
from wlb_titan.config.values import to_text
from wlb_titan.errors import UserError

EXPERIMENT = """\
# Every key: `wlb-titan config show {file}`. What they mean: docs/configuration.md.
base = "{base}" # {base_note}
dump_folder = "outputs/first" # metrics, checkpoints, traces

[wlb]
policy = "wlb_lazy" # micro-batches of equal work; "plain": of equal token counts

[wlb.corpus]
path = {corpus} # made by `wlb-titan prepare`; formats of others are read as they are

[training]
seq_len = {window} # the longest document that the model sees; longer ones are cut
global_batch_size = 8 # micro-batches of a step
local_batch_size = 1 # of them at a time, on each data-parallel rank
steps = 20
{training}
[parallelism]
data_parallel_shard_degree = {processes} # a process each{devices}

[checkpoint]
enable = true
interval = 10 # steps; a run that is stopped saves besides

[metrics]
log_freq = 1 # steps
"""


@click.command()
@click.argument("file", type=click.Path(path_type=Path), default=Path("job.toml"))
@click.option("--corpus", default="outputs/corpus", show_default=True, help="What to train on.")
def init(file: Path, corpus: str) -> None:
    """Write a first experiment for this machine to FILE (job.toml), to be trained as it is and then changed.

    It trains a small model on all GPUs that torch finds, or on the CPU, in a few minutes.
    """
    if file.exists():
        raise UserError(f"{file} is there already; name another file.")
    import torch

    text = experiment(str(file), corpus, torch.accelerator.device_count(), os.cpu_count() or 1)
    with writing(str(file)):
        file.write_text(text, encoding="utf-8")
    click.echo(f"{file} is written. Next:\n")
    if not Path(corpus).exists():
        click.echo(f"  wlb-titan prepare {corpus} --max-tokens 4000000    # this machine's Python files")
    click.echo(f"  wlb-titan config check {file}")
    click.echo(f"  wlb-titan train {file}")


def experiment(file: str, corpus: str, gpus: int, cores: int) -> str:
    """The text of a first experiment; `cores` count where there is no GPU."""
    # A step's 8 micro-batches divide over 1, 2, 4 or 8 processes.
    processes = max(number for number in (1, 2, 4, 8) if number <= max(gpus or min(cores, 4), 1))
    if gpus:
        machine = {
            "base": "llama2_550m",
            "base_note": "the WLB-LLM paper's smallest model; it fits a GPU of 24 GiB",
            "window": 16384,
            "training": 'mixed_precision_param = "bfloat16"\n',
            "devices": ", with a GPU",
        }
    else:
        machine = {
            "base": "llama3_debug",
            "base_note": "1.8 M parameters, for CPUs",
            "window": 2048,
            "training": "",
            "devices": "",
        }
    return EXPERIMENT.format(file=file, corpus=to_text(corpus), processes=processes, **machine)
