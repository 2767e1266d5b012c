"""Accounts of layers (`cost/told.py`) for models that no formula knows: shipped, kept on this machine, or
traced now, in a process of their own.

A trace cannot run inside a training process: DTensor would give back the meshes of its process group there.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torchtitan.config import Configurable

from wlb_titan.cost.told import ModelAccount, Shape
from wlb_titan.errors import PlanError, UserError
from wlb_titan.files import checked, digest, load, save
from wlb_titan.job import Job, Policy
from wlb_titan.runtime.config import TrainerConfig
from wlb_titan.runtime.models.checkpointing import mixable
from wlb_titan.runtime.one_rank import at_once, results
from wlb_titan.simulator.choice import candidates_of

SHIPPED = Path(__file__).parents[1] / "cost" / "accounts"
KEPT = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "wlb_titan" / "accounts"
TRACED_BY = ("one_rank", "models", "attention")  # folders with what an account follows from, besides a job

WITHOUT = ("param_init", "sharding_config", "window")
"""Fields by which layers do the same work for a token, but for attention: values and layouts of weights."""

_found: dict[str, ModelAccount] = {}  # also by traces on a machine where nothing can be kept


def shapes_of(job: Job, policies: Iterable[Policy]) -> list[Shape]:
    """Those in which predictions for a job need an account, under policies and each that `auto` may stand for
    in them."""
    shapes = set[Shape]()
    if job.memory_unknown:
        for policy in policies:
            with suppress(PlanError):  # the policy cannot run, as its plans will say
                for decided in candidates_of(under := job.under(policy)):
                    shapes |= {each.layer_shape for each in under.under(decided).by_sharers.values()}
    return sorted(shapes)


def known(config: TrainerConfig, shapes: Iterable[Shape]) -> dict[Shape, ModelAccount]:
    """Accounts of the configuration's layers that need not be traced."""
    pairs = ((shape, _known(key_of(config, shape))) for shape in shapes)
    return {shape: account for shape, account in pairs if account is not None}


def _known(key: str) -> ModelAccount | None:
    if key not in _found:
        for path in (SHIPPED / f"{key}.json", _kept(key)):
            with suppress(OSError, ValueError, UserError):
                _found[key] = load(ModelAccount, path)
                break
    return _found.get(key)


def _kept(key: str) -> Path:
    """Where an account of this version is kept."""
    return KEPT / _version() / f"{key}.json"


@cache
def _version() -> str:
    folders = [Path(__file__).parent / name for name in TRACED_BY]
    return digest(sorted(path for folder in folders for path in folder.glob("*.py")))


def key_of(config: TrainerConfig, shape: Shape) -> str:
    """A name for all that an account follows from."""
    facts = [
        torch.__version__.partition("+")[0],
        *shape,
        words_of(config.model_spec.model),
        words_of(config.loss),
        config.training.mixed_precision_param,
        config.parallelism.enable_sequence_parallel,
        words_of(mixable(config.activation_checkpoint)),
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]


def words_of(node: Any) -> str:
    """A configuration in words, by which equal layers are known."""
    if isinstance(node, list):
        return f"[{', '.join(map(words_of, node))}]"
    if not isinstance(node, Configurable.Config):
        plain = isinstance(node, int | float | str | tuple | None) or dataclasses.is_dataclass(node)
        return repr(node) if plain else type(node).__name__
    names = [field.name for field in dataclasses.fields(node) if field.name not in WITHOUT]
    inside = ", ".join(f"{name}={words_of(getattr(node, name))}" for name in names)
    return f"{type(node).__qualname__}({inside})"


def trace(
    config: TrainerConfig, file: str | Path, overrides: Sequence[str], ranks: int, shapes: Sequence[Shape]
) -> None:
    """Traces a configuration's layers in these shapes of a job of so many ranks, and keeps their accounts;
    UserError says what a trace ended with."""
    asked = {"run": "layers", "file": str(file), "overrides": overrides, "rank": 0, "world_size": ranks}
    told = results([{**asked, "shape": shape} for shape in shapes], at_once(), on_cpu=True)
    for shape, of_shape in zip(shapes, told, strict=True):
        if "error" in of_shape:
            raise UserError(f"The model's layers cannot be traced: {of_shape['error']}.")
        key, account = key_of(config, shape), of_shape["account"]
        _found[key] = checked(ModelAccount, account)
        with suppress(OSError):  # another start traces it again
            save(_kept(key), account)
