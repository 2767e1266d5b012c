"""What `wlb.train` needs of TorchX, and gives it."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torchx.specs as specs
from torchx.schedulers.local_scheduler import SignalException
from wlb_titan.launch.job import AGENT, Hosts, hosts_of

from wlb_titan.errors import EXIT_USER_ERROR, UserError

HERE = "."  # the image that means this machine's files and this interpreter


def hosts(image: str, config: str, overrides: Sequence[str], **sizes: Any) -> Hosts:
    """The hosts of a job, as of `hosts_of`, which a local scheduler then ends cleanly. A mistake of the user
    ends the process with its message; TorchX would print a traceback."""
    # Only local schedulers handle signals by now.
    runs_here = signal.getsignal(signal.SIGINT) not in (signal.default_int_handler, signal.SIG_IGN)
    try:
        # TorchX's default. It has imported the scheduler that it takes.
        if image == HERE and "torchx.schedulers.docker_scheduler" in sys.modules:
            raise UserError(
                "TorchX uses Docker in a folder without .torchxconfig, and --image names no image. On this "
                "machine `wlb-titan train FILE` trains, and `torchx run -s local_cwd` runs any component."
            )
        is_here = image == HERE
        places = {"is_here": is_here, "runs_here": runs_here, "waits": is_here and not runs_here}
        found = hosts_of(config, overrides, **places, **sizes)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(EXIT_USER_ERROR) from None
    if runs_here:  # another job outlives this process
        end_cleanly()
    return found


def with_our_agent(app: specs.AppDef, image: str, words: list[str]) -> specs.AppDef:
    """TorchX's distributed job with our agent in torchrun's place, and `words` before torchrun's."""
    # This interpreter, whose `bin` may not be on PATH, or an image's command.
    program = [sys.executable, "-m", AGENT] if image == HERE else ["wlb-agent"]
    agent = shlex.join([*program, *words])
    for role in app.roles:
        role.args = [argument.replace("torchrun ", f"{agent} ", 1) for argument in role.args]
    return app


def end_cleanly() -> None:
    """Has TorchX end a local job on SIGHUP, as on Ctrl-C and SIGTERM, and say so in a line."""
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
        signal.signal(signal.SIGHUP, signal.getsignal(signal.SIGTERM))
    sys.excepthook = _shown


def _shown(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not isinstance(error, SignalException):
        sys.__excepthook__(kind, error, trace)
        return
    name = "Ctrl-C" if error.sigval == signal.SIGINT else error.sigval.name
    print(f"\nStopped by {name}; the job has ended.", file=sys.stderr)
    raise SystemExit(128 + error.sigval)
