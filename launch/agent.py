"""torchrun, with one line where torchrun ends in a traceback, and with an end when what started it has ended.

TorchX starts it on each host in torchrun's place, with torchrun's arguments.
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
    # A lost connection is told in a line; torch would add the frames of its C++ on every rank.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import parse_args, run

    try:
        run(parse_args(sys.argv[1:]))
    except SignalException as stop:
        print(f"The job was stopped by {stop.sigval.name}.", file=sys.stderr)
        sys.exit(128 + stop.sigval)
    except ChildFailedError as error:
        first = min(error.failures.values(), key=lambda failure: failure.timestamp)
        how = f"exit code {first.exitcode}"
        if first.exitcode < 0:
            how = f"killed by {signal.Signals(-first.exitcode).name}"
        print(f"The job failed: rank {error.get_first_failure()[0]} ({how}).", file=sys.stderr)
        sys.exit(max(first.exitcode, 1))
    except RendezvousError as error:
        print(f"The hosts of the job have lost each other: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def watch_parent() -> None:
    """Has this process told to stop (SIGTERM) when the one that started it is gone, however that died."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(SECONDS_BETWEEN_LOOKS)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="parent", daemon=True).start()


if __name__ == "__main__":
    main()
