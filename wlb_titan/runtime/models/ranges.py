"""Ranges of the numbers in torchtitan's settings.

torchtitan documents its fields and checks few of them: a wrong one fails somewhere in the middle of a run.
Our own settings have their ranges beside their docstrings (`config/ranges.py` reads both).
"""

from __future__ import annotations

import math

from annotated_types import Ge, Gt, Interval, Le, MinLen
from torchtitan.components.checkpointer.base import BaseCheckpointManager
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.components.validate import Validator
from torchtitan.config import CommConfig, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.tools.profiler import Profiler
from torchtitan.trainer import Trainer

from wlb_titan.config.ranges import Table
from wlb_titan.packing.policy import MOST_TOKENS

MOST_SECONDS = 30 * 24 * 3600
MOST_RANKS = 1 << 20

DEGREE = (Interval(ge=1, le=MOST_RANKS),)
COUNT = (Ge(1),)
FROM_ZERO = (Ge(0),)
SECONDS = (Interval(ge=1, le=MOST_SECONDS),)
NOT_EMPTY = (MinLen(1),)

RANGES: Table = {
    Trainer.Config: {"dump_folder": NOT_EMPTY},
    TrainingConfig: {
        "local_batch_size": (Interval(ge=1, le=MOST_RANKS),),
        "global_batch_size": (Interval(ge=-1, le=MOST_RANKS),),
        "seq_len": (Interval(ge=2, le=MOST_TOKENS),),
        "max_norm": (Gt(0), Le(math.inf)),
        "steps": COUNT,
        "gc_freq": COUNT,
    },
    ParallelismConfig: {
        "data_parallel_replicate_degree": DEGREE,
        "data_parallel_shard_degree": (Interval(ge=-1, le=MOST_RANKS),),
        "tensor_parallel_degree": DEGREE,
        "pipeline_parallel_degree": DEGREE,
        "context_parallel_degree": DEGREE,
        "expert_parallel_degree": DEGREE,
        "pipeline_parallel_first_stage_less_layers": FROM_ZERO,
        "pipeline_parallel_last_stage_less_layers": FROM_ZERO,
        "pipeline_parallel_layers_per_stage": COUNT,
        "pipeline_parallel_microbatch_size": COUNT,
    },
    LRSchedulersContainer.Config: {
        "warmup_steps": FROM_ZERO,
        "total_steps": COUNT,
        "decay_ratio": (Interval(ge=0, le=1),),
        "min_lr_factor": (Interval(ge=0, le=1),),
    },
    OptimizersContainer.Config: {"param_groups": NOT_EMPTY},
    ParamGroupConfig: {"pattern": NOT_EMPTY},
    ChunkedLossWrapper.Config: {"num_chunks": COUNT},
    MetricsProcessor.Config: {"log_freq": COUNT, "save_tb_folder": NOT_EMPTY},
    Validator.Config: {"freq": COUNT, "steps": (Ge(-1),)},
    BaseCheckpointManager.Config: {
        "folder": NOT_EMPTY,
        "interval": COUNT,
        "keep_latest_k": FROM_ZERO,
        "load_step": (Ge(-1),),
    },
    CommConfig: {
        "init_timeout_seconds": SECONDS,
        "train_timeout_seconds": SECONDS,
        "trace_buf_size": FROM_ZERO,
        "save_traces_folder": NOT_EMPTY,
    },
    DebugConfig: {"seed": (Interval(ge=0, lt=2**63),)},
    Profiler.Config: {
        "profile_freq": COUNT,
        "profiler_active": COUNT,
        "profiler_warmup": FROM_ZERO,
        "profiler_repeat": FROM_ZERO,
        "profiler_skip_first": FROM_ZERO,
        "profiler_skip_first_wait": FROM_ZERO,
        "memory_snapshot_freq": COUNT,
        "memory_snapshot_max_entries": COUNT,
        "save_traces_folder": NOT_EMPTY,
        "save_memory_snapshot_folder": NOT_EMPTY,
    },
}
