"""What a run reports ends no training."""

import errno
import json
import logging
import os
from types import SimpleNamespace

import pytest

from wlb_titan.runtime.metrics import JsonLines, MetricsProcessor, warn_once

pytestmark = pytest.mark.slow


def test_a_full_disk_behind_tensorboard_ends_no_run(tmp_path, caplog, monkeypatch):
    """Neither where a validation is reported nor at the end, where TensorBoard raises once more."""

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    metrics = MetricsProcessor.__new__(MetricsProcessor)
    metrics.logger = SimpleNamespace(log=full, close=full)
    metrics._reports = True
    metrics._lines = JsonLines(tmp_path / "steps")
    metrics._validation_lines = JsonLines(tmp_path / "validations")
    warn_once.cache_clear()
    monkeypatch.setattr(logging.getLogger("torchtitan"), "propagate", True)
    metrics.log_validation(1.5, 3, {})
    metrics.close()
    assert caplog.text.count("log cannot be written: [Errno 28] No space left on device") == 1
    assert json.loads((tmp_path / "validations").read_text()) == {"step": 3, "loss": 1.5}
