"""A process that has torch and torchtitan imported, and forks the ranks of one job after the other.

Importing takes far longer than a tiny experiment, and ranks that outlive their job carry its process groups
and DTensor's caches into the next. Forked ranks start at once and clean.

Each line of standard input is a job, {"processes", "port", "log", "words"}, words being the arguments of
`wlb_titan.runtime.train`; the answer is one line, the exit code of the first rank that failed or 0. As under
torchrun, a rank that fails takes the others down.
"""

import json
import os
import signal
import sys

from wlb_titan.runtime.cpu_device import use_cpu_without_accelerator

use_cpu_without_accelerator()

import wlb_titan.runtime.registry  # noqa: E402, F401  what a rank will need
from wlb_titan.runtime.train import main as train  # noqa: E402


def run(job):
    """Forks the ranks of a job and waits for them."""
    ranks = [start(job, rank) for rank in range(job["processes"])]
    failure = 0
    while ranks:
        process, status = os.wait()
        ranks.remove(process)
        code = os.waitstatus_to_exitcode(status)
        if code != 0 and failure == 0:
            failure = code
            for other in ranks:
                os.kill(other, signal.SIGKILL)
    return failure


def start(job, rank):
    """The process number of a new rank; in the rank itself, this never returns."""
    process = os.fork()
    if process != 0:
        return process
    log = os.open(job["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(job["processes"]),
        "LOCAL_WORLD_SIZE": str(job["processes"]),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(job["port"]),
    }
    code = 1
    try:
        train(job["words"])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    for line in sys.stdin:
        print(run(json.loads(line)), file=answers)
