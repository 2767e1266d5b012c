"""Whether all that ranks of a test's job ask of their process groups meets, by NCCL's rules and not gloo's.

Hooks of the process groups see every call of the main thread, on any backend: those of the threads that plan
ahead or save checkpoints have groups of their own. `recording:NAME` is the base `bases:NAME` whose trainer
writes what `met` returns into its dump folder.
"""

import dataclasses
import json
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from wlb_titan.runtime.compat import place_in_batch, ranks_of_group
from wlb_titan.runtime.lone.calls import of_rank, site
from wlb_titan.runtime.models.bases import base_config
from wlb_titan.runtime.trainer import Trainer
from wlb_titan.simulator.calls import RECEIVE, SEND, Call, RankCalls, unmet

HOOK = 4711  # any number that torch's own hooks do not have
KINDS = {
    "SEND": SEND,
    "RECV": RECEIVE,
    "ALLREDUCE": "all-reduce",
    "ALLREDUCE_COALESCED": "all-reduce",
    "ALLGATHER": "all-gather",
    "ALLGATHER_BASE": "all-gather",
    "ALLGATHER_COALESCED": "all-gather",
    "ALLGATHER_INTO_TENSOR_COALESCED": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "REDUCE_SCATTER_BASE": "reduce-scatter",
    "REDUCE_SCATTER_TENSOR_COALESCED": "reduce-scatter",
    "ALLTOALL": "all-to-all",
    "ALLTOALL_BASE": "all-to-all",
}
FILE = "calls.json"


class Recorder:
    """Keeps the calls that are made within `with`."""

    def __init__(self):
        self.latest = lambda: ""
        self._hooked, self._on, self._batches, self._calls = set(), False, 0, []

    def __enter__(self):
        self._look()
        # Schedules split groups for each edge in their first step, and use them at once.
        self._split = mock.patch.object(dist, "split_group", self._looking(dist.split_group))
        self._split.start()
        self._on = True

    def __exit__(self, *_):
        self._on = False
        self._split.stop()

    def _looking(self, split_group):
        def split(*args, **kwargs):
            found = split_group(*args, **kwargs)
            self._look()
            return found

        return split

    def _look(self):
        """Hooks on the groups that there are now."""
        for group, name in list(_world.pg_names.items()):
            if name not in self._hooked and len(_world.pg_group_ranks[group]) > 1:
                group.register_pre_hook(HOOK, partial(self._keep, name))
                self._hooked.add(name)

    def _keep(self, name, call):
        if not self._on or threading.current_thread() is not threading.main_thread():
            return
        kind = KINDS.get(call.name.name, call.name.name.lower())
        place = place_in_batch() if kind in (SEND, RECEIVE) else None
        self._batches += place == 0
        tensors = [*call.input_tensors, *call.output_tensors]
        sizes = [sum(t.nbytes for t in one) for one in (call.input_tensors, call.output_tensors)]
        dtype = str(tensors[0].dtype) if tensors else ""
        batch = 0 if place is None else self._batches
        where = f"{self.latest()}, {site()}"
        peer = -1 if call.root < 0 else ranks_of_group(name)[call.root]
        self._calls.append((name, Call(kind, 0, *sizes, dtype, peer, batch, where)))

    def met(self):
        """The number of calls of all ranks since the last time, and what does not meet; on rank 0."""
        mine, self._calls = of_rank(self._calls).to_json(), []
        everything = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(mine, everything)
        if everything is None:
            return None
        ranks = {rank: RankCalls.from_json(one) for rank, one in enumerate(everything)}
        calls = sum(len(one.calls) for one in ranks.values())
        return {"calls": calls, "unmet": unmet(ranks, queue_per_edge=False)}


RECORDER = Recorder()


class RecordingTrainer(Trainer):
    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    def train_step(self, data_iterator):
        RECORDER.latest = lambda: self.timer.latest
        with RECORDER:
            super().train_step(data_iterator)

    def close(self):
        met = RECORDER.met() if torch.distributed.is_initialized() else None
        if met is not None:
            (Path(self.config.dump_folder) / FILE).write_text(json.dumps(met))
        super().close()


def __getattr__(name):
    def base():
        config = base_config(f"bases:{name}")
        return RecordingTrainer.Config(
            **{f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
        )

    return base
