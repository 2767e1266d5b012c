"""The TorchX components: what they submit, and how they refuse."""

import os
import signal
import sys
import threading
from pathlib import Path

import pytest
from forking import Rank
from torchx.runner import get_runner
from torchx.schedulers.local_scheduler import SignalException
from torchx.specs.file_linter import validate
from wlb_titan.launch import launch
from wlb_titan.launch.spread import spread

from wlb_titan.errors import ConfigError, UserError
from wlb_titan.runtime.train import train

ROOT = Path(__file__).parents[2]
CONFIG = str(ROOT / "train_configs" / "cpu_debug.toml")
SEVEN_B = str(ROOT / "train_configs" / "llama2_7b_128k.toml")
IMAGE = "example.com/wlb-titan:0.1.0"


@pytest.fixture(autouse=True)
def unchanged_process():
    """TorchX and its components set handlers of signals and errors, which end with the test."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = [signal.getsignal(number) for number in numbers]
    hooks = sys.excepthook, threading.excepthook
    yield
    for number, handler in zip(numbers, handlers, strict=True):
        signal.signal(number, handler)
    sys.excepthook, threading.excepthook = hooks


def dryrun(component: str, arguments: list[str], scheduler: str, **cfg):
    with get_runner() as runner:
        runner.scheduler_run_opts(scheduler)  # as `torchx run` has it: the scheduler is there first
        return runner.dryrun_component(component, arguments, scheduler=scheduler, cfg=cfg)


@pytest.mark.parametrize("component", ["train", "prepare", "plan"])
def test_torchx_accepts_the_components(component):
    assert validate(str(ROOT / "launch" / "components.py"), component) == []


def test_local_job_has_a_process_for_each_rank():
    arguments = ["--config", CONFIG, "--image", IMAGE, "--", "--training.steps", "5"]
    info = dryrun("wlb.train", arguments, "local_cwd")
    (role,) = info._app.roles
    command = role.args[-1]
    assert "--nproc_per_node 4" in command
    assert f"-m wlb_titan.runtime.train --config {CONFIG} --training.steps 5" in command


@pytest.mark.parametrize("nohup", [False, True])
def test_a_local_job_ends_with_a_line_and_outlives_a_hangup_under_nohup(nohup, capfd):
    signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)
    dryrun("wlb.train", ["--config", CONFIG, "--image", IMAGE], "local_cwd")
    if nohup:
        signal.raise_signal(signal.SIGHUP)
    number = signal.SIGTERM if nohup else signal.SIGHUP

    def reader_of_logs():
        raise FileNotFoundError("logs")

    def fails_in_a_thread():
        thread = threading.Thread(target=reader_of_logs)
        thread.start()
        thread.join()
        return capfd.readouterr().err

    assert "FileNotFoundError: logs" in fails_in_a_thread()
    with pytest.raises(SignalException) as stop:
        signal.raise_signal(number)
    assert fails_in_a_thread() == ""  # TorchX reads logs until it has deleted them
    with pytest.raises(SystemExit) as end:
        sys.excepthook(stop.type, stop.value, stop.tb)
    assert end.value.code == 128 + number
    assert f"Stopped by {number.name}; the job has ended." in capfd.readouterr().err


def test_a_job_of_another_scheduler_does_not_end_with_the_process_that_submits_it():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    hooks = sys.excepthook, threading.excepthook
    dryrun("wlb.train", ["--config", CONFIG, "--image", IMAGE], "slurm", partition="gpu")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert (sys.excepthook, threading.excepthook) == hooks


def test_slurm_job_spreads_the_ranks_over_the_hosts():
    arguments = ["--config", SEVEN_B, "--nodes", "8", "--gpu", "8", "--image", IMAGE]
    script = str(dryrun("wlb.train", arguments, "slurm", partition="gpu"))
    assert "--nproc_per_node 8" in script
    assert "--nnodes 8" in script
    assert "--partition=gpu" in script


def test_prepare_passes_its_arguments_on():
    info = dryrun("wlb.prepare", ["outputs/corpus", "--max-tokens", "1000"], "local_cwd")
    (role,) = info._app.roles
    assert [role.entrypoint, *role.args] == ["wlb-titan", "prepare", "outputs/corpus", "--max-tokens", "1000"]


def test_plan_passes_its_arguments_on():
    info = dryrun("wlb.plan", ["x.toml", "--steps", "5"], "local_cwd")
    (role,) = info._app.roles
    assert [role.entrypoint, *role.args] == ["wlb-titan", "plan", "x.toml", "--steps", "5"]


def test_simulate_passes_its_arguments_on():
    info = dryrun("wlb.simulate", ["x.toml", "--search"], "local_cwd")
    (role,) = info._app.roles
    assert [role.entrypoint, *role.args] == ["wlb-titan", "simulate", "x.toml", "--search"]


def test_processes_that_do_not_spread_evenly_are_refused():
    with pytest.raises(UserError, match=r"4 processes do not spread evenly over 3 hosts"):
        launch._resolve(CONFIG, [], nodes=3, processes_per_node=0, corpus_is_here=False)


def test_processes_that_do_not_fit_the_degrees_are_refused():
    with pytest.raises(UserError, match=r"3 processes do not fit the degrees"):
        launch._resolve(CONFIG, [], nodes=1, processes_per_node=3, corpus_is_here=False)


@pytest.mark.parametrize("gpus", [0, 1, 2, 4, 8])
def test_the_demonstrations_start_with_any_number_of_gpus(gpus):
    """With these, the machine's: `make train` on four processes of the CPU, `make train-gpu` on the GPUs."""
    here = {"nodes": 1, "processes_per_node": 0, "corpus_is_here": False, "gpus": lambda: gpus}
    for name in ("debug", "balanced"):
        assert launch._resolve(str(ROOT / "train_configs" / f"cpu_{name}.toml"), [], **here) == 4
        if gpus:
            file = str(ROOT / "train_configs" / f"gpu_{name}.toml")
            assert launch._resolve(file, spread(gpus), **here) == gpus
    if not gpus:
        with pytest.raises(UserError, match="torch finds no GPU on this machine"):
            spread(gpus)


def test_three_of_four_gpus_are_too_many():
    assert spread(3) == spread(2) == ["--parallelism.context_parallel_degree", "2"]


BAD_ON_GPUS = {
    "processes": (1, [], '4 processes and 1 GPU: NCCL wants one each; .* or set wlb.device = "cpu"'),
    "dtype": (4, [], 'mixed_precision_param = "float32" .*: the attention kernels .* set it to "bfloat16"'),
}


@pytest.mark.parametrize("name", BAD_ON_GPUS)
def test_what_gpus_cannot_run_is_refused_before_anything_starts(name, monkeypatch):
    """By the launcher, where the job runs on this machine, and by each rank."""
    gpus, words, message = BAD_ON_GPUS[name]
    words = ["--wlb.device", "auto", *words]
    with pytest.raises(ConfigError, match=message):
        launch._resolve(CONFIG, words, 1, 0, corpus_is_here=False, gpus=lambda: gpus)
    elsewhere = {"corpus_is_here": False, "gpus": lambda: None}
    assert launch._resolve(CONFIG, words, 1, 0, **elsewhere) == 4
    monkeypatch.setattr("wlb_titan.runtime.cpu_device.use_cpu_without_accelerator", lambda: False)
    monkeypatch.setattr("torch.accelerator.device_count", lambda: gpus)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match=message):
        train(CONFIG, words, rank=0, world_size=4, alarm=None)


def test_gpus_are_counted_only_where_the_job_runs_here():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert launch.gpus_here() is None
    signal.signal(signal.SIGINT, lambda *_: None)  # as TorchX's local scheduler has it
    assert launch.gpus_here() == 0


def test_a_rank_that_shall_use_the_cpu_hides_the_gpus_from_itself(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    seen = []

    def ask():
        seen.append(os.environ["CUDA_VISIBLE_DEVICES"])
        raise KeyboardInterrupt

    monkeypatch.setattr("wlb_titan.runtime.cpu_device.use_cpu_without_accelerator", ask)
    for words in ([], ["--wlb.device", "auto"]):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
        with pytest.raises(KeyboardInterrupt):
            train(CONFIG, words, rank=0, world_size=4, alarm=None)
    assert seen == ["", "0,1"]


def test_a_missing_corpus_is_one_paragraph_and_exit_code_2(tmp_path, fork_server):
    words = ["run", "-s", "local_cwd", "wlb.train", "--config", CONFIG]
    words += ["--", "--wlb.corpus.path", str(tmp_path / "nowhere")]
    log = tmp_path / "log"
    assert fork_server.start([Rank(words, log)], "torchx.cli.main").wait(300) == [2]
    assert "There is no corpus at" in log.read_text()
    assert "Traceback" not in log.read_text()


def test_kubernetes_job_is_a_pod_for_each_host():
    # The scheduler's dry run asks a Docker daemon for the image; the request itself is made by this function.
    kubernetes = pytest.importorskip("torchx.schedulers.kubernetes_scheduler")
    arguments = ["--config", SEVEN_B, "--nodes", "8", "--gpu", "8", "--image", IMAGE]
    app = dryrun("wlb.train", arguments, "local_cwd")._app
    request = kubernetes.app_to_resource(app, "training", service_account=None)
    tasks = request["spec"]["tasks"]
    assert len(tasks) == 8
    assert request["spec"]["queue"] == "training"
    assert "--nproc_per_node 8" in str(tasks[0]["template"])
    assert IMAGE in str(tasks[0]["template"])
