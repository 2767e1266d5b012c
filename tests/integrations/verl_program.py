"""What a process of verl gets from the two functions that deal sequences out; prints JSON."""

import json
from itertools import chain

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict
from verl.plugin.platform import set_platform
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.utils import seqlen_balancing as verls

LIMIT, SEQUENCES = 16_384, 96


class Cpu(PlatformCUDA):
    """verl has no platform without a GPU."""

    device_name = "cpu"


def partitions(count, parts, equal):
    lengths = np.random.default_rng(count).lognormal(7, 1, count).astype(int).clip(1, 8000)
    work = verls.calculate_workload(torch.tensor(lengths))
    found = verls.get_seqlen_balanced_partitions(work.tolist(), parts, equal)
    sums = [float(work[part].sum()) for part in found]
    return {
        "once": sorted(chain(*found)) == list(range(count)),
        "sizes": sorted({len(part) for part in found}),
        "parts": len(found),
        "equal": equal,
        "imbalance": max(sums) / np.mean(sums),
    }


def micro_batches(limit=LIMIT, **words):
    """Of this rank; other sequences on every rank."""
    lengths = np.random.default_rng(5 + dist.get_rank()).lognormal(7, 1, SEQUENCES).astype(int).clip(1, 8000)
    mask = torch.arange(8192) < torch.tensor(lengths)[:, None]
    ids = torch.arange(SEQUENCES)[:, None].repeat(1, 2)
    batch = TensorDict({"input_ids": ids, "attention_mask": mask.long()}, [SEQUENCES])
    batches, indices = verls.rearrange_micro_batches(batch, limit, dist.group.WORLD, **words)
    counts = [None] * dist.get_world_size()
    dist.all_gather_object(counts, len(indices))
    group = words.get("force_group_size", 1)
    work = [float(verls.calculate_workload(torch.tensor(lengths[own])).sum()) for own in indices]
    return {
        "once": sorted(chain(*indices)) == list(range(SEQUENCES)),
        "content": [one["input_ids"][:, 0].tolist() for one in batches] == indices,
        "counts": counts,
        "least": -(-int(lengths.sum()) // limit),
        "most_tokens": max(int(lengths[own].sum()) for own in indices),
        "whole": all({i // group for i in own} == {i // group for i in own[::group]} for own in indices),
        "imbalance": max(work) / np.mean(work),
    }


if __name__ == "__main__":
    set_platform(Cpu())
    dist.init_process_group("gloo")
    asked = [{}, {"force_group_size": 2}, {"num_batches_divided_by": 4}, {"min_num_micro_batch": 14}]
    results = {
        "module": verls.rearrange_micro_batches.__module__,
        "partitions": [partitions(*one) for one in ((64, 8, True), (256, 8, True), (256, 8, False))],
        "micro_batches": [micro_batches(**words) | {"asked": words} for words in asked],
    }
    try:  # one rank cannot, and none waits for it
        micro_batches(limit=LIMIT if dist.get_rank() else 8192, force_group_size=SEQUENCES // 2)
    except ValueError as error:
        results["refused"] = str(error)
    if dist.get_rank() == 0:
        print(json.dumps(results))
    dist.destroy_process_group()
