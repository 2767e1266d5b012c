"""`wlb-titan export`: a checkpoint of a run as a model in Hugging Face's format."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import click
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from wlb_titan.commands import command_line as cli
from wlb_titan.errors import UserError
from wlb_titan.progress import Progress, counted

PARTS = 20  # of the weights, read one after the other


@click.command(cls=cli.OfFile)
@click.argument("step", type=cli.NUMBER, metavar="STEP")
@click.option("--output", type=click.Path(path_type=Path), metavar="DIR", help="New folder to write.")
def export(file: Path, step: int, overrides: tuple[str, ...], output: Path | None) -> None:
    """Write the checkpoint of STEP as a model that transformers and vLLM open.

    FILE is the run's TOML file, or the config.toml in its dump folder. Writes what checkpoint.last_save_in_hf
    does to --output or <dump_folder>/hugging_face/step-<STEP>. One process does it on the CPU; it needs
    memory for twice the model in checkpoint.export_dtype, and the corpus, which has the tokenizer.
    """
    resolved = cli.load(file, overrides)
    folder = output or Path(resolved.config.dump_folder) / "hugging_face" / f"step-{step}"
    with cli.progress() as report:
        resolved.check(lambda config: write(config, step, folder, report))
    click.echo(f"{folder} is step {step} as a model in Hugging Face's format, with its tokenizer.")


def write(config: Any, step: int, output: Path, report: Progress) -> None:
    from wlb_titan.runtime import checkpoints, hugging_face
    from wlb_titan.runtime.checks import validate_inputs
    from wlb_titan.runtime.model_checks import trained_spec
    from wlb_titan.runtime.models.adoption import adapters

    checkpoint, folder = config.checkpoint, Path(config.dump_folder) / config.checkpoint.folder
    saved = folder / f"step-{step}"
    if output.exists():
        raise UserError(f"--output: {output} already exists; name another folder.")
    exported = (saved / checkpoints.HUGGING_FACE_INDEX).is_file()
    if fault := "is in that format already" if exported else checkpoints.damage(saved, ()):
        there = ", ".join(sorted(path.name for path in folder.glob("step-*"))) or "no checkpoint"
        raise UserError(f"STEP: {saved} cannot be exported: it {fault}. In {folder} there is {there}.")
    if checkpoint.initial_load_in_hf or checkpoint.last_save_in_hf:
        hugging_face.drop_router_bias(config.model_spec)  # as the run did
    spec = trained_spec(config)
    if lost := [f"LoRA's {name}" for name in adapters(spec.model)] or hugging_face.exchanged(spec)[1]:
        raise UserError(
            f"base: Hugging Face's format, as the base's adapter knows it, has no place for {len(lost)} "
            f"parts of the model, such as {lost[0]}; no checkpoint of it can be exported."
        )
    corpus = validate_inputs(config)
    config.model_spec = spec
    dtype, state = getattr(torch, checkpoint.export_dtype), hugging_face.on_meta(spec).state_dict()
    for name, weight in state.items():
        state[name] = torch.empty(weight.shape, dtype=dtype if weight.is_floating_point() else weight.dtype)
    names = list(state)
    try:
        for part in counted(range(min(PARTS, len(names))), report, "Reading weights"):
            weights = {name: state[name] for name in names[part::PARTS]}
            load(weights, checkpoint_id=saved, no_dist=True)
    except CheckpointException as error:
        raise checkpoints.explained(error, config, step, saving=False) from error
    if wrong := [name for name, weight in state.items() if not checkpoints.all_finite(weight)]:
        raise UserError(
            f"STEP: {saved} cannot be exported: {len(wrong)} of its weights, such as {wrong[0]}, have "
            "numbers that are not finite. Name an earlier step."
        )
    adapter = spec.state_dict_adapter(spec.model, str(corpus.tokenizer_path))
    files = hugging_face.export_files(config, corpus)
    writer = HuggingFaceStorageWriter(
        str(output), adapter.fqn_to_index_mapping, save_distributed=True, enable_consolidation=True
    )
    weights, over = adapter.to_hf(state), Event()

    def watch() -> None:
        total = 2 * sum(weight.nbytes for weight in weights.values())  # a shard, and what is made of it
        while not over.wait(0.2):
            written = sum(file.stat().st_size for file in output.rglob("*.safetensors"))
            report("Writing MiB", written >> 20, total >> 20)

    with cli.writing(str(output)), ThreadPoolExecutor(1) as pool:
        hugging_face.begin_export(output, files)
        pool.submit(watch)
        try:
            save(weights, storage_writer=writer, no_dist=True)
        finally:
            over.set()
        hugging_face.complete_export(output)
