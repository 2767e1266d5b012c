"""A check that torch's optimizers take what a configuration gives them.

torchtitan hands a group's keywords to the optimizer as a parameter group, in which torch looks up the names
that it knows and ignores all others: `lrr = 0.1` would train at the default rate. So each group is tried on
one parameter as what it means, the optimizer's own arguments, which torch checks.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torchtitan.components.optimizer import OptimizersContainer

from wlb_titan.errors import UserError
from wlb_titan.runtime.compat import optimizer_factory, owner_of
from wlb_titan.runtime.config import TrainerConfig


def check_optimizer(config: TrainerConfig) -> None:
    """Refuses optimizers that torch cannot make.

    Raises:
        UserError: the message starts with the key concerned.
    """
    if not isinstance(config.optimizer, OptimizersContainer.Config):
        return
    for number, group in enumerate(config.optimizer.param_groups):
        key, given = f"optimizer.param_groups.{number}", group.optimizer_kwargs
        try:
            factory = optimizer_factory(owner_of(config.optimizer), group.optimizer_name)
        except NotImplementedError as error:
            raise UserError(f"{key}.optimizer_name: torchtitan says: {error}") from error
        if "lr" not in given:
            raise UserError(f"{key}.optimizer_kwargs: the learning rate is missing; add lr.")
        known = inspect.signature(factory).parameters
        if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in known.values()):
            continue  # it looks at its arguments itself
        # One alone, and then all: what is wrong with one of them is told at its own key.
        for name, tried in [*((f".{name}", {name: given[name]}) for name in given), ("", given)]:
            if said := _refusal(factory, tried):
                raise UserError(
                    f"{key}.optimizer_kwargs{name}: {group.optimizer_name} refuses this: {said}. It takes "
                    f"{', '.join(list(known)[1:])}."
                )


def _refusal(factory: Any, keywords: dict[str, Any]) -> str:
    """What an optimizer says against its arguments; empty if it takes them."""
    try:
        factory([torch.nn.Parameter(torch.zeros(1, 1))], **keywords)
    except Exception as error:  # what an optimizer makes of arguments of a wrong type is anything
        return str(error).rstrip(".")
    return ""
