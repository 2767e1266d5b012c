"""How a run ends. One rank's failure ends the job on every host within seconds and is told once; a run that
is asked to end finishes its step, saves and ends, after the same step on every rank.

A rank that stops leaves the others waiting in a collective, which they give up after minutes. So each rank
has a thread (`Alarm`) that looks once a second at the store by which a job's processes find each other:

    failed          the first failure: rank, host and message
    stop            the first reason to end the run
    begun/<rank>    how many steps a rank had begun when it saw `stop`; it begins no other before `last`
    last            the largest of these, set by rank 0 once all are there: how many all ranks do

docs/launch.md ("Stopping") says when a run is asked to end. Steps are those of training and of validations,
in the order in which every rank does them. Ranks that agree on the last one (`Stop`) cannot deadlock: a rank
between two steps has entered all collectives of those before, so that others can finish theirs, and no
collective holds up the threads. A call of the store that fails is repeated at the next look.

The thread also hears signals, as the main thread may be inside a collective, where Python runs no handler,
and ends the rank when the launcher of its host is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import sys
import threading
import time
import traceback
from datetime import timedelta
from typing import Any, NoReturn

from torch.distributed import HashStore, PrefixStore, Store, TCPStore
from torchtitan.tools.logging import logger

from wlb_titan.errors import EXIT_AGAIN, EXIT_USER_ERROR, ONE_REQUEST, UserError

SECONDS_BETWEEN_LOOKS = 1.0
GRACE = 3.0  # seconds for a rank to report its own error after another has failed
HEARD = 2.5  # seconds in which all others look at the store, which may end with this host
LOST = 30.0  # seconds without the store after which its host counts as gone
CONNECT = timedelta(seconds=120)

EXIT_FAILED = 1
EXIT_STOPPED = 128 + signal.SIGTERM
HEARD_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Stop:
    """The ranks' agreement on when to end. A job of one process needs no store."""

    def __init__(self, rank: int, world_size: int, store: Store | None) -> None:
        self.status = 0  # the exit status of a stopped run; 0 until somebody asks
        self._rank = rank
        self._store = store or HashStore()
        self._all_begun = [f"begun/{number}" for number in range(world_size)]
        self._deadline = float("inf")
        self._begun = 0
        self._wish = ""
        self._frozen = False
        self.last: int | None = None
        self._changed = threading.Condition()

    @property
    def is_asked(self) -> bool:
        return self._frozen or self._wish != ""

    def after(self, seconds: float) -> None:
        """Stops the run in so many seconds by rank 0's clock."""
        if self._rank == 0:
            self._deadline = time.monotonic() + seconds

    def goes_on(self) -> bool:
        """Whether another step follows, of training or of a validation; for the main thread, before each."""
        with self._changed:
            if self._frozen:
                self._changed.wait_for(lambda: self.last is not None)
                if self._begun >= self.last:
                    return False
            self._begun += 1
            return True

    def ask(self, why: str, status: int) -> None:
        """Asks all ranks to stop, from the next look on; a second reason changes nothing."""
        self._wish = self._wish or json.dumps({"why": why, "status": status})

    def look(self) -> None:
        """One look of the alarm's thread at the store; the next one makes up for one that fails."""
        if time.monotonic() > self._deadline:
            self.ask("wlb.stop_after", EXIT_AGAIN)
        store = self._store
        if self.last is not None:
            return
        if not self._frozen and (self._is_ready or store.check(["stop"])):
            first = json.loads(store.compare_set("stop", "", self._wish).decode())  # what was asked first
            with self._changed:
                self._frozen = True
                self.status = first["status"]
            logger.info(
                f"{first['why']}: the run ends after the current step; a second signal ends it at once."
            )
        if not self._frozen:
            return
        self._tell()
        if self._rank == 0 and store.check(self._all_begun):
            store.set("last", str(max(map(int, store.multi_get(self._all_begun)))))
        if store.check(["last"]):
            with self._changed:
                self.last = int(store.get("last"))
                self._changed.notify_all()

    def leave(self) -> None:
        """Answers in advance: this rank has done its last step, and looks no more."""
        with self._changed:
            self._frozen = True
        with contextlib.suppress(Exception):  # the store's host may be done already
            self._tell()
            if self._rank == 0 and self.last is None:
                self._store.set("last", str(self._begun))  # of all ranks: none finishes a step alone

    @property
    def _is_ready(self) -> bool:
        """Whether a wish is passed on. A run that is started again by itself does a step each time: it would
        otherwise be started for ever."""
        return bool(self._wish) and (self._begun > 0 or json.loads(self._wish)["status"] != EXIT_AGAIN)

    def _tell(self) -> None:
        self._store.set(self._all_begun[self._rank], str(self._begun))


class Alarm:
    """A context in which this rank watches all others, and they watch it."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._host = socket.gethostname()
        self._store = _store(rank) if world_size > 1 else None  # one process has nobody to watch
        self.stop = Stop(rank, world_size, self._store)
        self._asked: float | None = None
        self._launcher = os.getppid()
        self._seen: dict[str, Any] | None = None  # the first failure, once it was looked at
        self._closed = threading.Event()
        self._woken, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self._thread = threading.Thread(target=self._watch, name="alarm", daemon=True)

    def __enter__(self) -> Alarm:
        for number in HEARD_SIGNALS:
            signal.signal(number, lambda number, frame: None)  # the byte on the socket is what counts
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        self._thread.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Reports an error and ends the process, without waiting for threads; otherwise ends watching."""
        if error is not None and not isinstance(error, KeyboardInterrupt | SystemExit):
            self._fail(error)
        self.close()

    def close(self) -> None:
        """Ends watching: others may now end before this rank."""
        self._closed.set()
        signal.set_wakeup_fd(-1)
        for number in HEARD_SIGNALS:
            signal.signal(number, signal.SIG_DFL)

    def _fail(self, error: BaseException) -> NoReturn:
        """Reports an error to all ranks, and prints it if it is the job's first."""
        mended = isinstance(error, UserError)
        message = str(error) if mended else f"{type(error).__name__}: {error}"
        if self._is_first(message):
            if not mended:
                traceback.print_exception(error, file=sys.stderr)
            who = f"rank {self._rank} on host {self._host}: " if self._store is not None else ""
            print(f"error: {who}{message}", file=sys.stderr, flush=True)
        self._leave(EXIT_USER_ERROR if mended else EXIT_FAILED)

    def _is_first(self, message: str) -> bool:
        """Notes a failure in the store, unless another rank's is there already."""
        if self._store is None:
            return True
        failure = json.dumps({"rank": self._rank, "host": self._host, "message": message})
        try:
            return self._store.compare_set("failed", "", failure).decode() == failure
        except Exception:  # the store's host may be what failed
            return self._seen is None

    def _leave(self, code: int) -> NoReturn:
        """Ends this process, once the others have heard what it reported."""
        if self._store is not None:
            time.sleep(HEARD)
        _end(code)

    def _watch(self) -> None:
        looked = time.monotonic()
        while not self._closed.is_set():
            readable, _, _ = select.select([self._woken], [], [], SECONDS_BETWEEN_LOOKS)
            signals = self._woken.recv(64) if readable else b""
            # If the launcher is killed while the ranks stop, they still finish.
            if os.getppid() != self._launcher and not self.stop.is_asked:
                self._end_at_once("ends, as its launcher is gone", EXIT_STOPPED)
            for number in signals:
                if number in HEARD_SIGNALS:
                    self._hear(signal.Signals(number))
            try:
                self.stop.look()
                if self._store is not None and self._store.check(["failed"]):
                    self._seen = json.loads(self._store.get("failed"))
                looked = time.monotonic()
            except RuntimeError:  # torch's of a store, which the next look may find again
                if time.monotonic() - looked > LOST and not self._closed.is_set():
                    self._end_at_once(
                        f"ends, as rank 0's host has not answered for {LOST:.0f} s", EXIT_FAILED
                    )
            except Exception as error:  # a defect of ours
                self._fail(error)
            if self.stop.last == 0 and self.stop.status:  # nothing was begun: there is nothing to save
                self._leave(self.stop.status)
            if self._seen is not None:
                self._follow(self._seen)

    def _hear(self, heard: signal.Signals) -> None:
        """SIGUSR1 is a scheduler's warning that time is up (`sbatch --signal`); the job then starts again."""
        again = self._asked is not None and time.monotonic() - self._asked > ONE_REQUEST
        if heard == signal.SIGINT or again:
            self._end_at_once(f"was told to stop at once ({heard.name})", 128 + heard)
        if self._asked is None:
            self._asked = time.monotonic()
            # The launcher passes Ctrl-C on as SIGTERM.
            name = "Ctrl-C or SIGTERM" if heard == signal.SIGTERM else heard.name
            self.stop.ask(name, EXIT_AGAIN if heard == signal.SIGUSR1 else 128 + heard)

    def _follow(self, failure: dict[str, Any]) -> None:
        if self._closed.wait(GRACE):
            return
        first = self._rank % int(os.environ.get("LOCAL_WORLD_SIZE", "1")) == 0  # LOCAL_RANK may be virtual
        if failure["host"] != self._host and first:
            print(
                f"error: rank {failure['rank']} on host {failure['host']}: {failure['message']}\n"
                f"The ranks of host {self._host} end, too.",
                file=sys.stderr,
            )
        _end(EXIT_FAILED)

    def _end_at_once(self, what: str, code: int) -> None:
        self._is_first(what)
        self._leave(code)


def seconds_of(duration: str, setting: str = "wlb.stop_after") -> float:
    """`23:40:00` or, with days as in Slurm, `1-12:00:00` in seconds."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)", duration)
    if match is None:
        raise UserError(
            f'{setting}: "{duration}" is not a duration. Write hours:minutes:seconds, such as "23:40:00".'
        )
    days, hours, minutes, seconds = (int(group or 0) for group in match.groups())
    if not (total := ((days * 24 + hours) * 60 + minutes) * 60.0 + seconds):
        raise UserError(f"{setting}: it must be longer than 0.")
    return total


def _store(rank: int) -> Store:
    """The job's store, by a connection of its own; each restart has its own keys."""
    launcher_keeps_it = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        store = TCPStore(
            address,
            port,
            is_master=rank == 0 and not launcher_keeps_it,
            wait_for_workers=False,
            multi_tenant=True,  # torch's own rendezvous comes to the same server
            timeout=CONNECT,
        )
    except Exception as error:
        raise UserError(
            f"Rank {rank} on host {socket.gethostname()} cannot reach rank 0 at {address}:{port}: {error}"
        ) from error
    store.set_timeout(timedelta(seconds=10))
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if launcher_keeps_it else ""
    return PrefixStore(f"wlb_titan/{start}", store)


def _end(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
