"""One rank of a run of fidelity.py, which starts it: trains some steps and writes what it measured.

python -m torch.distributed.run --nproc_per_node=RANKS benchmarks/fidelity_run.py CASE OUTPUT
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import pickle
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from common.trainers import BenchTrainer, make_config, make_corpus, torch

import torch.distributed as dist  # isort: skip
from fidelity import LAYERS, LENGTHS, MICRO_BATCHES, WARM_UP
from fidelity_probe import Probe
from torchtitan.distributed.activation_checkpoint import FullAC

from wlb_titan.context import STRATEGIES
from wlb_titan.packing import POLICIES
from wlb_titan.pipeline.order import ORDERS
from wlb_titan.runtime.shape import model_shape

PAGE = os.sysconf("SC_PAGE_SIZE")


class PeakMemory:
    """Resident memory of this process at its largest, looked at every 2 ms while it runs."""

    def __init__(self) -> None:
        self.bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.is_set():
            self.bytes = max(self.bytes, resident())
            time.sleep(0.002)

    def stop(self) -> int:
        self._stop.set()
        self._thread.join()
        return self.bytes


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def in_turns(probe: Probe, rank: int, ranks: int, cores: int) -> float:
    """Seconds of a probe that has a core for itself. Call it on every rank."""
    for first in range(0, ranks, cores):
        dist.barrier()
        if first <= rank < first + cores:
            seconds = probe.seconds()
    dist.barrier()
    return seconds


def config_of(case: dict[str, Any], folder: Path) -> Any:
    config = make_config(folder, "run", window=case["window"], micro_batches=MICRO_BATCHES, layers=LAYERS)
    degrees = case["degrees"]
    config.parallelism = dataclasses.replace(
        config.parallelism,
        pipeline_parallel_degree=degrees["pipeline"],
        context_parallel_degree=degrees["context"],
        data_parallel_shard_degree=degrees["shard"],
        data_parallel_replicate_degree=degrees["replicate"],
        pipeline_parallel_schedule=case["schedule"],
    )
    config.activation_checkpoint = FullAC.Config() if case["checkpointing"] == "full" else None
    config.wlb.packing = POLICIES.configure(
        case["packing"],
        cost_model=case["cost_model"],
        length_multiple=case["window"] // 8,  # few lengths
    )
    config.wlb.sharding = STRATEGIES.configure(case["sharding"])
    config.wlb.pipeline = ORDERS.configure(case["order"])
    return config


def main() -> None:
    case, output = json.loads(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if ranks <= len(cores):
        os.sched_setaffinity(0, {cores[rank]})
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as own:
        shared = [own]
        dist.broadcast_object_list(shared)
        folder = Path(shared[0])
        replicas = case["degrees"]["shard"] * case["degrees"]["replicate"]
        windows = 60 * MICRO_BATCHES * replicas
        median, sigma = LENGTHS[case["documents"]]
        make_corpus(folder, windows, window=case["window"], sigma=sigma, median=median)
        trainer = BenchTrainer(config_of(case, folder))
        seconds, plans, probes = [], [], []
        probe = Probe()
        seen: set[int] = set()  # lengths: a new one costs seconds once, in working out shardings
        while len(plans) < case["steps"]:
            if trainer.step == WARM_UP:
                gc.collect()
                before = resident()
                watch = PeakMemory()
            before_step = in_turns(probe, rank, ranks, len(cores))
            second = trainer.timed_step()
            speed = (before_step + in_turns(probe, rank, ranks, len(cores))) / 2
            plan = trainer.planned.plan
            lengths = {m.length for m in plan.micro_batches}
            if trainer.step > WARM_UP and (lengths <= seen or case["memory"]):
                seconds.append(second)
                plans.append(plan)
                probes.append(speed)
            seen |= lengths
        used = torch.tensor(float(watch.stop() - before))
        dist.all_reduce(used, op=dist.ReduceOp.MAX)
        probed = torch.tensor(probes) / ranks
        dist.all_reduce(probed)
        record = {
            "seconds": seconds,
            "probe": probed.tolist(),
            "bytes": int(used),
            "plans": plans,
            "model": model_shape(trainer.config.model_spec.model),
        }
        if rank == 0:
            output.write_bytes(pickle.dumps(record))
        trainer.close()
        dist.barrier()


if __name__ == "__main__":
    main()
