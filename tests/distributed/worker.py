"""Runs several experiments one after the other in the same processes.

Importing torch and torchtitan takes far longer than a tiny experiment, so tests that compare many layouts
share the processes. Started by torchrun: `worker.py JOBS.json`, a list of [TOML file, overrides, free port].

Each experiment meets at a port of its own: the launcher's store still holds the keys of the one before.
"""

import json
import os
import sys

from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from wlb_titan.runtime.train import train

if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        jobs = json.load(file)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    for path, overrides, port in jobs:
        os.environ["MASTER_PORT"] = str(port)
        # DTensor remembers the meshes of the layout before, which look equal but belong to dead groups.
        _clear_sharding_prop_cache()
        train(path, tuple(overrides), int(os.environ["RANK"]))
