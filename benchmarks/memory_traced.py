"""Predicted beside traced peaks of memory: models, what layers recompute, and ways to divide them.

    python benchmarks/memory_traced.py [BASE ... table_1 flops]

A dry run is rank 0's first step of two micro-batches (four in a pipeline) of 16K tokens, with the base's own
widths and vocabulary but its first layers alone, on H100s with memory for all; under `as_needed` with 5/6
of what `none` takes. The files of Table 1 (`table_1`) run as they are, plain and balanced, at their ninth
step, on the first and the last rank. `flops` are those that MFU counts of a token's forward pass through the
layers, without attention, beside those of the products that a trace of the same layers sees.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from common import save, saved, show

ROOT = Path(__file__).parents[1]
KINDS = {
    "none": ["--activation_checkpoint", "none"],
    "keys": ["--activation_checkpoint.class", "KeysAC"],
    "selective": ["--activation_checkpoint.class", "SelectiveDocumentAC"],
    "full": ["--activation_checkpoint.class", "FullAC"],
    "as_needed": ["--activation_checkpoint.class", "AsNeededAC"],
}
LAYERS = {  # packages of bases, and how many layers are run: with the dense ones, and all kinds of windows
    "llama3_8b": ("llama3", 8),
    "llama3_8b_lora": ("llama3", 8),
    "qwen3_30b_a3b": ("qwen3", 8),
    "gpt_oss_20b": ("gpt_oss", 8),
    "deepseek_v3_16b": ("deepseek_v3", 6),
    "muse_glimmer_30b": ("muse_glimmer", 8),
}
WHOLE = "muse_glimmer_30b"  # cannot be cut into stages
EXPERTS = ("a3b", "oss", "deepseek")
DEGREES = {"DP": "data_parallel_shard_degree"} | {
    name: f"{axis}_parallel_degree"
    for name, axis in {"TP": "tensor", "CP": "context", "PP": "pipeline", "EP": "expert"}.items()
}
LAYOUTS = {  # degrees, and other words
    "DP 8": [],
    "TP 2 DP 4": [],
    "CP 2 DP 4": ["--wlb.policy", "wlb_lazy/hybrid"],
    "CP 8": ["--wlb.policy", "wlb_lazy/hybrid"],
    "PP 2 DP 4": ["--parallelism.pipeline_parallel_schedule", "1F1B", "--training.local_batch_size", "4"],
    "CP 2 DP 4 slices": ["--wlb.policy", "slim/hybrid"],
}
TABLE_1 = [f"llama2_{size}_{window}" for size in ("550m", "7b", "30b", "70b") for window in ("64k", "128k")]
BALANCED = "--wlb.policy wlb_lazy/hybrid/best --parallelism.pipeline_parallel_schedule Interleaved1F1B"


def __getattr__(name: str) -> Any:
    """A base of LAYERS, cut, as `memory_traced:NAME`."""
    if name not in LAYERS:
        raise AttributeError(name)
    return partial(_cut, name)


def _cut(name: str) -> Any:
    from torchtitan.components.lora import LoRAConverter

    from wlb_titan.runtime.models.bases import base_config

    package, layers = LAYERS[name]
    config = base_config(f"torchtitan.models.{package}.config_registry:{name.removesuffix('_lora')}")
    if name.endswith("_lora"):
        converter = LoRAConverter(LoRAConverter.Config(rank=16, alpha=32.0))
        config.model_spec.model = converter.convert(config.model_spec.model)
    config.model_spec.model.layers = config.model_spec.model.layers[:layers]
    return config


def dry_run(file: Path, words: Sequence[str], *options: str) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "ranks.json"
        command = [sys.executable, "-m", "wlb_titan.commands.main", "dryrun", str(file), *words]
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"PYTHONPATH": path}
        options = (*options, "--output", str(output))
        subprocess.run([*command, *options], check=True, stdout=subprocess.DEVNULL, env=environment)
        ranks: list[dict[str, Any]] = json.loads(output.read_text())
    return ranks


def of_table_1() -> Iterator[dict[str, Any]]:
    for name in TABLE_1:
        for words in ("", BALANCED):
            ranks = dry_run(ROOT / "train_configs" / f"{name}.toml", words.split(), "--step", "9")
            for rank in ranks:
                yield row(rank, base=name, kind="as_needed", layout="balanced" if words else "plain")


@contextmanager
def job_file(name: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "job.toml"
        file.write_text(
            f'base = "memory_traced:{name}"\n'
            'wlb = { cluster = "h100_roce", corpus.path = "not_here" }\n'
            "training = { seq_len = 16384, local_batch_size = 2 }\n"
        )
        yield file


def of_base(name: str) -> Iterator[dict[str, Any]]:
    """Each kind at DP 8, then each layout under `selective`."""
    none = 0.0
    with job_file(name) as file:
        layouts = [layout for layout in LAYOUTS if name != WHOLE or "PP" not in layout]
        cases = [(kind, "DP 8") for kind in KINDS] + [("selective", layout) for layout in layouts][1:]
        for kind, layout in cases:
            gib = none * 5 / 6 if kind == "as_needed" else 1000.0
            words = [*KINDS[kind], *LAYOUTS[layout], *degrees_of(name, layout)]
            (rank,) = dry_run(file, words, "--rank", "first", "--step", "1", "--device-gib", str(gib))
            none = none or rank["traced_gib"]
            yield row(rank, base=name, kind=kind, layout=layout)


def flops() -> Iterator[dict[str, Any]]:
    from wlb_titan.cost.told import Shape
    from wlb_titan.runtime import accounts
    from wlb_titan.runtime.configured import model_shape
    from wlb_titan.runtime.models.load import load_config

    for name in LAYERS:
        with job_file(name) as file:
            words, one = ["--parallelism.expert_parallel_degree", "1"], [Shape(1, 1, 1)]
            config = load_config(file, words).config
            accounts.trace(config, file, words, 1, one)
        (account,) = accounts.known(config, one).values()
        model = model_shape(config.model_spec.model)
        counted = sum(account.layers[number].work.forward.products for number in account.numbers)
        of_layers = 2.0 * (model.linear_weights - model.hidden * model.vocabulary)
        yield {"base": name, "of_mfu": of_layers, "counted": counted, "difference": of_layers / counted - 1}


def degrees_of(name: str, layout: str) -> list[str]:
    words = layout.split()
    degrees = dict(zip(words[::2], words[1::2], strict=False))
    if any(part in name for part in EXPERTS):
        # Ranks that share experts meet in every pass, so those that slice documents are of one replica.
        degrees["EP"] = degrees["CP"] if "slices" in words else "4" if "PP" in degrees else "8"
    return [word for axis, degree in degrees.items() for word in (f"--parallelism.{DEGREES[axis]}", degree)]


def row(rank: dict[str, Any], **facts: str) -> dict[str, Any]:
    kept = ("rank", "predicted", "traced", "predicted_gib", "traced_gib")
    difference = rank["predicted_gib"] / rank["traced_gib"] - 1
    longest = max(rank["lengths"])
    return {**facts, **{name: rank[name] for name in kept}, "longest": longest, "difference": difference}


COLUMNS = {
    "model": "{base}",
    "recomputes": "{kind}",
    "layout": "{layout}",
    "rank": "{rank}",
    "longest micro-batch": "{longest:,}",
    "predicted GiB": "{predicted_gib:.2f}",
    "traced GiB": "{traced_gib:.2f}",
    "difference": "{difference:+.1%}",
}
FLOPS = {
    "model": "{base}",
    "FLOPs a token, for MFU": "{of_mfu:.4g}",
    "counted": "{counted:.4g}",
    "difference": COLUMNS["difference"],
}


def main() -> None:
    for name in sys.argv[1:] or [*LAYERS, "table_1", "flops"]:
        if name == "flops":
            save("flops_traced", show(FLOPS, flops()))
            continue
        found = show(COLUMNS, of_table_1() if name == "table_1" else of_base(name))
        run = {row["base"] for row in found}
        save("memory_traced", [row for row in saved("memory_traced") if row["base"] not in run] + found)


if __name__ == "__main__":
    main()
