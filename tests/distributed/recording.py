"""Whether all that ranks of a test's job ask of their process groups meets, by NCCL's rules and not gloo's.
Hooks of the groups see every call of the main thread; threads that plan or save have groups of their own."""

import threading
from functools import partial
from unittest import mock

import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from wlb_titan.runtime.one_rank.dry_trace import CallLog, kind_of
from wlb_titan.simulator.calls import unmet

HOOK = 4711  # any number that torch's own hooks do not have


class Recorder:
    """Keeps the calls that are made within `with`."""

    def __init__(self):
        self.latest = lambda: ""
        self._log = CallLog(lambda: self.latest())
        self._hooked, self._on = set(), False

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
        kind = kind_of(call.name.name) or call.name.name.lower()
        self._log.add(kind, name, call.input_tensors, call.output_tensors, call.root)

    def met(self):
        """The number of calls of all ranks since the last time, and what does not meet; on rank 0."""
        mine = self._log.of_rank()
        self._log.calls.clear()
        everything = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(mine, everything)
        if everything is None:
            return None
        ranks = dict(enumerate(everything))
        calls = sum(len(one.calls) for one in ranks.values())
        return {"calls": calls, "unmet": unmet(ranks, queue_per_edge=False)}


RECORDER = Recorder()
