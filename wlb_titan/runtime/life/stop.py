"""A run that is asked to end finishes its step, saves and ends: after the same step on every rank.

It is asked by a signal, which may reach one rank only, or by `wlb.stop_after`. No rank may stop by itself:
the others would wait for it in a collective. They agree through the store that `alarm` watches, in its
thread, so that a step costs a lock, and nothing is exchanged before somebody asks:

    stop            why, by the first that was asked
    begun/<rank>    the step that a rank had begun when it saw that; it begins no other before the answer
    last            the largest of these, by rank 0 when all have said theirs: the last step of all

No rank waits for one that waits: whoever stands between two steps has entered all collectives of those
before, so that others can end theirs; and what they had begun is said by their alarms' threads, which no
collective holds up.

A call of the store may fail: what it was to do is done at the next look, and twice does no harm.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import threading
import time

from torch.distributed import HashStore, Store
from torchtitan.tools.logging import logger

from wlb_titan.errors import EXIT_AGAIN, UserError


class Stop:
    """What ranks agree on.

    Args:
        store: store of the job; None for a job of one process.

    Attributes:
        status: with which the process ends once the run has stopped; 0 as long as nobody has asked.
    """

    def __init__(self, rank: int, world_size: int, store: Store | None) -> None:
        self.status = 0
        self._rank = rank
        self._store = store or HashStore()
        self._all_begun = [f"begun/{one}" for one in range(world_size)]
        self._deadline = float("inf")
        self._begun = 0
        self._wish = ""
        self._frozen = False
        self._told = False
        self._last: int | None = None
        self._changed = threading.Condition()

    @property
    def is_asked(self) -> bool:
        return self._frozen or self._wish != ""

    @property
    def is_undecided(self) -> bool:
        """Whether some ranks may wait for the others' answer."""
        return self.is_asked and self._last is None

    def after(self, seconds: float) -> None:
        """Has the run stop so many seconds from now; rank 0's clock counts."""
        if self._rank == 0:
            self._deadline = time.monotonic() + seconds

    def goes_on(self, step: int) -> bool:
        """Whether a step after `step` is trained; for the main thread, between two steps."""
        with self._changed:
            if not self._frozen:
                self._begun = step + 1
                return True
            self._changed.wait_for(lambda: self._last is not None)
            assert self._last is not None
            return step < self._last

    def ask(self, why: str, status: int) -> None:
        """Asks all ranks to stop, from the next look on; a second reason changes nothing."""
        self._wish = self._wish or json.dumps({"why": why, "status": status})

    def look(self) -> None:
        """What the alarm's thread does at each of its looks; where the store fails, the next one goes on."""
        if time.monotonic() > self._deadline:
            self.ask("wlb.stop_after", EXIT_AGAIN)
        store = self._store
        if self._last is not None:
            return
        if not self._frozen and (self._wish or store.check(["stop"])):
            self._freeze(store.compare_set("stop", "", self._wish).decode())  # what was asked first
        if not self._frozen:
            return
        if not self._told:
            self._tell()
        if self._rank == 0 and store.check(self._all_begun):
            store.set("last", str(max(map(int, store.multi_get(self._all_begun)))))
        if store.check(["last"]):
            self._decide(int(store.get("last")))

    def leave(self) -> None:
        """Answers before anybody asks: this rank has done its last step, and looks no more."""
        with self._changed:
            self._frozen = True
        with contextlib.suppress(Exception):  # the store's host may be done already
            if not self._told:
                self._tell()
            if self._rank == 0 and self._last is None:
                self._store.set("last", str(self._begun))  # of all, as none ends its last step alone

    def _tell(self) -> None:
        self._store.set(self._all_begun[self._rank], str(self._begun))
        self._told = True

    def _freeze(self, asked: str) -> None:
        """Begins no step from now on."""
        found = json.loads(asked)
        with self._changed:
            self._frozen = True
            self.status = found["status"]
        logger.info(
            f"{found['why']}: the run ends after the step under way; a second signal ends it at once."
        )

    def _decide(self, last: int) -> None:
        with self._changed:
            self._last = last
            self._changed.notify_all()


def status_of(number: int) -> int:
    """The exit status of a run that stopped by a signal.

    SIGUSR1 is a scheduler's warning that time is up (`sbatch --signal`): it is to start the job again. Who
    sends another one knows what follows.
    """
    return EXIT_AGAIN if number == signal.SIGUSR1 else 128 + number


def seconds_of(duration: str) -> float:
    """`23:40:00` or `1-12:00:00` (days, as Slurm writes it) in seconds.

    Raises:
        UserError: it is neither.
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)", duration)
    if match is None:
        raise UserError(
            f'wlb.stop_after: "{duration}" is no duration. Write hours:minutes:seconds, such as "23:40:00".'
        )
    days, hours, minutes, seconds = (int(group or 0) for group in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60.0 + seconds
