"""Micro-batches made of random tokens, and what one plain process makes of them."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from oracle import packed
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.distributed.utils import get_spmd_backend, set_spmd_backend

from wlb_titan.runtime.attention.module import DocumentMask

VOCABULARY = 256


@dataclass(frozen=True)
class Sequence:
    """A packed sequence, int64 (L,) each, its documents' lengths, and what one of its labels counts."""

    tokens: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    lengths: np.ndarray
    weight: float = 1


def make_micro_batch(seed, length):
    """A packed sequence of `length` tokens: three documents, random tokens, padding of up to 7."""
    random = np.random.default_rng(seed)
    padding = int(random.integers(8))
    cuts = np.sort(random.choice(np.arange(1, length - padding), size=2, replace=False))
    lengths = np.diff([0, *cuts, length - padding])
    positions = np.concatenate([*(np.arange(n) for n in lengths), np.zeros(padding, dtype=np.int64)])
    labels = random.integers(VOCABULARY, size=length)
    labels[length - padding :] = IGNORE_INDEX
    return Sequence(random.integers(VOCABULARY, size=length), labels, positions, lengths)


def step_data(step, lengths, data_parallel):
    """Per data-parallel rank the micro-batches of a step; rank r has the lengths in an order shifted by r."""
    orders = [enumerate(lengths[rank:] + lengths[:rank]) for rank in range(data_parallel)]
    return [[make_micro_batch((step, rank, i), n) for i, n in own] for rank, own in enumerate(orders)]


def valid_tokens(data):
    return torch.tensor(sum(s.weight * int((s.labels != IGNORE_INDEX).sum()) for rank in data for s in rank))


@contextmanager
def without_meshes():
    """Models run in this process as torchtitan's own tests run them."""
    before = get_spmd_backend()
    set_spmd_backend("default")
    yield
    set_spmd_backend(before)


class Reference:
    """The same model in one process: plain tensors, one micro-batch after the other."""

    def __init__(self, config, weights):
        self.model = config.model_spec.model.build()
        self.model.init_weights(buffer_device=torch.device("cpu"))
        if config.model_spec.name == "gpt_oss":  # whose experts compute in bfloat16 and hand it on
            for parameter in self.model.parameters():
                parameter.data = parameter.bfloat16()
        missing, unexpected = self.model.load_state_dict(weights, strict=False)
        assert not unexpected, unexpected
        assert not set(missing) & {name for name, _ in self.model.named_parameters()}, missing

    def step(self, data, backward=True):
        """The loss of all micro-batches, a number, and the gradients by name."""
        self.model.zero_grad()
        total, count = 0.0, valid_tokens(data)
        for s in (sequence for rank in data for sequence in rank):
            mask = DocumentMask(packed(s.lengths))
            tokens, labels, positions = (torch.from_numpy(x) for x in (s.tokens, s.labels, s.positions))
            with torch.set_grad_enabled(backward), without_meshes():
                logits = self.model(tokens[None], positions=positions[None], attention_masks=mask)
                loss = torch.nn.functional.cross_entropy(logits[0].float(), labels, reduction="sum")
            if backward:
                (s.weight * loss / count).backward()
            total += s.weight * loss.item()
        gradients = {name: p.grad for name, p in self.model.named_parameters() if p.requires_grad}
        return total / float(count), gradients


def differences(mine, reference):
    """Largest error of any gradient, relative to that gradient's largest element, and whose it is."""
    assert mine.keys() == reference.keys(), mine.keys() ^ reference.keys()
    errors = {}
    for name, gradient in reference.items():
        assert gradient.abs().max() > 0, f"{name} has no gradient that could be compared"
        errors[name] = float((mine[name] - gradient).abs().max() / gradient.abs().max())
    worst = max(errors, key=errors.__getitem__)
    return errors[worst], worst
