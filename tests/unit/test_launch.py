"""The TorchX components: what they submit and refuse. A host's agent: what it hands on, and how it ends."""

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import tomllib
import types
import warnings
from functools import partial
from pathlib import Path

import pytest
from commands import CONFIGS, ROOT, invoke, said
from forking import Rank, free_port
from lab import make_corpus
from torch.distributed.run import config_from_args, parse_args
from torchx.runner import get_runner
from torchx.schedulers.local_scheduler import SignalException
from wlb_titan.launch.elastic import Agent, run
from wlb_titan.launch.job import AGENT, hosts_of

from wlb_titan.cost import profile
from wlb_titan.errors import ConfigError, UserError
from wlb_titan.runtime.dump_folder import changed_since
from wlb_titan.runtime.metrics import Console
from wlb_titan.runtime.models.load import load_config
from wlb_titan.runtime.train import show_warning, train

pytestmark = pytest.mark.slow

CONFIG = str(CONFIGS / "cpu_debug.toml")
SEVEN_B = str(CONFIGS / "llama2_7b_128k.toml")
SPREAD = ("--parallelism.pipeline_parallel_degree", "1", "--parallelism.context_parallel_degree", "1")
SPREAD += ("--parallelism.data_parallel_shard_degree", "-1", "--training.local_batch_size", "1")
"""As many data-parallel ranks as there are processes."""
IMAGE = "example.com/wlb-titan:0.1.0"


@pytest.fixture(autouse=True)
def unchanged_process(monkeypatch):
    """TorchX and its components set handlers of signals and errors, which end with the test."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    logging.disable(logging.NOTSET)


def dryrun(component: str, arguments: list[str], scheduler: str, **cfg):
    with get_runner() as runner:
        runner.scheduler_run_opts(scheduler)  # as `torchx run` has it: the scheduler is there first
        return runner.dryrun_component(component, arguments, scheduler=scheduler, cfg=cfg)


LOSING_WORDS = f"--nnodes 2:4 --nproc_per_node 1 -- {' '.join(SPREAD)} --training.global_batch_size 12"

# Scheduler, and arguments of `wlb.train` or `wlb.bench` besides the image; indented what it says, or not.
JOBS = f"""
local_cwd --config CONFIG -- --training.steps 5
    wlb-agent --rdzv_backend c10d; --nproc_per_node 4; --config CONFIG --training.steps 5
local_cwd --max_restarts 3 --config CONFIG {LOSING_WORDS}
    wlb-agent --max_restarts 3 --rdzv_conf last_call_timeout=; --nnodes 2:4
local_cwd --config CONFIG --policies plain,slim -- --dump_folder outputs/bench
    --nproc_per_node 4; --dump_folder outputs/bench --wlb.bench.policies plain,slim
local_cwd --config CONFIG --env A=b,C=d --mounts type=bind,src=/data,dst=/data
    --config CONFIG; env A=b; env C=d; mount /data
slurm --config SEVEN_B --nnodes 8 --gpu 8
    --nproc_per_node 8; --nnodes 8; --partition=gpu; gpus-per-task
slurm --config SEVEN_B --nnodes 8 --gpu 8 -- --wlb.device cpu
    --partition=gpu; not gpus-per-task
"""


@pytest.mark.parametrize(("words", "expected"), re.findall(r"^(\S.*)\n    (.*)$", JOBS, re.MULTILINE))
def test_what_torchx_submits(words, expected):
    scheduler, *words = [{"CONFIG": CONFIG, "SEVEN_B": SEVEN_B}.get(word, word) for word in words.split()]
    cfg = {"partition": "gpu"} if scheduler == "slurm" else {}
    component = "wlb.bench" if "--policies" in words else "wlb.train"
    info = dryrun(component, ["--image", IMAGE, *words], scheduler, **cfg)
    (role,) = info._app.roles
    given = [f"env {name}={value}" for name, value in role.env.items()]
    given += [f"mount {mount.dst_path}" for mount in role.mounts]
    said = str(info) if cfg else "; ".join([role.args[-1], *given])
    for part in expected.replace("CONFIG", CONFIG).split("; "):
        assert (part.removeprefix("not ") in said) == (not part.startswith("not "))


@pytest.mark.parametrize("nohup", [False, True])
def test_a_local_job_ends_with_a_line_and_outlives_a_hangup_under_nohup(nohup, capfd):
    signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)
    dryrun("wlb.train", ["--config", CONFIG, "--image", IMAGE], "local_cwd")
    if nohup:
        signal.raise_signal(signal.SIGHUP)
    number = signal.SIGTERM if nohup else signal.SIGHUP

    with pytest.raises(SignalException) as stop:
        signal.raise_signal(number)
    with pytest.raises(SystemExit) as end:
        sys.excepthook(stop.type, stop.value, stop.tb)
    assert end.value.code == 128 + number
    assert f"Stopped by {number.name}; the job has ended." in capfd.readouterr().err


def test_a_job_of_another_scheduler_does_not_end_with_the_process_that_submits_it():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    hook = sys.excepthook
    dryrun("wlb.train", ["--config", CONFIG, "--image", IMAGE], "slurm", partition="gpu")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert sys.excepthook is hook


def test_docker_is_refused_in_plain_words_where_no_image_was_named(monkeypatch, capfd):
    """TorchX takes it in a folder without .torchxconfig."""
    docker = "torchx.schedulers.docker_scheduler"
    monkeypatch.setitem(sys.modules, docker, types.ModuleType(docker))
    with pytest.raises(SystemExit) as end:
        dryrun("wlb.train", ["--config", CONFIG], "local_cwd")
    assert end.value.code == 2
    assert "`wlb-titan train FILE` trains" in capfd.readouterr().err
    dryrun("wlb.train", ["--config", CONFIG, "--image", IMAGE], "slurm", partition="gpu")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_warning_of_ours_is_a_line_on_rank_0_and_others_are_what_they_were(rank, capfd):
    others = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = partial(show_warning, lambda message, *_: others.append(str(message)), rank)
        warnings.warn_explicit("the profile lacks it.", UserWarning, profile.__file__, 1)
        warnings.warn_explicit("theirs", UserWarning, __file__, 1)
    assert others == ["theirs"]
    assert capfd.readouterr().err == ("Warning: the profile lacks it.\n" if rank == 0 else "")


def test_lines_of_the_log_whose_reader_is_gone_are_lost_without_a_word(capfd):
    reader, writer = os.pipe()
    os.close(reader)
    line = logging.makeLogRecord({"msg": "step 1", "levelno": logging.INFO})
    with contextlib.suppress(BrokenPipeError), open(writer, "w") as gone:
        Console(gone).emit(line)
        assert capfd.readouterr().err == ""
        Console(gone).emit(logging.makeLogRecord({"msg": "%d", "args": ("one",)}))
        assert "Logging error" in capfd.readouterr().err


def test_a_rank_that_reads_behind_the_end_of_a_file_is_told_from_other_losses(capfd):
    lost = types.SimpleNamespace(timestamp=0, exitcode=-signal.SIGBUS)
    result = types.SimpleNamespace(is_failed=lambda: True, failures={3: lost})
    assert Agent.status_of(types.SimpleNamespace(asked=None), result) == 1
    assert "rank 3 (killed by SIGBUS, as when a corpus is cut" in capfd.readouterr().err


LOSING = {"nnodes": "2:4", "processes": 1}


@pytest.mark.parametrize(
    ("words", "hosts", "message"),
    [
        ([], {"nnodes": "3"}, "4 processes do not spread evenly over 3 hosts"),
        ([], {"nnodes": "4:2"}, "--nnodes: a number of hosts, or MIN:N with MIN from 1 to N; got '4:2'"),
        ([], {"nnodes": "two"}, "got 'two'"),
        ([], {"processes": -1}, "--nproc-per-node: at least 0"),
        ([], {"processes": 3}, "3 processes do not fit the degrees"),
        (SPREAD, LOSING, "training.global_batch_size: set it where hosts may be lost"),
        ([*SPREAD, "--training.global_batch_size", "8"], LOSING, "With 3 processes, as few as --nnodes"),
    ],
)
def test_hosts_on_which_a_job_cannot_run_are_refused(words, hosts, message):
    with pytest.raises(UserError, match=message):
        hosts_of(CONFIG, words, is_here=False, **hosts)


def spread(gpus, folder):
    """What the recipe of `make train-gpu` adds where Python counts so many GPUs."""
    makefile = (ROOT / "Makefile").read_text()
    recipe = re.search(r"@(case .*?esac)", makefile, re.DOTALL)[1].replace("$$", "$")
    for name, words in re.findall(r"^([CP]P) := (.*)$", makefile, re.MULTILINE):
        recipe = recipe.replace(f"$({name})", words)
    (folder / "python").write_text(f"#!/bin/sh\necho {gpus}\n")
    (folder / "python").chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    return subprocess.run(["bash", "-c", recipe], env={"PATH": path}, capture_output=True, text=True)


@pytest.mark.parametrize("gpus", [1, 2, 3, 8])
def test_the_demonstrations_start_with_any_number_of_gpus(gpus, tmp_path):
    """`make train` on four processes of the CPU, `make train-gpu` on a power of two GPUs."""
    here = {"is_here": False, "runs_here": True}
    assert hosts_of(str(CONFIGS / "cpu_debug.toml"), [], **here).processes == 4
    words = spread(gpus, tmp_path).stdout.split()
    hosts = hosts_of(str(CONFIGS / "gpu_debug.toml"), words, **here)
    assert hosts.processes == {3: 2}.get(gpus, gpus)


def test_each_process_wants_a_gpu(monkeypatch):
    monkeypatch.setattr("wlb_titan.runtime.cpu_device.use_cpu_without_accelerator", lambda: False)
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match=r'4 processes need a GPU each, .* or set wlb.device = "cpu"'):
        train(CONFIG, ["--wlb.device", "auto"], rank=0, world_size=4, alarm=None)


@pytest.mark.parametrize(("device", "seen"), [("cpu", ""), ("auto", "0,1")])
def test_a_rank_that_shall_use_the_cpu_hides_the_gpus_from_itself(monkeypatch, device, seen):
    def ask():
        raise KeyboardInterrupt(os.environ["CUDA_VISIBLE_DEVICES"])

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr("wlb_titan.runtime.cpu_device.use_cpu_without_accelerator", ask)
    with pytest.raises(KeyboardInterrupt, match=f"^{seen}$"):
        train(CONFIG, ["--wlb.device", device], rank=0, world_size=4, alarm=None)


def test_a_missing_corpus_is_one_paragraph_and_exit_code_2(tmp_path, fork_server):
    words, log = ["--", "--wlb.corpus.path", str(tmp_path / "nowhere")], tmp_path / "log"
    train = Rank(["run", "-s", "local_cwd", "wlb.train", "--config", CONFIG, *words], log)
    assert fork_server.start([train], "torchx.cli.main").wait(300) == [2]
    assert "There is no corpus at" in log.read_text()
    assert "Traceback" not in log.read_text()


def test_the_batch_script_for_slurm_is_one_component_and_goes_on_by_itself(tmp_path, monkeypatch):
    """Its options are sbatch's, and run by bash with a Slurm that is not there, it starts the agent on each
    node in torchrun's words, and puts the job back only when its time is up."""
    make_corpus(tmp_path / "texts", tmp_path / "corpus")
    folder = tmp_path / "run"
    corpus = ["--wlb.corpus.path", str(tmp_path / "corpus"), "--dump_folder", str(folder)]
    words = ["slurm", SEVEN_B, "--time", "8:00:00", "-o", "partition=gpu", "--checkpoint.enable", "true"]
    monkeypatch.setattr(sys, "argv", ["wlb-titan", *words, "--dump_folder", "a\nexit 9\n"])
    script = invoke(*words, *corpus)
    assert script.exit_code == 0, script.output
    assert script.stderr == "", "nothing about this machine's CPU"
    assert len(list(folder.iterdir())) == 1
    assert set(re.findall("^#SBATCH --(.*)", script.stdout, re.MULTILINE)) == set(SBATCH.split())
    on_cpu = said("slurm", CONFIG, "--nproc-per-node", "2", *corpus)
    assert "--nodes=2" in on_cpu and "--nproc_per_node 2" in on_cpu
    assert "gpu" not in "".join(re.findall("^#SBATCH.*", on_cpu, re.MULTILINE))
    for name, text in FAKE_SLURM.items():
        (tmp_path / name).write_text("#!/bin/bash\n" + text)
        (tmp_path / name).chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    (tmp_path / "job.sbatch").write_text(script.stdout)
    for status in (0, 1, 75, 143):
        of_slurm = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "node[1-8]", "STATUS": str(status)}
        job = subprocess.run(["bash", "job.sbatch"], cwd=tmp_path, env=path | of_slurm)
        assert job.returncode == status
        assert (tmp_path / "requeued").exists() == (status == 75)
        (tmp_path / "requeued").unlink(missing_ok=True)
    started = (tmp_path / "started").read_text().splitlines()
    assert started[:3] == ["--kill-on-bad-exit=0", "--wait=120", sys.executable]
    agent = parse_args(started[5:])
    assert (agent.nnodes, agent.nproc_per_node, agent.max_restarts) == ("8:8", "8", 0)
    assert (agent.rdzv_endpoint, agent.rdzv_id) == ("node1:24711", "4711.0")
    assert (agent.module, agent.training_script) == (True, "wlb_titan.runtime.train")
    option, submitted = agent.training_script_args
    assert option == "--config" and submitted in script.stdout and Path(submitted).parent == folder
    given = [load_config(SEVEN_B, ["--checkpoint.enable", "true", *corpus]), load_config(submitted)]
    asked, trained = (tomllib.loads(loaded.to_toml()) for loaded in given)
    assert asked["checkpoint"]["enable"] and asked == trained
    assert changed_since(submitted) is None is changed_since(SEVEN_B)
    monkeypatch.setattr("wlb_titan.runtime.dump_folder.__version__", "0.0.9")
    assert re.search(
        r"submitted: wlb_titan 0\.1\.0, code \w+ then, wlb_titan 0\.0\.9", changed_since(submitted)
    )
    shared = said(*words, *corpus, "-o", "cpus-per-task=96", "-o", "mem=500G")
    assert "cpus-per-task=96\n#SBATCH --mem=500G\n" in shared and "exclusive" not in shared
    for key, value in (("enable", "false"), ("load_only", "true")):
        lost = said(*words, *corpus, f"--checkpoint.{key}", value)
        assert "scontrol requeue" not in lost, "it would begin again, for ever"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("-o nodes=99", "not set by this command itself .nodes, ntasks, .*got 'nodes=99'"),
        ("-o --no-kill", "got '--no-kill'"),
        ("-o time=1", "got 'time=1'"),
        ("-o =", "got '='"),
        ("-o N=2", "got 'N=2'"),
        ("--time forever", '--time: "forever" is not a duration'),
        ("--time 0:00:00", "--time: it must be longer than 0"),
        ("--time 00:05:00", "--notice: 300 s before the end of --time 00:05:00 is before the run begins"),
        ("--notice 65536", "65536 is not in the range"),
        ("--wlb.stop_after 0-0:00:00", 'wlb.stop_after = "0-0:00:00": it must be longer than 0'),
    ],
)
def test_a_batch_script_that_would_stop_at_once_or_run_elsewhere_is_refused(words, message):
    corpus = ["--wlb.corpus.path", str(ROOT)]
    refused = invoke("slurm", SEVEN_B, *words.split(), *corpus)
    assert refused.exit_code == 2 and re.search(message, refused.stderr), refused.output
    assert not refused.stdout


@pytest.mark.parametrize(
    ("own", "meeting", "named"),
    [("nowhere.invalid", "localhost", "nowhere.invalid"), ("localhost", "away.invalid", "away.invalid")],
)
def test_hosts_that_cannot_be_looked_up_are_named_at_once(monkeypatch, tmp_path, capfd, own, meeting, named):
    """A name of a machine that nobody knows: torch would wait for five minutes, and hear no signal."""
    monkeypatch.setattr("socket.getfqdn", lambda *name: own)
    words = ["--rdzv_backend", "c10d", "--nnodes", "2", "--nproc_per_node", "1"]
    words += ["--rdzv_endpoint", f"{meeting}:{free_port()}", str(tmp_path / "none.py")]
    assert run(words) == 2
    assert f"does not reach {named}" in capfd.readouterr().err


def test_one_host_meets_itself_whatever_it_calls_itself(monkeypatch, tmp_path):
    monkeypatch.setattr("socket.getfqdn", lambda *name: "nowhere.invalid")
    (tmp_path / "rank.py").write_text(MEETING)
    words = ["--rdzv_backend", "c10d", "--nnodes", "1", "--nproc_per_node", "2"]
    assert run([*words, "--rdzv_endpoint", "nowhere.invalid:0", str(tmp_path / "rank.py")]) == 0


def test_the_agent_hands_on_what_torchrun_would():
    words = ["--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", "--virtual_local_rank", "--max_restarts=3"]
    words += ["--start_method=forkserver", "--duplicate_stderr_filters=error,note"]
    agent = Agent(*config_from_args(parse_args([*words, "script.py"])))
    spec = agent.get_worker_group().spec
    assert (spec.max_restarts, spec.virtual_local_rank) == (3, True)
    assert (spec.duplicate_stderr_filters, agent._start_method) == (["error", "note"], "forkserver")
    agent.leave()


@pytest.mark.parametrize(("status", "told"), [(75, ""), (1, "The job failed: rank 0 (exit code 1).")])
def test_a_host_that_ends_waits_for_the_others_which_need_its_store(status, told, fork_server, tmp_path):
    """The first has ended a while when the second's rank ends, with the same status; then it is told to stop,
    too late to change its own. The second used to find the rendezvous gone, and ended with 1 after a run that
    all had saved."""
    script = tmp_path / "rank.py"
    script.write_text(PARTING.format(status=status))
    endpoint, logs = f"localhost:{free_port()}", [tmp_path / f"host{number}.log" for number in range(2)]
    words = ["--nnodes", "2", "--nproc_per_node", "1", "--rdzv_backend", "c10d", "--rdzv_id", "parting"]
    words += ["--rdzv_endpoint", endpoint, "--rdzv_conf"]
    hosts = [Rank([*words, f"is_host={1 - late}", str(script), str(late)], logs[late]) for late in range(2)]
    job = fork_server.start(hosts, AGENT, together=False)
    assert job.wait(300) == [status, status], [log.read_text() for log in logs]
    assert "lost each other" not in "".join(log.read_text() for log in logs)
    assert told in "".join(log.read_text() for log in logs)


MEETING = """
import os, socket
socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), 60).close()
"""
PARTING = """
import os, pathlib, signal, sys, time
first = pathlib.Path(__file__).with_name("first")
if sys.argv[1] == "0":
    first.write_text(str(os.getppid()))
else:
    time.sleep(3)
    os.kill(int(first.read_text()), signal.SIGUSR1)
    time.sleep(1)
sys.exit({status})
"""
SBATCH = """
job-name=llama2_7b_128k nodes=8 ntasks-per-node=1 gpus-per-node=8 time=8:00:00 signal=USR1@300 requeue
open-mode=append output=%x-%j.out partition=gpu exclusive mem=0
"""
FAKE_SLURM = {
    "srun": 'printf "%s\\n" "$@" > started; exit "$STATUS"',
    "scontrol": 'case "$*" in "show hostnames node[1-8]") printf "node1\\nnode2\\n";; '
    '"requeue 4711") touch requeued;; *) exit 3;; esac',
}
