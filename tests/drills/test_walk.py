"""The walk of a first day, in an empty folder: each command after the one before it, and what each says."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest
from commands import said
from forking import await_, command

SMALL = ["--training.seq_len", "512", "--training.steps", "6", "--wlb.corpus.seed", "3"]


def says(*words: object) -> str:
    return " ".join(said(*words).split())


def started(log, *words):
    with log.open("w") as file:
        return command("wlb_titan.commands.main", *words, log=file)


@pytest.mark.timeout(1800)
@pytest.mark.long
def test_the_walk(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    begun = says("init", "--corpus", "outputs/corpus")
    assert "wlb-titan prepare outputs/corpus" in begun and "wlb-titan train job.toml" in begun
    assert "tokens" in says("prepare", "outputs/corpus", "--max-tokens", 400_000)
    assert "prepare" not in says("init", "again.toml", "--corpus", "outputs/corpus"), "it is there now"
    ranks = min(os.cpu_count() or 1, 4)
    processes = max(number for number in (1, 2, 4) if number <= ranks)
    checked = says("config", "check", "job.toml")
    assert f"TP 1 x CP 1 x PP 1 x DP {processes} = {processes} processes, seq_len 2048, 20 steps" in checked

    planned = says("plan", "job.toml", "--steps", 20, "--report", "outputs/plan")
    assert re.search(r"wlb_lazy/per_sequence +1\.0\d+", planned)
    (proposed,) = re.findall(r"<pre>(wlb-titan simulate [^<]*)", Path("outputs/plan/report.html").read_text())
    assert proposed == "wlb-titan simulate job.toml"
    simulated = says(*proposed.split()[1:], "--steps", 4)
    assert "plain/per_sequence" in simulated and "wlb_lazy/per_sequence" in simulated
    simulated = says("simulate", "job.toml", "--steps", 2, "--policies", "plain,wlb/adaptive,wlb_lazy")
    assert "wlb/adaptive" in simulated

    traced = says("dryrun", "job.toml", *SMALL, "--device-gib", 80)
    assert re.search(r"Step \d+ of job.toml under wlb_lazy/per_sequence, .* longest micro-batch", traced)
    assert "it fits" in traced
    measured = says("rehearse", "job.toml", *SMALL, "--rank", "first", "--steps", 1)
    assert "all 4 passes" in measured if processes == 2 else "passes" in measured
    assert "wlb_lazy/per_sequence" in measured and "Peak" not in measured, "the process' own on a CPU"

    log, metrics = tmp_path / "train.log", tmp_path / "outputs" / "first" / "metrics.jsonl"
    run = started(log, "train", "job.toml", *SMALL)
    await_(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 2, log.read_text, 600)
    run.send_signal(signal.SIGINT)
    assert run.wait(300) == 130, log.read_text()
    assert "Ctrl-C or SIGTERM: the run ends after the current step" in log.read_text()
    assert "all is saved; start the job again to continue" in log.read_text()

    assert started(log, "train", "job.toml", *SMALL, "--wlb.corpus.seed", "7").wait(300) == 2
    assert "its seed is 3, and this job's is 7, which makes another stream" in log.read_text()

    export = ["--checkpoint.last_save_in_hf", "true", "--checkpoint.last_save_model_only", "true"]
    assert started(log, "train", "job.toml", *SMALL, *export).wait(600) == 0, log.read_text()
    assert "Done: step 6 was the last" in log.read_text()
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert sum(line["steps"] for line in lines) == 6
    assert sum(line.get("start", False) for line in lines) == 2, "of each process"
    assert "tokens a second" in says("compare", "outputs/first", "--report", "outputs/compare")

    saved = Path("outputs/first/checkpoint/step-6")
    assert json.loads((saved / "config.json").read_text())["model_type"] == "llama"
    assert list(saved.glob("*.safetensors")) and (saved / "tokenizer.json").is_file()
    assert not (saved / "sharded").exists(), "the weights lie there once"
