"""The configuration of a run: torchtitan's, with one more section, `wlb`."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchtitan.trainer import Trainer as TorchtitanTrainer

from wlb_titan.config.settings import WlbSettings
from wlb_titan.runtime.metrics import MetricsProcessor
from wlb_titan.runtime.validator import Validator


@dataclass(kw_only=True, slots=True)
class TrainerConfig(TorchtitanTrainer.Config):
    """`Trainer.Config`, by itself: what reads a configuration need not know the trainer."""

    wlb: WlbSettings = field(default_factory=WlbSettings)
    """What wlb_titan adds: corpus, packing, sharding."""

    # Only these, and classes derived from them, know planned micro-batches.
    metrics: MetricsProcessor.Config = field(default_factory=MetricsProcessor.Config)
    validator: Validator.Config = field(default_factory=Validator.Config)
