"""What a run says. Its metrics: one line a step on the console, one JSON object a step in metrics.jsonl.

TensorBoard and W&B get the same numbers through torchtitan's own loggers, by its names. docs/metrics.md lists
every key. The rank that knows the loss logs everything, the others warnings and errors.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torchtitan.components import metrics as titan
from torchtitan.tools.logging import logger, warn_once

from wlb_titan.files import save
from wlb_titan.pipeline.schedule import SCHEDULES, canonical_name
from wlb_titan.runs import METRICS_FILE, VALIDATION_FILE
from wlb_titan.runtime.compat import metrics_rank_of

IN_TORCHTITAN = {
    "loss": "loss_metrics/global_avg_loss",
    "max_loss": "loss_metrics/global_max_loss",
    "seconds": "time_metrics/end_to_end(s)",
    "memory_gib": "memory/max_reserved(GiB)",
}
"""What torchtitan's loggers call a figure that means the same."""


def metrics_rank(parallel_dims: Any, schedule: str) -> int:
    """The rank that knows and reports the loss: the first of the last pipeline stage."""
    return metrics_rank_of(parallel_dims=parallel_dims, pp_schedule=_shape(parallel_dims, schedule))


def _shape(parallel_dims: Any, schedule: str) -> str:
    """A schedule's name for torchtitan's metrics, which know only one of those in a V."""
    in_v = parallel_dims.pp_enabled and SCHEDULES[canonical_name(schedule)].v_shaped
    return "ZBVZeroBubble" if in_v else schedule


class MetricsProcessor(titan.MetricsProcessor):
    """torchtitan's metrics and the plan's figures, also as JSON lines."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan.MetricsProcessor.Config):
        pass

    last_step = 0  # of the run; the trainer sets it

    def __init__(
        self, config: Config, *, parallel_dims: Any, dump_folder: str, pp_schedule: str, **kwargs: Any
    ):
        shape = _shape(parallel_dims, pp_schedule)
        super().__init__(
            config, parallel_dims=parallel_dims, dump_folder=dump_folder, pp_schedule=shape, **kwargs
        )
        self.rank = metrics_rank(parallel_dims, pp_schedule)  # which reports
        self.reports = dist.get_rank() == self.rank
        self._folder = dump_folder
        # Without an accelerator, torchtitan would assume an A100's peak.
        self._peak_flops = (
            self.gpu_peak_flops * parallel_dims.world_size if torch.accelerator.is_available() else None
        )
        self._lines = JsonLines(Path(dump_folder) / METRICS_FILE)
        self._validation_lines = JsonLines(Path(dump_folder) / VALIDATION_FILE)
        self._steps, self._tokens, self._flops = 0, 0, 0.0  # since the last report
        self._reported = False  # whether this process has reported a step

    def count(self, tokens: int, flops: float) -> None:
        """Counts a step: tokens of documents in the whole job, and the model's FLOPs on them."""
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
        """Reports one step; times and rates are means over the steps since the last report. Losses are per
        token with a label: of the whole job, and the largest of a rank. `grad_norm` is before clipping."""
        elapsed, steps = time.perf_counter() - self.time_last_log, max(self._steps, 1)
        flops = self._flops / elapsed
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
            **(extra_metrics or {}),
        }
        if self._peak_flops is not None:
            record["mfu_documents"] = flops / self._peak_flops
        numbers = {IN_TORCHTITAN.get(k, k): v for k, v in record.items() if isinstance(v, int | float)}
        tokens_per_device = record["tokens_per_second"] / self.parallel_dims.world_size
        with _dashboards():
            self.logger.log(numbers | {"throughput(tps)": tokens_per_device}, step)
        if self.reports:
            start = {} if self._reported else {"start": True}
            self._lines.write({**record, "steps": steps, **start})
            self._reported = True
            logger.info(_console_line(record, self.last_step))
        self._steps, self._tokens, self._flops = 0, 0, 0.0
        self.data_loading_times.clear()
        self.time_last_log = time.perf_counter()
        self.device_memory_monitor.reset_peak_stats()

    def log_validation(self, loss: float, step: int, extra_metrics: dict[str, float]) -> None:
        """Reports a validation. torchtitan's would reset times and peak memory between reports of steps."""
        with _dashboards():
            self.logger.log({"validation_metrics/loss": loss, **extra_metrics}, step)
        if self.reports:
            self._validation_lines.write({"step": step, "loss": loss, **extra_metrics})
            logger.info(f"validation after step {step} | loss {loss:8.5f}")

    def tell_end(self, step: int, began: float | None) -> None:
        """Logs the end of a run; `began`: the time of its first step, None if it had no step to train."""
        if began is not None:
            seconds = time.monotonic() - began
            logger.info(f"Done: step {step} was the last, after {seconds:,.0f} s. All is in {self._folder}")
        elif dist.get_rank() == 0:
            logger.warning(
                f"Nothing is left to do: the checkpoint in {self._folder} is of step {step}, and "
                f"training.steps is {self.last_step}. Raise it to continue, or name another dump_folder to "
                "start anew."
            )

    def close(self) -> None:
        with _dashboards():
            super().close()
        self._lines.close()
        self._validation_lines.close()


@contextlib.contextmanager
def _dashboards() -> Iterator[None]:
    """What is written to TensorBoard or W&B within ends no training where the disk is full."""
    try:
        yield
    except OSError as error:
        said = f"TensorBoard's or W&B's log cannot be written: {error}. Training continues without it."
        warn_once(logger, said)


ON_CONSOLE = {
    "loss": "loss {:8.5f}",
    "grad_norm": "grad {:7.3f}",
    "tokens_per_second": "{:9,.0f} tokens/s",
    "imbalance": "imbalance {:.3f}",
    "measured_imbalance": "measured {:.3f}",
    "bubble": "bubble {:.1%}",
    "delay_mean": "delay {:.2f}",
    "mfu_documents": "MFU {:.1%}",
    "memory_gib": "memory {:.2f} GiB",
}
"""What the console shows of a step, where there is a value and it is not 0."""


def _console_line(record: dict[str, Any], last: int) -> str:
    parts = [f"step {record['step']:{len(str(last))}d}" + (f" of {last}" if last else "")]
    parts += [form.format(record[key]) for key, form in ON_CONSOLE.items() if record.get(key)]
    return " | ".join(parts)


class JsonLines:
    """A file of one JSON object a line, each with a `step`.

    A run resumed from a checkpoint repeats the steps since then. So its first line replaces those of the same
    step and later ones, and any line that a crash left half-written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None

    def write(self, record: dict[str, Any]) -> None:
        """Appends a line. On a full disk it is lost, and the next one is tried again."""
        try:
            if self._file is None:
                self._file = self._opened(record["step"])
            self._file.write(json.dumps(record) + "\n")
        except OSError as error:
            warn_once(
                logger,
                f"{self._path} cannot be written: {error.strerror}. Training continues, and lines are lost.",
            )

    def _opened(self, step: int) -> TextIO:
        """The file, with the lines of earlier steps."""
        known = self._path.read_text(encoding="utf-8", errors="replace") if self._path.exists() else ""
        save(self._path, "".join(f"{line}\n" for line in known.splitlines() if _is_before(line, step)))
        return self._path.open("a", buffering=1, encoding="utf-8")

    def close(self) -> None:
        with contextlib.suppress(OSError):  # its last lines are lost
            if self._file is not None:
                self._file.close()


def _is_before(line: str, step: int) -> bool:
    try:
        return bool(json.loads(line)["step"] < step)
    except (ValueError, KeyError, TypeError):
        return False


TORCHTITAN = str(Path(titan.__file__).parents[1])

MISLEADING = (
    # Of every configuration with the default, of ranks that do show the loss, of a CPU whose peak is not
    # known, of a tokenizer folder that never holds weights, of a variable that torchtitan sets.
    "initial_load_model_only=True has no effect",
    "Pipeline Parallel loss is not visible",
    "Peak flops undefined for",
    "Error running lspci",
    "model.safetensors.index.json not found",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
)
"""Words of torchtitan's warnings that are not shown."""


def drop_misleading_warnings() -> None:
    """Drops from torchtitan's log what does not apply to wlb_titan's runs."""
    logging.getLogger().addFilter(_applies)  # torchtitan logs on the root logger
    warnings.filterwarnings("ignore", message="To get the last learning rate")  # of every resumed run
    warnings.filterwarnings("ignore", message="DTensor .* may not have complete support on cpu device mesh")


class Console(logging.StreamHandler[TextIO]):
    """Standard output, whose reader may be gone: then lines are lost, and nothing else."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def start_log(rank: int, parallel_dims: Any, schedule: str) -> None:
    """Logs to standard output: everything on the rank that reports the loss, warnings on the others."""
    handler = Console(sys.stdout)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname).1s %(message)s", datefmt="%H:%M:%S"))
    handler.addFilter(_applies)  # for other loggers
    root = logging.getLogger()
    root.handlers = [handler]
    reports = rank == metrics_rank(parallel_dims, schedule)
    root.setLevel(logging.INFO if reports else logging.WARNING)


def _applies(record: logging.LogRecord) -> bool:
    """Of torchtitan's messages, its checkpointer's are shown, warnings that hold, and errors."""
    if record.levelno < logging.WARNING:
        return not record.pathname.startswith(TORCHTITAN) or "checkpointer" in record.pathname
    return record.levelno > logging.WARNING or not any(text in record.getMessage() for text in MISLEADING)
