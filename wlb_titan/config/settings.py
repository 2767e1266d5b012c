"""Our own part of the configuration: the TOML sections [wlb], [wlb.corpus], [wlb.attention], [wlb.packing],
[wlb.context], [wlb.pipeline]."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Interval, MinLen

from wlb_titan.context.strategy import STRATEGIES, ContextStrategy
from wlb_titan.dimensions.dimension import Dimension
from wlb_titan.packing import POLICIES, PackingPolicy
from wlb_titan.pipeline.order import ORDERS, MicroBatchOrder


@dataclass(kw_only=True, slots=True)
class SourceSettings:
    """[[wlb.corpus.sources]]: a corpus of a mixture."""

    path: Annotated[str, MinLen(1)]
    """Path of the corpus, in any of the forms of wlb.corpus.path."""

    name: str = ""
    """Name in reports and metrics; empty takes the last part of the path."""

    weight: Annotated[float, Gt(0)] = 1.0
    """Share of the tokens, over the sum of all weights. A source that is used up starts again."""

    column: Annotated[str, MinLen(1)] = "input_ids"
    """The column with the token ids, in a Hugging Face dataset."""

    mask: Annotated[str, MinLen(1)] = "auto"
    """Which tokens are learned, as in wlb.corpus.mask."""

    long_length: Annotated[int, Ge(1)] | None = None
    """Documents of at least this many tokens are long; "none" makes no difference between documents."""

    long_share: Annotated[float, Interval(gt=0, lt=1)] | None = None
    """Share of this source's tokens that come from its long documents, between 0 and 1, as recipes for long
    context set it. Where there are too few long documents, they repeat sooner than the others."""


@dataclass(kw_only=True, slots=True)
class CorpusSettings:
    """[wlb.corpus]: the documents to train on."""

    path: Annotated[str, MinLen(1)] = "outputs/corpus"
    """A corpus that `wlb-titan prepare` made, or another tool's unchanged: Megatron's .bin and .idx (without
    the ending, or a folder of them), datatrove's .ds files (a folder, or one), a folder of `save_to_disk`.
    """

    tokenizer: str = ""
    """Folder of the tokenizer that made the token ids; a prepared corpus includes its own."""

    column: Annotated[str, MinLen(1)] = "input_ids"
    """The column with the token ids, in a Hugging Face dataset."""

    mask: Annotated[str, MinLen(1)] = "auto"
    """Which tokens are learned. `auto`: those of the corpus' own mask (of prepared chat data, a dataset's
    column `labels`, `loss_mask`, `assistant_masks` or `completion_mask`, datatrove's .ds.loss), or all tokens
    if it has none. A name: that column of a dataset; for Megatron, the prefix of a second pair of files, or a
    folder of them, with 0 or 1 for each token. `none`: all tokens, whatever masks exist."""

    seed: Annotated[int, Ge(0)] = 0
    """Seed of the order in which an epoch visits the documents; each epoch has an order of its own."""

    sources: list[SourceSettings] = field(default_factory=list)
    """Several corpora, mixed; `path`, `column` and `mask` are then not used."""


@dataclass(kw_only=True, slots=True)
class ValidationSettings:
    """[wlb.validation]: documents that the model is validated on; without both first keys, none."""

    hold_out: Annotated[float, Interval(ge=0, lt=1)] = 0.0
    """Share of the job's own documents that is held out of training for validation, chosen by their places in
    the corpus."""

    path: str = ""
    """A separate corpus for validation, in any of the forms of wlb.corpus.path; nothing is held out then."""

    mask: Annotated[str, MinLen(1)] = "auto"
    """Which tokens of that corpus count, as in wlb.corpus.mask."""

    every: Annotated[int, Ge(0)] = 100
    """Steps from one validation to the next, besides those after the first and the last step. 0: never,
    though documents stay held out."""

    def __post_init__(self) -> None:
        if self.path and self.hold_out:
            raise ValueError(
                "path names the documents to validate on, so none are held out; leave hold_out out."
            )

    @property
    def enabled(self) -> bool:
        return self.every > 0 and bool(self.hold_out or self.path)


@dataclass(kw_only=True, slots=True)
class AttentionSettings:
    """[wlb.attention]: what computes the attention of every layer."""

    implementation: str = "auto"
    """`auto`: the fastest measured on a GPU like the one at hand; the run logs which. `reference`: plain
    PyTorch, on any device. `torch`: torch's FlashAttention, NVIDIA GPUs and CPUs. `torch_cpu`: the one
    of CPUs. `triton`: GPUs of compute capability 8.0 or later. `gluon`: Hopper, head dims 64 and 128. `fa4`:
    FlashAttention-4 on Hopper and Blackwell, by `pip install 'wlb-titan[fa4]'`."""

    sm_margin: Annotated[int, Interval(ge=0, le=64)] = 0
    """Multiprocessors that Gluon's kernels leave to NCCL, whose collectives otherwise wait for a kernel's end
    and overlap with nothing. NCCL's channels take 8 to 16. Predicted times include it."""


@dataclass(kw_only=True, slots=True)
class BenchSettings:
    """[wlb.bench]: policies in turns, in place of training. `wlb-titan bench` sets it."""

    policies: str = ""
    """Policies that take turns, as in wlb.policy, separated by commas; the first is the baseline."""

    rounds: Annotated[int, Ge(2)] = 8
    """Steps of each policy, after a first one that does not count."""


@dataclass(kw_only=True, slots=True)
class WlbSettings:
    """[wlb]: everything that wlb_titan adds to torchtitan's configuration."""

    device: Literal["auto", "cpu"] = "auto"
    """`auto`: the accelerator that torch finds, or else the CPU. `cpu`: the CPU even where there is one."""

    cluster: str = ""
    """The hardware that work, time and memory are predicted for: a shipped cluster (listed by `wlb-titan
    simulate --help`), or a TOML file like theirs. Empty: the device at hand. Name a cluster to plan and
    predict for other hardware."""

    trace_every: Annotated[int, Ge(0)] = 0
    """Steps from one timing of all ranks' passes to the next. A timed step writes a trace for ui.perfetto.dev
    to <dump_folder>/traces, and measured imbalance and bubble to the metrics. 0: never."""

    epochs: Annotated[int, Interval(ge=0, le=1000)] = 0
    """How many times to train on every document; this replaces `training.steps`. The last step is filled up
    from the next epoch. 0: `training.steps` says when to stop."""

    stop_after: str = ""
    """Wall time after which a run finishes its step, saves and ends with exit status 75, such as "23:40:00":
    hours:minutes:seconds since its ranks started. A restarted run counts from zero. Empty: never."""

    loss_weight: Literal["token", "conversation"] = "token"
    """`token`: the loss is the mean over the learned tokens of a step. `conversation`: documents weigh the
    same, however many learned tokens each has; the mean over documents of the mean over their tokens."""

    dimensions: list[Dimension.Config] = field(default_factory=list)
    """Dimensions of parallelism that torchtitan does not have, outermost first: a section
    [[wlb.dimensions]] each, with a `name`, its `degree` and its own keys."""

    corpus: CorpusSettings = field(default_factory=CorpusSettings)
    validation: ValidationSettings = field(default_factory=ValidationSettings)
    attention: AttentionSettings = field(default_factory=AttentionSettings)
    bench: BenchSettings = field(default_factory=BenchSettings)
    packing: PackingPolicy.Config = field(default_factory=lambda: POLICIES.configure("plain"))
    context: ContextStrategy.Config = field(default_factory=lambda: STRATEGIES.configure("per_sequence"))
    pipeline: MicroBatchOrder.Config = field(default_factory=lambda: ORDERS.configure("as_packed"))

    def __post_init__(self) -> None:
        if self.epochs and self.corpus.sources:
            raise ValueError(
                "the sources of a mixture end at different times, so a mixture has no epochs; set "
                "training.steps instead."
            )
