"""examples/torchtitan by torchtitan's own command on two processes: the losses of `wlb-titan train`."""

import json
import os
import subprocess
import sys
from pathlib import Path

from commands import ROOT

from wlb_titan.prepare.prepare import PrepareSettings, prepare_corpus

FLAGS = "--training.steps 3 --training.seq_len 512 --training.local_batch_size 2 --debug.seed 1"


def test_losses_are_those_of_our_command(tmp_path):
    texts = "".join(json.dumps({"text": "some words " * (3 + 7 * n % 90)}) + "\n" for n in range(300))
    (tmp_path / "texts.jsonl").write_text(texts)
    settings = PrepareSettings(source=f"jsonl:{tmp_path / 'texts.jsonl'}#text", vocab_size=300)
    prepare_corpus(settings, tmp_path / "outputs" / "corpus")
    job = 'base = "my_jobs:balanced"\nwlb = {device = "cpu"}\n'
    (tmp_path / "job.toml").write_text(job)
    path = os.pathsep.join([str(ROOT / "examples" / "torchtitan"), os.environ.get("PYTHONPATH", "")])

    def losses(dump_folder, *command):
        words = [sys.executable, "-m", *command, *FLAGS.split(), "--dump_folder", dump_folder]
        how = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": path}, "timeout": 300}
        done = subprocess.run(words, capture_output=True, text=True, **how)
        assert done.returncode == 0, done.stderr[-3000:]
        lines = (tmp_path / dump_folder / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines]

    program = str(Path(__file__).with_name("torchtitan_program.py"))
    launcher = ("torch.distributed.run", "--nproc-per-node", "2", "--standalone", program)
    theirs = losses("theirs", *launcher, "--module", "my_jobs", "--config", "balanced", "--wlb.device", "cpu")
    ours = losses("ours", "wlb_titan.commands.main", "train", "job.toml", "--nproc-per-node", "2")
    assert len(theirs) == 3 and theirs == ours
