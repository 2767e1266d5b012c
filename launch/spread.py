"""`python -m wlb_titan.launch.spread`: the degrees of parallelism at which `make train-gpu` trains on this
machine's GPUs, as words for the command line."""

from __future__ import annotations

import sys

from wlb_titan.errors import UserError

DEGREES = {
    1: {},
    2: {"context_parallel": 2},
    4: {"pipeline_parallel": 2, "context_parallel": 2},
    8: {"pipeline_parallel": 2, "context_parallel": 2, "data_parallel_shard": 2},
}
"""Over how many GPUs the demonstration can be spread."""


def spread(gpus: int) -> list[str]:
    """Overrides that spread a job over as many of `gpus` GPUs as it can take.

    Raises:
        UserError: there are none.
    """
    if gpus == 0:
        raise UserError("torch finds no GPU on this machine. `make train` trains on its CPU.")
    degrees = DEGREES[max(number for number in DEGREES if number <= gpus)]
    return [
        word for name, degree in degrees.items() for word in (f"--parallelism.{name}_degree", str(degree))
    ]


if __name__ == "__main__":
    import torch

    try:
        print(*spread(torch.cuda.device_count()))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
