"""The tests that need a GPU, and how they are rehearsed without one.

    pytest tests/gpu --device cuda    # make test-gpu: skipped where torch finds no GPU
    pytest tests/gpu --device cpu     # the same tests in small, with gloo: whether their code runs at all

Sizes, dtypes and tolerances differ, which come from the fixture `target`. What is marked `gpu` is left out in
small: on a CPU it is as another case here, or tests/distributed has it.
"""

import json
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from forking import VISIBLE_GPUS
from lab import Lab

from wlb_titan.runtime.cpu_device import use_cpu_without_accelerator

ONE_GPU = {
    # Ranks share a GPU as if each were on a host of its own, which NCCL 2.30 calls experimental.
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_MAX_CTAS": "2",
}


@dataclass(frozen=True)
class Target:
    """The device under test, `cuda` or `cpu`."""

    device: str

    def pick(self, *, cuda: Any, cpu: Any) -> Any:
        return {"cuda": cuda, "cpu": cpu}[self.device]

    def base(self, name: str) -> str:
        """Models as wide as real ones for a GPU, and the other tests' for a CPU."""
        return f"{self.pick(cuda='gpu_bases', cpu='bases')}:{name}"


def pytest_addoption(parser):
    parser.addoption("--results", help="file of JSON lines to which measurements are appended")
    parser.addoption("--device", choices=("cuda", "cpu"), help="where tests/gpu runs; without it, nowhere")


def pytest_configure(config):
    if config.getoption("--device", None) == "cuda":
        os.environ.pop("CUDA_VISIBLE_DEVICES")
        os.environ |= {} if VISIBLE_GPUS is None else {"CUDA_VISIBLE_DEVICES": VISIBLE_GPUS}
    use_cpu_without_accelerator()  # before a test module imports torchtitan


def pytest_collection_modifyitems(config, items):
    if config.getoption("--device", None) == "cpu":
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


@pytest.fixture(scope="session")
def target(pytestconfig) -> Target:
    device = pytestconfig.getoption("--device", None)
    if device is None:
        pytest.skip("needs a GPU: pytest tests/gpu --device cuda")
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch finds no GPU here")
    return Target(device)


@pytest.fixture(scope="session")
def tell(pytestconfig):
    """Appends a row of what was measured to --results."""

    def tell(**row):
        if path := pytestconfig.getoption("--results"):
            with open(path, "a") as results:
                results.write(json.dumps(row) + "\n")

    return tell


@pytest.fixture(scope="session")
def lab(target, tmp_path_factory, fork_server):
    """Experiments on documents of which some, on a GPU, are long enough for the kernels' other tables."""
    short = np.clip(np.random.default_rng(0).lognormal(4.0, 1.2, size=400), 4, 1500).astype(int)
    lengths = np.insert(short, range(0, 400, 40), target.pick(cuda=4096, cpu=1024))
    common = target.pick(cuda=["--training.mixed_precision_param", "bfloat16"], cpu=[])
    how = {"common": common, "environment": target.pick(cuda=ONE_GPU, cpu={}), "lengths": lengths}
    return Lab(tmp_path_factory.mktemp("lab"), fork_server, base=target.base("llama"), **how)
