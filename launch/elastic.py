"""The ranks of a host, under torch's elastic agent, which here ends politely and with one line:

- The first SIGTERM, SIGUSR1, SIGINT or SIGHUP is passed on to the ranks, which finish their step, save and
  end (`runtime/ends.py`). A second one ends them at once.
- Ranks are not started again after a user's mistake or when the run was asked to stop.
- Its exit status is that of the rank that failed first, or 128 plus the number of the signal it was sent.
- A host whose ranks have ended waits for the others, which may still need the store that it holds.

Torch's agent has only private members for this. `runtime/compat.py` lists them for its test, but is not
imported here: a launcher need not load torchtitan.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import config_from_args, parse_args

from wlb_titan.errors import EXIT_AGAIN, EXIT_USER_ERROR, ONE_REQUEST, UserError

POLITE = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
PATIENCE = 600  # seconds
REACHED = 30.0  # seconds in which a host reaches itself by its own name
LAST_WORDS = 10  # seconds in which ranks of other hosts hear of a failure and end
STOPPED = (EXIT_AGAIN, 128 + signal.SIGTERM)  # of a rank that was asked to stop
FINAL = (EXIT_USER_ERROR, *STOPPED)


def run(words: Sequence[str]) -> int:
    """Runs the ranks of this host to their end; returns the exit status."""
    logging.disable(logging.ERROR)  # torch's agent logs at length; how it ends is told below
    config, program, arguments = config_from_args(parse_args(list(words)))
    if config.rdzv_backend == "c10d" and config.max_nodes == 1:  # whatever this machine calls itself
        config = replace(config, rdzv_endpoint="localhost:0", local_addr="localhost")
    if config.max_restarts or config.min_nodes != config.max_nodes:
        # The store that agents share with ranks keeps what was written before a restart.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    heard = [number for number in POLITE if signal.getsignal(number) is not signal.SIG_IGN]  # as nohup has it
    agent, handlers = None, {}
    try:
        check_names(config)
        agent = Agent(config, str(program), arguments)
        handlers = {number: signal.signal(number, agent.hear) for number in heard}
        result = agent.run()
        status = agent.status_of(result)
        with contextlib.suppress(SignalException):  # too late to stop anything
            agent.await_others(result)
        return status
    except SignalException as end:
        number = (agent and agent.asked) or end.sigval
        print(f"The job was ended by {signal.Signals(number).name}.", file=sys.stderr)
        return 128 + number
    except RendezvousError as error:
        print(f"The hosts of the job have lost each other: {error}", file=sys.stderr)
        return 1
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if agent:
            agent.leave()


def check_host(name: str | None, port: int | None = None) -> None:
    """Refuses a name that cannot be looked up here, or does not lead to a port. Torch would wait for it for
    five minutes, deaf to signals."""
    try:
        if port is None:
            socket.getaddrinfo(name, None)
        else:
            socket.create_connection((name, port), REACHED).close()
    except OSError as error:
        raise UserError(
            f"{socket.gethostname()} does not reach {name}, the name by which the processes of the job meet: "
            f"{error.strerror or error}. Write the name into /etc/hosts, or give the agent of that host an "
            "address that all hosts reach: --local-addr ADDRESS."
        ) from error


def check_names(config: LaunchConfig) -> None:
    """Refuses names of the host where all meet, and of this one, that do not lead there."""
    check_host(parse_rendezvous_endpoint(config.rdzv_endpoint, default_port=0)[0])
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    with socket.create_server(("", 0), family=family, dualstack_ipv6=dual) as server:
        check_host(config.local_addr or socket.getfqdn(), server.getsockname()[1])


class Agent(LocalElasticAgent):
    """Torch's agent of a host; `asked` is the first signal that asked it to end."""

    def __init__(self, config: LaunchConfig, program: str, arguments: Sequence[str]) -> None:
        # torch handles only those signals that are not heard here.
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
        same = {name: getattr(config, name) for name in ("run_id", "min_nodes", "max_nodes", "local_addr")}
        same |= {"backend": config.rdzv_backend, "endpoint": config.rdzv_endpoint}
        parameters = RendezvousParameters(**same, **config.rdzv_configs)
        of_both = {f.name for f in fields(WorkerSpec)} & {f.name for f in fields(LaunchConfig)}
        spec = WorkerSpec(
            local_world_size=config.nproc_per_node,
            entrypoint=program,
            args=tuple(arguments),
            rdzv_handler=get_rendezvous_handler(parameters),
            **{name: getattr(config, name) for name in of_both},
        )
        super().__init__(
            spec,
            config.logs_specs,
            start_method=config.start_method,
            log_line_prefix_template=config.log_line_prefix_template,
            shutdown_timeout=config.shutdown_timeout,
        )
        self.asked: int | None = None
        self._asked_at = 0.0

    def hear(self, number: int, frame: FrameType | None) -> None:
        """Handles signals: the first asks the ranks to end, the second ends them at once."""
        again = self.asked is not None and (
            number == signal.SIGINT or time.monotonic() - self._asked_at > ONE_REQUEST
        )
        running = [process for process in self._ranks() if process.poll() is None]
        if again or not running:
            raise SignalException("the ranks are to end", sigval=signal.SIGINT)
        if self.asked is None:
            self.asked, self._asked_at = number, time.monotonic()
            for process in running:
                process.send_signal(signal.SIGUSR1 if number == signal.SIGUSR1 else signal.SIGTERM)

    def status_of(self, result: RunResult | None) -> int:
        """The exit status of a run; prints a failure. The result is None if other hosts ended the run."""
        if result is None or not result.is_failed():
            return 0
        rank, first = min(result.failures.items(), key=lambda failure: failure[1].timestamp)
        if self.asked is not None and (first.exitcode in STOPPED or first.exitcode < 0):
            return EXIT_AGAIN if self.asked == signal.SIGUSR1 else 128 + self.asked
        if first.exitcode in STOPPED:  # another host was asked
            return first.exitcode
        how = f"exit code {first.exitcode}"
        if first.exitcode < 0:
            how = f"killed by {signal.Signals(-first.exitcode).name}"
        if first.exitcode == -signal.SIGBUS:
            how += ", as when a corpus is cut or overwritten while it is read, or /dev/shm is full"
        print(f"The job failed: rank {rank} ({how}).", file=sys.stderr)
        return max(first.exitcode, 1)

    def await_others(self, result: RunResult | None) -> None:
        """Waits for the other hosts unless torch has; only briefly after a failure: a host may be lost."""
        if result is None or not result.is_failed():
            return
        if any(failure.exitcode not in STOPPED for failure in result.failures.values()):
            self._exit_barrier_timeout = LAST_WORDS
        self._exit_barrier()

    def leave(self) -> None:
        """Tells the other hosts that this one has ended."""
        self._worker_group.spec.rdzv_handler.shutdown()

    def _ranks(self) -> list[subprocess.Popen[Any]]:
        return [h.proc for h in self._pcontext.subprocess_handlers.values()] if self._pcontext else []

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        check_host(worker_group.master_addr)
        return super()._start_workers(worker_group)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        # They are stopped because a host has come; they finish their step and save.
        self._shutdown(timeout=PATIENCE)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        codes = [process.poll() for process in self._ranks()]
        ended = [code for code in codes if code is not None]
        if None in codes and ended and all(code in (0, *STOPPED) for code in ended):
            return RunResult(state=WorkerState.HEALTHY)  # the others are about to end
        if any(ended):
            for process in self._ranks():
                process.send_signal(signal.SIGINT)  # at once: their SIGTERM would ask for another step
            if self.asked is not None or any(code in FINAL for code in ended):
                self._remaining_restarts = 0
        return super()._monitor_workers(worker_group)
