"""How much memory each pipeline rank needs at the peak of a step: whether a job fits, before it runs.

    total = weights + optimizer + rotary + gradients + gathered + activations + cache + backward + loss

A rank runs its passes in a fixed order, so its memory can be followed from pass to pass:

- weights, optimizer   this GPU's shards of them, always there; the optimizer's state from its first step on
- rotary               every layer's table of rotary factors for the whole context window
- gathered             what FSDP has whole. Under pipeline parallelism weights stay gathered in the compute
                       type, and gradients add up in the reduction's type from a stage's first backward pass
                       on; without it, the weights of two layers and of the ends of the model, and the
                       gradients of one layer. One weight's gradient before it is added, and the head's while
                       they are reduced, which the chunked loss does at every micro-batch
- gradients            shards, once gradients were reduced before: by an earlier run through the pipeline or,
                       without one, an earlier micro-batch
- activations          a forward pass adds what its micro-batch keeps in each layer and its stage's output, a
                       backward pass frees them. Micro-batches differ in length, so it is not their number
                       that counts but the largest sum of those in flight together. The last stage has its
                       output gathered over the tensor-parallel ranks, and keeps the inputs of micro-batches
                       that are done, and their gradients, until the step is over, because it keeps their
                       losses. Where the gradients of weights wait (zero bubble), what a layer keeps waits
                       with them, and the gradients of its linear layers' and norms' outputs. Token ids,
                       positions and labels are there throughout
                       Where backward passes have packs of their own (asymmetric partition) forward passes
                       keep the inputs of layers, of the first stage's first not, and of the head
- cache                K and V of documents in slices, from the first slice's forward pass to its backward
                       pass, and their gradients, in float32, from the backward pass of the last slice on,
                       which makes them layer by layer while it frees its activations
- backward             of the layer at hand: what a backward pass recomputes, its gradients, K and V; or what
                       a forward pass makes and does not keep
- loss                 logits of one chunk and what the softmax needs; the gradient of the whole hidden state
                       in float32, and its copy in the compute type

`layer.py` has the bytes of a layer and of the loss. The peak is that of the fullest pass. Not counted:
the allocator's fragmentation, CUDA's and NCCL's own memory; `USABLE` leaves room for them.
`wlb-titan dryrun` compares all of this with a trace of the program itself (docs/dryrun.md).

Pure arithmetic on lengths and shapes; training, the simulator and `wlb-titan dryrun` use it, and the bound on
the length of micro-batches (L_max) where none is set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from wlb_titan.cost.degrees import Degrees
from wlb_titan.cost.models import ModelShape
from wlb_titan.errors import PlanError
from wlb_titan.memory.layer import TokenBytes
from wlb_titan.memory.settings import MemorySettings
from wlb_titan.memory.slices import SliceCache
from wlb_titan.pipeline.schedule import PipelineShape, rank_actions
from wlb_titan.plan import Action, CachedSlice, Flow

GIB = 2**30
USABLE = 0.9
"""Share of a device's memory that predictions may fill: the rest is for what they do not count."""

LONGEST = 2
"""Context windows that a micro-batch may have at most, where the user sets no bound: as in WLB-LLM."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """The peak of one pipeline rank, term by term as above, in bytes of one GPU.

    Attributes:
        rank: pipeline-parallel rank.
        parameters: weights of the rank's stages, of all tensor-parallel and FSDP ranks together.
        layers: of the rank's stages.
        tokens: of the micro-batches in flight at the peak, summed over the rank's stages.
    """

    rank: int
    weights: int
    optimizer: int
    rotary: int
    gradients: int
    gathered: int
    activations: int
    backward: int
    loss: int
    cache: int = 0
    parameters: int
    layers: int
    tokens: int

    @property
    def total(self) -> int:
        return sum(getattr(self, name) for name in TERMS)

    def explain(self) -> str:
        """One line a term that is not zero, largest first, and the facts they come from."""
        head = (
            f"pipeline rank {self.rank}: {self.total / GIB:.2f} GiB with {self.layers} layers of "
            f"{self.parameters:,} weights and {self.tokens:,} tokens in flight"
        )
        terms = sorted(((getattr(self, name), name) for name in TERMS), reverse=True)
        lines = [f"  {name.replace('_', ' '):14}{size / GIB:9.3f} GiB" for size, name in terms if size]
        return "\n".join([head, *lines])


TERMS = tuple(
    field.name for field in fields(RankMemory) if field.name not in ("rank", "parameters", "layers", "tokens")
)


class BackwardPacks(NamedTuple):
    """The micro-batches of backward passes, where these are others than those of forward passes.

    Attributes:
        lengths: tokens of each, padding included.
        slices: of each those whose keys and values are cached, in the order in which documents go backward.
    """

    lengths: Sequence[int]
    slices: Sequence[Sequence[CachedSlice]]


def layers_of_stages(layers: int, stages: int, *, first_less: int = 1, last_less: int = 1) -> tuple[int, ...]:
    """How torchtitan divides a model's layers over the stages of a pipeline.

    Embedding and head count as `first_less` and `last_less` layers; what does not divide goes to the first
    stages. Example: 32 layers on 4 stages are 8, 9, 8 and 7.

    Raises:
        PlanError: there are more stages than layers.
    """
    if stages == 1:
        return (layers,)
    each, more = divmod(layers + first_less + last_less, stages)
    result = [each + (stage < more) for stage in range(stages)]
    result[0] -= first_less
    result[-1] -= last_less
    if min(result) < 0 or each < 1:
        raise PlanError(f"{layers} layers cannot be divided into {stages} pipeline stages; use fewer stages.")
    return tuple(result)


def pipeline_memory(
    model: ModelShape,
    degrees: Degrees,
    lengths: Sequence[int],
    *,
    schedule: str = "1F1B",
    chunks: int = 1,
    run: int | None = None,
    settings: MemorySettings | None = None,
    layers: Sequence[int] | None = None,
    flow: Flow | None = None,
    slices: Sequence[Sequence[CachedSlice]] | None = None,
    backward: BackwardPacks | None = None,
    sharers: Sequence[int] | None = None,
    tokens: Mapping[int, TokenBytes] | None = None,
) -> tuple[RankMemory, ...]:
    """The peak memory of every pipeline rank over one step.

    Args:
        model: its shape.
        degrees: of parallelism.
        lengths: tokens of one data-parallel rank's micro-batches, padding included, in the order in which
            they run. For the most that a length may need, n times that length.
        schedule: of the pipeline; any of `pipeline.schedule.SCHEDULES`.
        chunks: stages of each pipeline rank.
        run: micro-batches that go through the pipeline together; None: all.
        settings: data types and checkpointing; None takes bfloat16 with selective checkpointing.
        layers: of each stage; None divides them as torchtitan does.
        flow: what the ranks run, where that is not the schedule's own order; then all is one run.
        slices: of each micro-batch those whose keys and values are cached, where documents are sliced.
        backward: the micro-batches of backward passes, where these are others.
        sharers: of each micro-batch the data-parallel ranks that share it; None: each is of one.
        tokens: what a rank holds of each token of a micro-batch, by how many data-parallel ranks share it;
            None: what it does without sharing, if context parallelism gathers keys and values of all ranks.

    Returns:
        One `RankMemory` a pipeline rank.

    Raises:
        PlanError: the schedule is not known, or the layers cannot be divided into its stages.
    """
    settings = settings or MemorySettings()
    shape = PipelineShape(schedule, degrees.pipeline, chunks, splits=settings.checkpointing == "none")
    layers = tuple(layers or layers_of_stages(model.layers, shape.stages))
    tokens = tokens or {1: TokenBytes.of(model, degrees, settings)}
    run = run or len(lengths)
    runs = [lengths[first : first + run] for first in range(0, len(lengths), run)]
    result = []
    for rank in range(shape.ranks):
        one = _Rank(model, degrees, settings, shape, layers, rank, tokens)
        own = None if flow is None else flow[rank]
        peaks = [one.peak(each, i > 0, own, slices, backward, sharers) for i, each in enumerate(runs)]
        result.append(max(peaks, key=lambda peak: peak.total))
    return tuple(result)


def longest_that_fits(
    memory: Callable[[int], Sequence[RankMemory]], window: int, divisor: int, device_bytes: float
) -> int | None:
    """The default of L_max: the longest micro-batches that are predicted to fit, at most two windows.

    Args:
        memory: predicts the ranks' peaks when all micro-batches have so many tokens; none if it cannot.
        window: context window in tokens.
        divisor: tokens that a micro-batch is a multiple of.
        device_bytes: memory of a device, of which `USABLE` is filled.

    Returns:
        Tokens, a multiple of `divisor` and at least the window; None if not even a window fits.
    """

    def fits(length: int) -> bool:
        return max((rank.total for rank in memory(length)), default=0) <= USABLE * device_bytes

    shortest, longest = -(-window // divisor), LONGEST * window // divisor
    if not fits(shortest * divisor):
        return None
    if fits(longest * divisor):
        return longest * divisor
    while shortest < longest:
        middle = (shortest + longest + 1) // 2
        if fits(middle * divisor):
            shortest = middle
        else:
            longest = middle - 1
    return shortest * divisor


def weighted_tokens(
    actions: Sequence[Action], lengths: Any, layers: Sequence[float], backward: Any = None
) -> list[Any]:
    """Tokens in flight on a rank after each of its actions, each times the layers of its stage.

    Args:
        actions: the rank's, in order.
        lengths: tokens of the micro-batches; or an array (n, k) of those of k steps, for as many results.
        layers: of each stage, or another weight.
        backward: as `lengths`, of the micro-batches of backward passes, where these are others.
    """
    live: Any = 0
    result = []
    for action in actions:
        of_pass = lengths if backward is None or action.kind == "F" else backward
        tokens = of_pass[action.place] * layers[action.stage]
        if action.kind == "F":
            live = live + tokens
        elif action.kind in ("B", "W"):  # I frees little: the weights' gradients need the activations still
            live = live - tokens
        result.append(live)
    return result


def kept_states(layers: Sequence[int]) -> list[int]:
    """Hidden states of a token that each stage keeps where backward passes have packs of their own.

    The first stage makes its first layer's input again, from token ids, and the last has the head's besides.
    """
    last = len(layers) - 1
    return [n - (stage == 0 and n > 0) + (stage == last) for stage, n in enumerate(layers)]


def layer_parameters(model: ModelShape) -> int:
    """Weights of one layer."""
    mlp = 3 * model.hidden * model.feed_forward
    return model.attention_weights + mlp + 2 * model.hidden + model.unvisited_weights


def rank_parameters(model: ModelShape, layers: Sequence[int], stages: Sequence[int]) -> int:
    """Weights of some stages, embedding and head included where they have them."""
    table = model.hidden * model.vocabulary
    ends = (0 in stages) * table + (len(layers) - 1 in stages) * (table + model.hidden)
    return sum(layers[stage] for stage in stages) * layer_parameters(model) + ends


class _Rank:
    """One pipeline rank, whose memory is followed from pass to pass."""

    def __init__(
        self,
        model: ModelShape,
        degrees: Degrees,
        settings: MemorySettings,
        shape: PipelineShape,
        layers: Sequence[int],
        rank: int,
        tokens: Mapping[int, TokenBytes],
    ) -> None:
        self._model, self._degrees, self._settings = model, degrees, settings
        self._shape, self._layers, self._number = shape, layers, rank
        self._stages = shape.stages_of(rank)
        self._last = len(layers) - 1
        self._own_layers = sum(layers[stage] for stage in self._stages)
        self._tokens = tokens
        self._parameters = rank_parameters(model, layers, self._stages)
        shards = degrees.tensor * degrees.sharding_ranks
        self._shard = self._parameters / shards * settings.parameter_bytes  # bytes of this GPU's weights
        self._kept = {
            (sharers, stage): token.kept * layers[stage] + self._output(token, stage)
            for sharers, token in tokens.items()
            for stage in self._stages
        }

    def peak(
        self,
        lengths: Sequence[int],
        reduced: bool,
        actions: Sequence[Action] | None = None,
        slices: Sequence[Sequence[CachedSlice]] | None = None,
        backward: BackwardPacks | None = None,
        sharers: Sequence[int] | None = None,
    ) -> RankMemory:
        """Its fullest pass in one run.

        Args:
            lengths: tokens of the run's micro-batches, of those that ranks share a rank's share.
            reduced: whether gradients were reduced before it.
            actions: what the rank runs; None is the schedule's own order.
            slices: of each micro-batch; None where documents are not sliced.
            backward: the micro-batches of backward passes, where these are others.
            sharers: of each micro-batch; None: each is of one data-parallel rank.
        """
        cache = SliceCache(self._tokens[1], self._layers)
        sharers = sharers or [1] * len(lengths)
        live = sum(
            self._tokens[ranks].inputs * ranks * length
            for ranks, length in zip(sharers, lengths, strict=True)
        )
        kept = self._kept
        if backward is not None:
            states, token = kept_states(self._layers), self._tokens[1]
            kept = {(1, stage): token.hidden * states[stage] for stage in self._stages}
            live += token.inputs * sum(backward.lengths)
        tokens = 0
        went_back: set[int] = set()  # stages that have gradients
        most = -1.0
        fullest: tuple[Any, ...] = ()
        gathered: dict[tuple[int, bool], float] = {}  # by what it follows from; stages only join
        for action in actions or rank_actions(self._shape, len(lengths), self._number):
            kind, stage, place = action
            if stage == 0 and kind in ("I", "W"):  # nobody waits for the gradient of token ids
                if kind == "I":
                    continue
                kind = "B"
            again = backward if kind != "F" else None
            token, own = self._tokens[sharers[place]], again.lengths[place] if again else lengths[place]
            length = own * sharers[place]
            held = length * kept[sharers[place], stage]
            cached = again.slices[place] if again else () if slices is None else slices[place]
            at_hand = loss = 0.0
            beside, made = cache.begin(action, cached, length)
            if kind == "I":
                live += length * token.waiting * self._layers[stage]
            if kind == "F":
                live += held
                tokens += own
                at_hand = length * token.forward
                if backward is not None:
                    at_hand += length * self._output(token, stage)
                elif stage == self._last and token.loss > token.forward:
                    at_hand, loss = 0.0, length * token.loss
            elif backward is not None:
                at_hand, loss = self._put_together(token, stage, length)
            elif kind != "W":
                at_hand = length * token.backward
            key = len(went_back), loss > 0
            if key not in gathered:
                gathered[key] = self._gathered(went_back, in_loss=key[1])
            # A backward pass frees activations and makes gradients of prefixes layer by layer.
            for freed, grown in self._layer_by_layer(stage, held, made):
                moment = live - freed, at_hand + beside, loss, gathered[key], cache.bytes_ + grown
                now = sum(moment) + (self._shard if reduced else 0.0)
                if now > most:
                    most, fullest = now, (*moment, reduced, tokens)
            cache.end(action, cached)
            if kind == "W":
                live -= length * token.waiting * self._layers[stage]
            if kind in ("B", "W"):  # I frees nothing that counts
                live -= held
                tokens -= own
                went_back.add(stage)
                if self._degrees.pipeline == 1:
                    reduced = True
                elif stage == self._last and backward is None:
                    live += 2 * length * token.hidden
        return self._at(*fullest)

    def _layer_by_layer(self, stage: int, held: float, made: float) -> Iterator[tuple[float, float]]:
        """Bytes of activations that a backward pass has freed, of those that it has `held`, and of gradients
        that it has made, of those that it leaves in the cache, in its first and in its last layer."""
        layers = max(self._layers[stage], 1)
        yield 0.0, made / layers
        if made:
            yield held * (layers - 1) / layers, made

    def _at(
        self,
        live: float,
        at_hand: float,
        loss: float,
        gathered: float,
        cache: float,
        reduced: bool,
        tokens: int,
    ) -> RankMemory:
        settings = self._settings
        return RankMemory(
            rank=self._number,
            weights=round(self._shard),
            optimizer=round(self._shard / settings.parameter_bytes * settings.optimizer_bytes),
            rotary=self._own_layers * settings.window * settings.rotary_bytes * self._model.head_dim,
            gradients=round(self._shard) if reduced else 0,
            gathered=round(gathered),
            activations=round(live),
            backward=round(at_hand),
            loss=round(loss),
            cache=round(cache),
            parameters=self._parameters,
            layers=self._own_layers,
            tokens=tokens,
        )

    def _put_together(self, token: TokenBytes, stage: int, length: int) -> tuple[float, float]:
        """Bytes at hand in a backward pass with tokens of several forward passes, and of the loss."""
        ends = token.hidden + self._output(token, stage)  # of the stage, its input and its output
        if stage == self._last and token.loss > token.backward:
            return length * ends, length * token.loss
        return length * (ends + token.backward), 0.0

    def _output(self, token: TokenBytes, stage: int) -> float:
        """Bytes a token of what a stage hands on, which it keeps as well."""
        return token.gathered if stage == self._last else token.hidden

    def _gathered(self, went_back: set[int], *, in_loss: bool) -> float:
        """Bytes of weights and gradients that FSDP has together besides the shards."""
        model, degrees, settings = self._model, self._degrees, self._settings
        whole, reduced = settings.compute_bytes, settings.parameter_bytes
        if degrees.sharding_ranks == 1 and whole == reduced:
            whole = 0  # the shards are whole weights
        head = self._last in self._stages and settings.loss_chunks > 1
        heads = model.hidden * model.vocabulary / degrees.tensor if head else 0.0
        weight = model.hidden * max(model.feed_forward, model.heads * model.head_dim) / degrees.tensor
        result = weight * (settings.compute_bytes + reduced)
        if degrees.sharding_ranks > 1:
            result += heads * reduced * (1 + in_loss + 2 / degrees.sharding_ranks)
        # A rank gathers its share of a layer: by tensor parallelism, and of experts by expert parallelism.
        experts = model.expert_weights if degrees.expert > 1 else 0
        less = experts / degrees.tensor - experts / degrees.expert
        held = {
            s: rank_parameters(model, self._layers, [s]) / degrees.tensor - self._layers[s] * less
            for s in self._stages
        }
        if degrees.pipeline > 1:
            result += sum(held[stage] for stage in went_back) * reduced
            result -= heads * reduced if self._last in went_back else 0.0
        if not settings.reshards(degrees):
            return result + sum(held.values()) * whole
        if in_loss and degrees.pipeline == 1:  # every layer has been freed, and only the head is at hand
            return heads * (whole + reduced)
        # The layer at hand and the one that is fetched ahead, and the ends of the model.
        layer = layer_parameters(model) / degrees.tensor - less
        ends = sum(held.values()) - self._own_layers * layer
        result += (2 * layer + ends) * whole
        return result + (layer * (settings.compute_bytes + reduced) if degrees.pipeline == 1 else 0.0)
