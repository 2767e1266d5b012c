"""A process that has torch and torchtitan imported, and forks the ranks of jobs.

Importing takes far longer than a tiny experiment, and ranks that outlive their job carry its process groups
and DTensor's caches into the next. Where something has asked CUDA for its devices before, which a fork does
not survive, ranks are new processes after all.

Each line of standard input is a job, as `forking.ForkServer.start` writes it; jobs run side by side, each
with a launcher as its ranks' parent. Each line of standard output is news of one: {"job", "processes"} with
the process numbers of its ranks, and {"job", "rank", "code"} as each rank ends.
"""

import faulthandler
import gc
import importlib
import json
import os
import resource
import signal
import sys

import torch

from wlb_titan.runtime.cpu_device import use_cpu_without_accelerator

use_cpu_without_accelerator()

# What a rank will need.
import bases  # noqa: E402, F401


def launch(job, news):
    """Starts the ranks of a job, and waits for them."""
    ranks = {fork(job, number): number for number in range(len(job["ranks"]))}
    tell(news, job=job["number"], processes=list(ranks))
    while ranks:
        process, status = os.wait()
        rank, code = ranks.pop(process), os.waitstatus_to_exitcode(status)
        tell(news, job=job["number"], rank=rank, code=code)
        if code != 0 and job["together"]:
            for other in ranks:
                os.kill(other, signal.SIGKILL)


def tell(news, **what):
    os.write(news, (json.dumps(what) + "\n").encode())  # at once, or launchers' lines would mix


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
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": str(len(job["ranks"])),
        "LOCAL_WORLD_SIZE": str(len(job["ranks"])),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(job["port"]),
        **job["environment"],
    }
    if job["fresh"] or torch.cuda._is_in_bad_fork():
        os.execv(sys.executable, [sys.executable, "-m", job["program"], *rank["words"]])
    sys.argv = [job["program"], *rank["words"]]
    code = 1
    try:
        importlib.import_module(job["program"]).main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main():
    faulthandler.enable()
    news = os.dup(1)
    gc.freeze()  # so that a rank's collector does not touch, and with it copy, what it shares with all others
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # launchers are waited for by nobody
    for line in sys.stdin:
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            launch(json.loads(line), news)
            os._exit(0)


if __name__ == "__main__":
    main()
