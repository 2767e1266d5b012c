"""The metrics of a run: one line a step on the console, one JSON object a step in metrics.jsonl.

TensorBoard and W&B get the same numbers through torchtitan's own loggers.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torchtitan.components import metrics as titan
from torchtitan.tools.logging import logger

from wlb_titan.pipeline.schedule import V_SHAPED
from wlb_titan.runtime.compat import metrics_rank_of
from wlb_titan.runtime.life.dump_folder import METRICS_FILE, VALIDATION_FILE
from wlb_titan.runtime.life.json_lines import JsonLines, warn_once
from wlb_titan.runtime.pipeline.schedules import canonical_name


def metrics_rank(parallel_dims: Any, schedule: str) -> int:
    """The one rank that knows the loss and reports it: the first of the last pipeline stage."""
    return metrics_rank_of(parallel_dims=parallel_dims, pp_schedule=_shape(parallel_dims, schedule))


def _shape(parallel_dims: Any, schedule: str) -> str:
    """The name by which torchtitan's metrics know a schedule: of those in a V only one, spelled like this."""
    in_v = parallel_dims.pp_enabled and canonical_name(schedule) in V_SHAPED
    return V_SHAPED[0] if in_v else schedule


class MetricsProcessor(titan.MetricsProcessor):
    """torchtitan's metrics with the plan's figures beside them, also as JSON lines."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan.MetricsProcessor.Config):
        pass

    last_step = 0
    """The last step of the run, which the trainer sets; the time left follows from it."""

    def __init__(
        self, config: Config, *, parallel_dims: Any, dump_folder: str, pp_schedule: str, **kwargs: Any
    ):
        shape = _shape(parallel_dims, pp_schedule)
        super().__init__(
            config, parallel_dims=parallel_dims, dump_folder=dump_folder, pp_schedule=shape, **kwargs
        )
        self._reports = torch.distributed.get_rank() == metrics_rank(parallel_dims, pp_schedule)
        # torchtitan knows the peak of accelerators only and takes an A100's otherwise.
        self._peak_flops = (
            self.gpu_peak_flops * parallel_dims.world_size if torch.accelerator.is_available() else None
        )
        self._lines = JsonLines(Path(dump_folder) / METRICS_FILE)
        self._validation_lines = JsonLines(Path(dump_folder) / VALIDATION_FILE)
        self._steps = self._tokens = 0  # since the last report
        self._first: tuple[int, float] | None = None  # report: step, and when
        self._flops = 0.0

    def count(self, tokens: int, flops: float) -> None:
        """Takes note of a step.

        Args:
            tokens: tokens of documents in the whole job, without padding.
            flops: FLOPs of the model on them.
        """
        self._steps += 1
        self._tokens += tokens
        self._flops += flops

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """Reports one step; times and rates are means over the steps since the last report.

        Args:
            global_avg_loss: loss per token with a label over the whole job.
            global_max_loss: largest such loss of a rank.
            grad_norm: norm of the gradient before clipping.
            extra_metrics: what the plan says of the step; torchtitan's own, such as learning rates.

        docs/metrics.md lists every key.
        """
        elapsed, steps = time.perf_counter() - self.time_last_log, max(self._steps, 1)
        extra = dict(extra_metrics or {})
        flops = self._flops / elapsed
        if self._peak_flops is not None:
            extra["mfu_documents"] = flops / self._peak_flops
        memory = self.device_memory_monitor.get_peak_stats()
        record = {
            "step": step,
            "loss": global_avg_loss,
            "max_loss": global_max_loss,
            "grad_norm": grad_norm,
            "seconds": elapsed / steps,
            "tokens_per_second": self._tokens / elapsed,
            "model_tflops": flops / 1e12,
            "data_loading_seconds": sum(self.data_loading_times) / steps,
            "memory_gib": max(memory.max_reserved_gib, 0.0),  # not known on the CPU
            **extra,
        }
        try:
            self.logger.log({k: v for k, v in record.items() if isinstance(v, int | float)}, step)
        except OSError as error:
            warn_once(f"TensorBoard's or W&B's log cannot be written: {error}. Training goes on without.")
        if self._reports:
            start = {"start": True} if self._first is None else {}  # this process's first line
            self._lines.write({**record, "steps": steps, **start})
            logger.info(_console_line(record, self.last_step, self._seconds_left(step)))
        self._steps = self._tokens = 0
        self._flops = 0.0
        self.data_loading_times.clear()
        self.time_last_log = time.perf_counter()
        self.device_memory_monitor.reset_peak_stats()

    def _seconds_left(self, step: int) -> float | None:
        """Predicted by the steps since the first report, whose own may have compiled."""
        now = time.perf_counter()
        if self._first is None:
            self._first = step, now
            return None
        first, then = self._first
        return (self.last_step - step) * (now - then) / (step - first)

    def log_validation(self, loss: float, step: int, extra_metrics: dict[str, Any] | None = None) -> None:
        """Reports a validation pass, as a line of validation.jsonl too.

        torchtitan's would begin to count time and peak memory anew, between two reports of steps.
        """
        extra = extra_metrics or {}
        self.logger.log({"validation_metrics/loss": loss, **extra}, step)
        if self._reports:
            self._validation_lines.write({"step": step, "loss": loss, **extra})
            logger.info(f"validation after step {step} | loss {loss:8.5f}")

    def close(self) -> None:
        super().close()
        self._lines.close()
        self._validation_lines.close()


def spoken(seconds: float) -> str:
    """A duration as people say it: `45 s`, `12 min 5 s`, `3 h 12 min`."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _console_line(record: dict[str, Any], last: int, left: float | None) -> str:
    parts = [
        f"step {record['step']:{len(str(last))}d}" + (f" of {last}" if last else ""),
        f"loss {record['loss']:8.5f}",
        f"grad {record['grad_norm']:7.3f}",
        f"{record['tokens_per_second']:9,.0f} tokens/s",
    ]
    if "imbalance" in record:
        parts.append(f"imbalance {record['imbalance']:.3f}")
    if "shadow/imbalance" in record:
        parts.append(f"in the shadow {record['shadow/imbalance']:.3f}")
    if "measured_imbalance" in record:
        parts.append(f"measured {record['measured_imbalance']:.3f}")
    if "bubble" in record:
        parts.append(f"bubble {100 * record['bubble']:.1f} %")
    if record.get("delay_mean"):
        parts.append(f"delay {record['delay_mean']:.2f}")
    if "mfu_documents" in record:
        parts.append(f"MFU {100 * record['mfu_documents']:.1f} %")
    if record["memory_gib"] > 0:
        parts.append(f"memory {record['memory_gib']:.2f} GiB")
    if left and left > 0:
        parts.append(f"{spoken(left)} left")
    return " | ".join(parts)
