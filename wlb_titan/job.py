"""The job: everything besides the documents that plans and predictions depend on.

It is made once, from a configuration (`runtime/configured.py`) or from options (`commands`), and is the only
way to a planner: `plan`, `simulate`, `dryrun` and training make the same plans from the same TOML file, if it
names the cluster or they see the same GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from wlb_titan.documents import Documents
from wlb_titan.packing.policies import Policies, Policy
from wlb_titan.plan import Plan
from wlb_titan.planner import Planner
from wlb_titan.progress import Progress, counted, silent

__all__ = ["Job", "Policy"]


@dataclass(frozen=True, kw_only=True)
class Job(Policies):
    """Layout, rates and policies of a training run, which make its plans."""

    def planner(self, documents: Documents) -> Planner:
        assert not self.undecided, "no policy has been chosen for `auto`"
        return Planner(documents, self)

    def plans(
        self, documents: Documents, steps: int, after: int = 0, report: Progress = silent
    ) -> list[Plan]:
        """The plans of `steps` steps, after the first `after`."""
        planner = self.planner(documents)
        numbers = counted(range(after + steps), report, f"Planning {self.policy}")
        for _ in islice(numbers, after):
            planner.next(sharded=())
        return [planner.next() for _ in numbers]
