"""The tests that need a GPU, and how they are rehearsed without one.

    pytest tests/gpu --device cuda    # make test-gpu: skipped where torch finds no GPU
    pytest tests/gpu --device cpu     # the same tests in small, with gloo: does their code run at all

Device, sizes, dtypes and tolerances are all that differs; they come from the fixture `target`.
"""

import os
from dataclasses import dataclass

import pytest
import torch
from conftest import VISIBLE_GPUS
from lab import Lab

from wlb_titan.runtime.cpu_device import use_cpu_without_accelerator

ONE_GPU = {
    # Ranks that share a GPU, as if each were on a host of its own; experimental in NCCL 2.30.
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_MAX_CTAS": "2",
}


@dataclass(frozen=True)
class Target:
    """Where the tests run."""

    device: str

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def pick(self, *, cuda, cpu):
        return cuda if self.on_gpu else cpu

    @property
    def dtype(self) -> list[str]:
        """Overrides for the dtype of training, in which one process is compared with several."""
        return ["--training.mixed_precision_param", self.pick(cuda="bfloat16", cpu="float32")]


def pytest_addoption(parser):
    parser.addoption("--device", choices=("cpu", "cuda"), help="where tests/gpu runs; without it, nowhere")


def pytest_configure(config):
    if config.getoption("--device", None) == "cuda":
        if VISIBLE_GPUS is None:
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = VISIBLE_GPUS
    use_cpu_without_accelerator()  # before a test module imports torchtitan


@pytest.fixture(scope="session")
def target(pytestconfig) -> Target:
    device = pytestconfig.getoption("--device", None)
    if device is None:
        pytest.skip("needs a GPU: pytest tests/gpu --device cuda")
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch finds no GPU here")
    return Target(device)


@pytest.fixture(scope="session")
def lab(target, tmp_path_factory, fork_server):
    return Lab(
        tmp_path_factory.mktemp("lab"), fork_server, environment=target.pick(cuda=ONE_GPU, cpu={})
    )
