"""The TorchX components `torchx run wlb.train` and `wlb.bench`.

TorchX reads parameters and their descriptions off the functions below and lints every function here, so
its types are plain and its docstring is in Google style; helpers live in `in_torchx.py`.
"""

from typing import Dict, List, Optional

import torchx.specs as specs
from torchx.components import dist
from wlb_titan.launch import in_torchx
from wlb_titan.launch.job import PROGRAM


def train(
    *overrides: str,
    config: str,
    nnodes: str = "1",
    nproc_per_node: int = 0,
    image: str = ".",
    name: str = "wlb-train",
    h: Optional[str] = None,
    cpu: int = 2,
    gpu: int = 0,
    memMB: int = 8192,
    env: Optional[Dict[str, str]] = None,
    mounts: Optional[List[str]] = None,
    max_retries: int = 0,
    max_restarts: int = 0,
) -> specs.AppDef:
    """Trains a model as a TOML file says. Options after `--` override its keys: `-- --training.steps 5`.

    Args:
        overrides: keys that win over the file, such as --training.steps 5
        config: TOML file of the experiment
        nnodes: number of hosts, or MIN:N when it goes on with MIN of them if others are lost
        nproc_per_node: processes on each host; 0 takes as many as the configured parallel degrees need
        image: container image of the job, for schedulers that run containers; . is the current folder
        name: name of the job
        h: named resource of a host, instead of cpu, gpu and memMB
        cpu: CPU cores a host
        gpu: GPUs a host, as the scheduler is to reserve them; none where wlb.device = "cpu"
        memMB: memory a host in MiB
        env: environment variables of the processes, such as NCCL_DEBUG=INFO,WANDB_API_KEY=...
        mounts: volumes of containers, as of dist.ddp: type=bind,src=/data,dst=/data
        max_retries: how often the scheduler starts a failed job again
        max_restarts: how often the hosts start their processes again, from the newest checkpoint
    """
    hosts = in_torchx.hosts(image, config, overrides, nnodes=nnodes, processes=nproc_per_node)
    app = dist.ddp(
        *hosts.words,
        m=PROGRAM,
        image=image,
        name=name,
        h=h,
        cpu=cpu,
        gpu=0 if hosts.on_cpu else gpu,
        memMB=memMB,
        env=env,
        mounts=mounts,
        j=f"{hosts.fewest}:{hosts.nodes}x{hosts.processes}",
        max_retries=max_retries,
    )
    return in_torchx.with_our_agent(app, image, hosts.restart_words(max_restarts))


def bench(
    *overrides: str,
    config: str,
    policies: str,
    nnodes: str = "1",
    image: str = ".",
    h: Optional[str] = None,
    gpu: int = 0,
    env: Optional[Dict[str, str]] = None,
    mounts: Optional[List[str]] = None,
) -> specs.AppDef:
    """Measures policies in turns on one model. Options after `--` override keys: `-- --wlb.bench.rounds 20`.

    Args:
        overrides: keys that win over the file, such as --dump_folder outputs/bench
        config: TOML file of the experiment
        policies: those that take turns, as in wlb.policy, with commas between; the first is the baseline
        nnodes: number of hosts
        image: container image of the job, as of wlb.train
        h: named resource of a host, instead of gpu
        gpu: GPUs a host
        env: environment variables of the processes
        mounts: volumes of containers
    """
    words = (*overrides, "--wlb.bench.policies", policies)
    kept = {"image": image, "h": h, "gpu": gpu, "env": env, "mounts": mounts}
    return train(*words, config=config, nnodes=nnodes, name="wlb-bench", **kept)
