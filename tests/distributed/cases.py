"""What workers do that `lab.Cases` starts: cases one after the other in the same processes."""

import json
import os
import sys

import torch.distributed as dist


def run_cases(run):
    """Calls `run` with the name and the arguments of each case, and writes what it returns.

    Once a case is in the file, all ranks have come to its end: the first that is missing is the one in which
    a rank died.
    """
    with open(sys.argv[1]) as file:
        jobs = json.load(file)
    results, written = {}, jobs["results"]
    for name, case in jobs["cases"].items():
        results[name] = run(name=name, **case)
        dist.barrier()
        if dist.get_rank() == 0:
            with open(f"{written}.new", "w") as file:
                json.dump(results, file)
            os.replace(f"{written}.new", written)
