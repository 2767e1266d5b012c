"""Supervised fine-tuning by TRL, with micro-batches of equal work on all processes.

    torchrun --nproc-per-node 2 examples/trl/train.py

`BalancedSFTTrainer` is what you take along. The rest trains a tiny model on made-up token ids, once with the
examples of each step dealt out in order and once balanced, and prints both: no download, no GPU.
"""

import json

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from wlb_titan import BalancedBatchSampler, causal


class BalancedSFTTrainer(SFTTrainer):
    """An `SFTTrainer` whose processes get micro-batches of equal work; a step has as many examples as ever.

    It needs `SFTConfig(padding_free=True)`: an example attends to itself alone, and nothing is padded.
    """

    sampler_class = BalancedBatchSampler

    def get_train_dataloader(self):
        args, ranks = self.args, self.accelerator.num_processes
        sampler = self.sampler_class(
            [len(tokens) for tokens in self.train_dataset["input_ids"]],
            ranks=ranks,
            micro_batches=args.gradient_accumulation_steps,
            sequences=args.per_device_train_batch_size * args.gradient_accumulation_steps * ranks,
            cost=causal(self.model.config.hidden_size),
            seed=args.seed,
        )
        loader = DataLoader(
            self._remove_unused_columns(self.train_dataset, description="training"),
            batch_sampler=sampler,
            collate_fn=self.data_collator,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
        )
        return self.accelerator.prepare(loader)


class InOrder(BalancedBatchSampler):
    """The same steps, in micro-batches of equally many examples."""

    def __iter__(self):
        balanced, size = list(super().__iter__()), self.ranks * self.micro_batches
        for first in range(0, len(balanced), size):
            step = np.sort(np.concatenate(balanced[first : first + size]))
            yield from (part.tolist() for part in np.array_split(step, size))


class Watched(BalancedSFTTrainer):
    """Keeps the lengths of the examples of each micro-batch that it trains."""

    def training_step(self, model, inputs, *args, **kwargs):
        self.trained = [*getattr(self, "trained", []), inputs["cu_seq_lens_q"].diff().tolist()]
        return super().training_step(model, inputs, *args, **kwargs)


def train(sampler_class: type[BalancedBatchSampler]) -> dict:
    rng, hidden, vocabulary = np.random.default_rng(0), 64, 512
    lengths = rng.lognormal(4, 1, 128).astype(int).clip(2, 1000)
    rows = [rng.integers(3, vocabulary, length).tolist() for length in lengths]
    words = models.WordLevel({str(token): token for token in range(vocabulary)}, unk_token="0")
    torch.manual_seed(0)
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    trainer = Watched(
        LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, hidden_size=hidden, **shape)),
        args=SFTConfig(
            output_dir="outputs/trl",
            padding_free=True,
            max_length=None,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            num_train_epochs=2,
            learning_rate=1e-3,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            use_cpu=not torch.cuda.is_available(),
            bf16=torch.cuda.is_available(),
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"input_ids": rows}),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(words), eos_token="1", pad_token="2"
        ),
    )
    trainer.sampler_class = sampler_class
    trainer.train()
    of_ranks = [None] * trainer.accelerator.num_processes
    torch.distributed.all_gather_object(of_ranks, trainer.trained)
    work = np.array([[causal(hidden)(np.array(batch)).sum() for batch in own] for own in of_ranks])
    return {
        "losses": [line["loss"] for line in trainer.state.log_history if "loss" in line],
        "imbalance": float(work.max(axis=0).sum() / work.mean(axis=0).sum()),
        "trained": sorted(length for own in of_ranks for batch in own for length in batch),
        "lengths": sorted(lengths.tolist()),
    }


if __name__ == "__main__":
    results = {one.__name__: train(one) for one in (InOrder, BalancedBatchSampler)}
    if torch.distributed.get_rank() == 0:
        print(json.dumps(results))
    torch.distributed.destroy_process_group()
