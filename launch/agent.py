"""The launcher of a host's ranks, by torchrun's arguments: `wlb-agent`, or `python -m` this module.

It ends as by SIGTERM when the process that started it is gone.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

SECONDS_BETWEEN_LOOKS = 1.0


def main() -> None:
    watch_parent()
    before_torch()
    from wlb_titan.launch.elastic import run

    sys.exit(run(sys.argv[1:]))


def before_torch() -> None:
    """Sets what torch reads when it is imported, here and in the ranks, unless it is set already."""
    # A lost connection takes a line; torch would add C++ frames on every rank.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def watch_parent() -> None:
    """Sends this process SIGTERM when the one that started it is gone, however that died."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(SECONDS_BETWEEN_LOOKS)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="parent", daemon=True).start()


if __name__ == "__main__":
    main()
