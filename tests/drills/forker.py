"""A process that has torch and torchtitan imported, and forks the ranks of one drill after the other.

Each line of standard input is a job: {"port", "ranks": [{"words", "log", "largest_file"}]}. The answers are
two lines: the process numbers of the ranks, at once; their exit codes and the seconds that each has run, at
the end. Nothing ends a rank but itself, or who drills it.
"""

import json
import os
import resource
import signal
import sys
import time

from wlb_titan.runtime.cpu_device import use_cpu_without_accelerator

use_cpu_without_accelerator()

import wlb_titan.runtime.registry  # noqa: E402  what a rank will need
import wlb_titan.runtime.validation  # noqa: E402, F401
from wlb_titan.runtime.train import main as train  # noqa: E402


def fork(job, number):
    """The process number of a new rank; in the rank itself, this never returns."""
    process = os.fork()
    if process != 0:
        return process
    rank = job["ranks"][number]
    log = os.open(rank["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if rank["largest_file"]:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a larger file is then an OSError, as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (rank["largest_file"], resource.RLIM_INFINITY))
    os.environ |= {
        "RANK": str(number),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(len(job["ranks"])),
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(job["port"]),
    }
    code = 1
    try:
        train(rank["words"])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run(job, answers):
    begin = time.monotonic()
    ranks = [fork(job, number) for number in range(len(job["ranks"]))]
    print(json.dumps(ranks), file=answers, flush=True)
    ends = {}
    while len(ends) < len(ranks):
        process, status = os.wait()
        ends[process] = [os.waitstatus_to_exitcode(status), time.monotonic() - begin]
    print(json.dumps([ends[rank] for rank in ranks]), file=answers, flush=True)


if __name__ == "__main__":
    stream = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        run(json.loads(line), stream)
