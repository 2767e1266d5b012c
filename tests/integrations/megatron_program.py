"""A step of Megatron's hybrid context parallelism, its own loader and schedule, on a CPU; prints JSON."""

import json
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.datasets.data_schedule import HybridCPDataLoaderWrapper
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import get_batch_on_this_hybrid_cp_rank
from torch.overrides import TorchFunctionMode
from wlb_megatron import EqualWorkScheduler

CONTEXT, LIMIT, SAMPLES = 2, 160, 40


class OnCpu(TorchFunctionMode):
    """Megatron's loader and schedule ask for "cuda", with .cuda() and as a device, whatever there is."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.cuda:
            return args[0]
        words = {key: value for key, value in (kwargs or {}).items() if key != "pin_memory"}
        return function(*args, **words | ({"device": "cpu"} if words.get("device") == "cuda" else {}))


class Counts(torch.nn.Embedding):
    """A model whose loss is the sum of weights of tokens: their gradient is how often each was trained."""

    def __init__(self, config):
        super().__init__(SAMPLES, 1)
        self.config, self.model_type = config, ModelType.encoder_or_decoder

    def set_input_tensor(self, _):
        pass


def step(scheduler, lengths):
    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 4, "context_parallel_size": CONTEXT}
    switches = {"hybrid_context_parallel": True, "calculate_per_token_loss": True}
    config = TransformerConfig(**sizes, **switches, max_seqlen_per_dp_cp_rank=LIMIT)
    share = np.array_split(np.arange(SAMPLES), parallel_state.get_data_parallel_world_size())
    ids = share[parallel_state.get_data_parallel_rank()]
    own = {"tokens": torch.tensor(np.repeat(ids, lengths[ids]))}
    own["cu_seqlens"] = torch.tensor(np.concatenate([[0], lengths[ids].cumsum()]))
    wrapper = HybridCPDataLoaderWrapper(iter([[own]]), config)
    wrapper.cp_balancing_scheduler = scheduler(LIMIT, wrapper.dp_cp_group)
    ran, model = [], Counts(config)

    def forward(iterator, model):
        sample = next(iterator)
        width = int(sample.pop("local_cp_size"))
        number, length = int(sample["tokens"][0]), len(sample["tokens"])
        batch, packed = get_batch_on_this_hybrid_cp_rank(sample, width)
        tokens = batch["tokens"]
        assert (tokens == number).all() and tokens.numel() == length // width
        if width > 1:  # the ranks meet, as they do in attention, over the same sample
            found = [torch.empty_like(tokens) for _ in range(width)]
            dist.all_gather(found, tokens, group=packed.cp_group)
            assert (torch.stack(found) == number).all()
        ran.append([number, width])
        return model(tokens).sum(), lambda loss: (loss, torch.tensor(tokens.numel()), {})

    sizes = {"num_microbatches": 1, "seq_length": LIMIT, "micro_batch_size": 1}
    how = {"forward_step_func": forward, "data_iterator": wrapper, "model": model}
    forward_backward_no_pipelining(**how, **sizes)
    dist.all_reduce(model.weight.grad)
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, ran)
    return {"ran": every, "trained": model.weight.grad[:, 0].tolist()}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(context_parallel_size=CONTEXT, hybrid_context_parallel=True)
    lengths = np.random.default_rng(0).lognormal(4.5, 1, SAMPLES).astype(int).clip(1, 1000) // 8 * 8 + 8
    with OnCpu(), mock.patch("torch.cuda.current_device", return_value="cpu"):
        found = {one.__name__: step(one, lengths) for one in (EqualWorkScheduler, BalancedCPScheduler)}
    if dist.get_rank() == 0:
        print(json.dumps(found | {"lengths": lengths.tolist()}))
    dist.destroy_process_group()
