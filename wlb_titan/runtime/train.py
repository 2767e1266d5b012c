"""The program that every rank runs: `torchrun ... -m wlb_titan.runtime.train --config FILE [overrides]`.

Users start it through TorchX (`torchx run wlb.train`), which works out the number of processes.
"""

from __future__ import annotations

import os
import sys

import click

from wlb_titan.errors import UserError


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--config", "path", required=True, metavar="FILE", help="TOML file of the experiment.")
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
def main(path: str, overrides: tuple[str, ...]) -> None:
    """Trains as FILE says; OVERRIDES such as --training.steps 5 come last and win."""
    rank = int(os.environ.get("RANK", "0"))
    try:
        train(path, overrides, rank)
    except UserError as error:
        # The same on every rank: once is enough.
        if rank == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def train(path: str, overrides: tuple[str, ...], rank: int) -> None:
    """Runs one experiment in this process, one of the WORLD_SIZE that the launcher started.

    Args:
        path: TOML file.
        overrides: command-line words that win over it.
        rank: of this process.

    Raises:
        UserError: the experiment cannot run as it is; nothing was started.
    """
    allow_segments_to_grow()
    from wlb_titan.runtime.cpu_device import use_cpu_without_accelerator

    on_cpu = use_cpu_without_accelerator()

    from torchtitan.distributed import ParallelDims
    from torchtitan.observability import structured_logger
    from torchtitan.tools.utils import device_module

    from wlb_titan.runtime.console import start_log
    from wlb_titan.runtime.load import load_config
    from wlb_titan.runtime.memory import bound_length, check_memory
    from wlb_titan.runtime.validation import validate_files

    world_size = int(os.environ["WORLD_SIZE"])
    resolved = load_config(path, overrides, world_size=world_size)
    config = resolved.config
    resolved.check(validate_files)
    if config.wlb.device == "cpu" and not on_cpu:
        raise UserError(
            "wlb.device: this process sees an accelerator though the configuration asks for the CPU; start "
            "it with `torchx run wlb.train`, which hides accelerators then, or set CUDA_VISIBLE_DEVICES= "
            "yourself."
        )
    dims = ParallelDims.from_config(config.parallelism, world_size)
    if not on_cpu:
        device_bytes = device_module.get_device_properties(0).total_memory
        resolved.check(lambda config: check_memory(config, dims, device_bytes))
        bound_length(config, dims, device_bytes)
    start_log(rank, dims, config.parallelism.pipeline_parallel_schedule)
    structured_logger.init_structured_logger(
        source="training", output_dir=config.dump_folder, enable=config.debug.enable_structured_logging
    )
    if rank == 0:
        os.makedirs(config.dump_folder, exist_ok=True)
        with open(os.path.join(config.dump_folder, "config.toml"), "w") as file:
            file.write(resolved.to_toml())
    _run(config)


def allow_segments_to_grow() -> None:
    """Has torch map memory as it is needed, unless the user configured its allocator. For before CUDA starts.

    Micro-batches of other lengths ask for blocks of other sizes at every step; segments of a fixed size would
    be cut into pieces that fit none of them.
    """
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def _run(config) -> None:
    import torch
    from torch.distributed.elastic.multiprocessing.errors import record

    @record  # hands this rank's traceback to the launcher, which shows the first failure
    def build_and_train() -> None:
        trainer = config.build()
        try:
            if config.checkpoint.create_seed_checkpoint:
                trainer.checkpointer.save(curr_step=0, last_step=True)
            else:
                trainer.train()
        finally:
            trainer.close()
        torch.distributed.destroy_process_group()

    build_and_train()


if __name__ == "__main__":
    main()
