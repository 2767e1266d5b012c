"""Accounts of layers (`memory/told.py`) for models that no formula knows: shipped, kept on this machine, or
traced now, in a process of their own.

A trace cannot run inside a training process: DTensor would give back the meshes of its process group there.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from torchtitan.distributed.activation_checkpoint import SelectiveAC

from wlb_titan.errors import UserError
from wlb_titan.memory.told import ModelAccount, Shape
from wlb_titan.runtime.config import TrainerConfig
from wlb_titan.runtime.models.words import words_of

SHIPPED = Path(__file__).parents[1] / "memory" / "accounts"
KEPT = Path.home() / ".cache" / "wlb_titan" / "accounts"
PROCESS = "wlb_titan.runtime.one_rank.process"
FORMAT = 3  # of what a trace tells
ACCOUNT = TypeAdapter(ModelAccount)

_traced: dict[str, ModelAccount] = {}  # by this process, for a machine on which nothing can be kept


def known(config: TrainerConfig, shape: Shape) -> ModelAccount | None:
    """The account of the configuration's layers in a shape, if it need not be traced."""
    key = key_of(config, shape)
    if key not in _traced:
        for folder in (SHIPPED, KEPT):
            with suppress(OSError, ValueError):
                _traced[key] = ACCOUNT.validate_json((folder / f"{key}.json").read_bytes())
                break
    return _traced.get(key)


def key_of(config: TrainerConfig, shape: Shape) -> str:
    """A name for all that an account follows from."""
    recomputation = config.activation_checkpoint
    facts = [
        FORMAT,
        torch.__version__.partition("+")[0],
        *shape,
        words_of(config.model_spec.model),
        config.training.mixed_precision_param,
        config.parallelism.enable_sequence_parallel,
        words_of(recomputation) if isinstance(recomputation, SelectiveAC.Config) else "",
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]


def trace(
    file: str | Path,
    overrides: Sequence[str],
    config: TrainerConfig,
    world_size: int,
    shapes: Iterable[Shape],
) -> None:
    """Traces the shapes that are not known, of the configuration that the file with overrides gives for so
    many processes; UserError says what a trace ended with."""
    missing = [shape for shape in shapes if known(config, shape) is None]
    if not missing:
        return
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "accounts.json"
        asked = {"run": "layers", "file": str(file), "overrides": [*overrides], "world_size": world_size}
        asked |= {"rank": 0, "shapes": missing, "result": str(result)}
        done = subprocess.run(
            [sys.executable, "-m", PROCESS, json.dumps(asked)],
            env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
        )
        if not result.exists():
            raise UserError(f"The process that traces the layers ended: {done.stderr.strip()[-2000:]}")
        told: Any = json.loads(result.read_bytes())
    if "error" in told:
        raise UserError(f"The model's layers cannot be traced: {told['error']}")
    for shape, account in zip(missing, told["accounts"], strict=True):
        key = key_of(config, shape)
        _traced[key] = ACCOUNT.validate_python(account)
        with suppress(OSError):  # another start traces it again
            KEPT.mkdir(parents=True, exist_ok=True)
            partial = KEPT / f"{key}.{os.getpid()}"
            partial.write_text(json.dumps(account), encoding="utf-8")
            partial.replace(KEPT / f"{key}.json")
