"""The configuration of a run: torchtitan's, with one more section, `wlb`."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchtitan.components.metrics import MetricsProcessor as TitanMetricsProcessor
from torchtitan.components.validate import Validator as TitanValidator
from torchtitan.trainer import Trainer as TorchtitanTrainer

from wlb_titan.config.settings import WlbSettings
from wlb_titan.runtime.metrics import MetricsProcessor
from wlb_titan.runtime.validator import Validator


@dataclass(kw_only=True, slots=True)
class TrainerConfig(TorchtitanTrainer.Config):
    """`Trainer.Config`, by itself: what reads a configuration need not know the trainer."""

    wlb: WlbSettings = field(default_factory=WlbSettings)
    """What wlb_titan adds: corpus, packing, sharding."""

    metrics: TitanMetricsProcessor.Config = field(default_factory=MetricsProcessor.Config)
    validator: TitanValidator.Config = field(default_factory=Validator.Config)
