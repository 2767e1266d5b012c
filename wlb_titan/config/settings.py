"""Our own part of the configuration: the TOML sections [wlb], [wlb.corpus], [wlb.packing], [wlb.sharding],
[wlb.pipeline]."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from wlb_titan.corpus.settings import CorpusSettings
from wlb_titan.planner.settings import PackingSettings, ShardingSettings


@dataclass(kw_only=True, slots=True)
class PipelineSettings:
    """[wlb.pipeline]: how micro-batches of different lengths go through the pipeline."""

    order: Literal["as_packed", "longest_first", "shortest_first", "best"] = "as_packed"
    """In which order a rank runs the micro-batches of a step. `as_packed`: as the packing policy made them,
    which is longest first for the policies that balance. `best`: the order with the shortest predicted step,
    for the schedules whose dependency graph is known. Without pipeline parallelism it has no effect."""

    check_lengths: bool = False
    """Compare the micro-batches' lengths between pipeline ranks once a step, to find ranks that follow
    different plans; costs a small all-gather."""


@dataclass(kw_only=True, slots=True)
class WlbSettings:
    """[wlb]: everything that wlb_titan adds to torchtitan's configuration."""

    device: Literal["auto", "cpu"] = "auto"
    """`auto`: the accelerator that torch finds, or else the CPU. `cpu`: the CPU even where there is one."""

    trace_every: int = 0
    """Every so many steps the passes of all ranks are timed: a trace for ui.perfetto.dev is written to
    <dump_folder>/traces, and the metrics get measured imbalance and bubble. 0: never."""

    corpus: CorpusSettings = field(default_factory=CorpusSettings)
    packing: PackingSettings = field(default_factory=PackingSettings)
    sharding: ShardingSettings = field(default_factory=ShardingSettings)
    pipeline: PipelineSettings = field(default_factory=PipelineSettings)
