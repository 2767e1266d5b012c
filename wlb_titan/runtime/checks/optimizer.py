"""A check that torch's optimizers take what a configuration gives them.

torchtitan hands a group's keywords to the optimizer as a parameter group, in which torch looks up the names
that it knows and ignores all others: `lrr = 0.1` would train at the default rate. So each group is tried on
one parameter as what it means, the optimizer's own arguments, which torch checks.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

from wlb_titan.config.values import shown
from wlb_titan.errors import UserError
from wlb_titan.runtime.compat import optimizer_factory, owner_of
from wlb_titan.runtime.pipeline.schedules import stage_names

if TYPE_CHECKING:
    from wlb_titan.runtime.trainer import Trainer


def check_optimizer(config: Trainer.Config) -> None:
    """Refuses optimizers that torch cannot make, and patterns that leave parameters without one.

    Raises:
        UserError: the message starts with the key concerned.
    """
    container = config.optimizer
    if not isinstance(container, OptimizersContainer.Config):
        return
    for number, group in enumerate(container.param_groups):
        _check_group(group, f"optimizer.param_groups.{number}", owner_of(container))
    if [group.pattern for group in container.param_groups] != [".*"]:
        _check_patterns(config, container.param_groups)


def _check_group(group: ParamGroupConfig, key: str, container: type) -> None:
    try:
        factory = optimizer_factory(container, group.optimizer_name)
    except NotImplementedError as error:
        raise UserError(f"{key}.optimizer_name: torchtitan says: {error}") from error
    if "lr" not in group.optimizer_kwargs:
        raise UserError(f"{key}.optimizer_kwargs: the learning rate is missing; add lr.")
    parameters = inspect.signature(factory).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return  # what the factory takes is not said; it looks at its arguments itself
    known = [name for name in parameters if name != "params"]
    for name in group.optimizer_kwargs:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {close[0]}?" if close else ""
            raise UserError(
                f"{key}.optimizer_kwargs.{name}: {group.optimizer_name} has no such argument, and would "
                f"leave it out without a word.{hint} It has {', '.join(known)}."
            )
    if said := _refusal(factory, group.optimizer_kwargs):
        for name, value in group.optimizer_kwargs.items():
            if alone := _refusal(factory, {name: value}):
                raise UserError(
                    f"{key}.optimizer_kwargs.{name}: {group.optimizer_name} refuses {shown(value)}: {alone}."
                )
        raise UserError(f"{key}.optimizer_kwargs: {group.optimizer_name} refuses these together: {said}.")


def _refusal(factory: Callable[..., torch.optim.Optimizer], keywords: dict[str, Any]) -> str:
    """What an optimizer says against its arguments; empty if it takes them."""
    try:
        factory([torch.nn.Parameter(torch.zeros(1))], **keywords)
    except Exception as error:  # what an optimizer makes of arguments of a wrong type is anything
        return str(error).rstrip(".")
    return ""


def _check_patterns(config: Trainer.Config, groups: list[ParamGroupConfig]) -> None:
    """Each pattern must match a parameter of every pipeline stage, and each parameter must match one."""
    patterns = []
    for number, group in enumerate(groups):
        try:
            patterns.append(re.compile(group.pattern))
        except re.error as error:
            raise UserError(
                f"optimizer.param_groups.{number}.pattern: this is no regular expression: {error}."
            ) from error
    assert config.model_spec is not None
    with torch.device("meta"):
        model = config.model_spec.model.build()
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    stages = [names]
    if config.parallelism.pipeline_parallel_degree > 1:
        modules = stage_names(config.parallelism, config.model_spec.model)
        stages = [
            [name for name in names if any(name.startswith(f"{module}.") for module in stage)]
            for stage in modules
        ]
    for stage, left in enumerate(stages):
        for number, pattern in enumerate(patterns):
            matched = [name for name in left if pattern.search(name)]
            if not matched:
                where = f" of pipeline stage {stage}" if len(stages) > 1 else ""
                raise UserError(
                    f"optimizer.param_groups.{number}.pattern: no parameter{where} that an earlier group has "
                    f"left matches it. The parameters are called {', '.join(names[:6])}, ..."
                )
            left = [name for name in left if name not in matched]
        if left:
            raise UserError(
                f"optimizer.param_groups: no pattern matches {len(left)} parameter(s), such as {left[0]}; "
                'end the groups with one of pattern ".*".'
            )
