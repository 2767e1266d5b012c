"""Equal work in verl, by its plug-in entry point: install this package, and verl uses it without a change.

verl deals sequences out twice: those of a global batch to data-parallel ranks, equally many to each
(`trainer.balance_batch`), and those of a rank to micro-batches of at most `max_token_len` tokens
(`use_dynamic_bsz`). Both functions are replaced by ones of the same contract.
"""

import numpy as np
import torch
from torch import distributed as dist
from verl.utils import seqlen_balancing, tensordict_utils
from verl.utils.device import get_device_name

from wlb_titan import balance
from wlb_titan.errors import PlanError


def get_seqlen_balanced_partitions(seqlen_list, k_partitions, equal_size):
    """The indices of `k_partitions` parts of nearly the same sum, in each as many if `equal_size`.

    `seqlen_list` has tokens, or already the work.
    """
    work = np.asarray(seqlen_list)
    ones = np.ones(len(work), dtype=np.int64)
    plan = balance(ones, ranks=k_partitions, micro_batches=1, cost=work, equal_counts=equal_size)
    return [own[0] for own in plan.micro_batches]


def rearrange_micro_batches(
    batch,
    max_token_len,
    dp_group=None,
    num_batches_divided_by=None,
    same_micro_num_in_dp=True,
    min_num_micro_batch=None,
    use_dynamic_bsz_balance=True,
    force_group_size=1,
):
    """The batch in the fewest micro-batches of at most `max_token_len` tokens, of equal work; their indices.

    Every rank of `dp_group` gets as many. All of them find together what is possible, and fail together.
    """
    ids = batch["input_ids"]
    lengths = ids.offsets().diff() if ids.is_nested else batch["attention_mask"].sum(dim=1)
    tokens, groups = lengths.cpu().numpy(), np.arange(len(lengths)) // force_group_size
    work = seqlen_balancing.calculate_workload(lengths.long()).cpu().numpy()
    synchronous = dp_group is not None and same_micro_num_in_dp and dist.is_initialized()

    def largest(*numbers):
        """Of all ranks."""
        found = torch.tensor(numbers, device=get_device_name())
        if synchronous:
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=dp_group)
        return found.tolist()

    def planned(count):
        limit = {"ranks": 1, "tokens_per_rank": int(max_token_len), "micro_batches": count}
        try:
            return balance(tokens, cost=work, groups=groups, **limit).micro_batches[0]
        except PlanError as error:
            return error

    fewest, most, step = planned("auto"), len(tokens) // force_group_size, num_batches_divided_by or 1
    count = most + 1 if isinstance(fewest, PlanError) else len(fewest)
    count, negative = largest(max(count, min_num_micro_batch or 1), -most)
    for number in range(-(-count // step) * step, -negative + 1, step):
        indices = planned(number)
        if largest(int(isinstance(indices, PlanError))) == [0]:
            break
    else:
        raise ValueError(
            f"Sequences do not fit into micro-batches of {max_token_len} tokens, as many on every rank, of "
            f"which one has {-negative} groups. {fewest if isinstance(fewest, PlanError) else ''}"
        )
    if use_dynamic_bsz_balance:  # heaviest first; light ones to both ends, where a pipeline fills and drains
        indices = indices[::2][::-1] + indices[1::2]
    return [tensordict_utils.index_select_tensor_dict(batch, own) for own in indices], indices


# verl has no registry for these. It loads plug-ins before its other modules take the functions by name.
seqlen_balancing.get_seqlen_balanced_partitions = get_seqlen_balanced_partitions
seqlen_balancing.rearrange_micro_batches = rearrange_micro_batches
