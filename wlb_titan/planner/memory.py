"""How much memory each pipeline rank needs at the peak of a step: whether a job fits, before it runs.

    total = weights + gathered weights + gradients + optimizer
          + activations + K/V + recomputation + backward + loss

What a rank holds at most of the activations follows from its schedule alone: the rank runs its actions in a
fixed order, a forward pass adds a micro-batch's activations and its backward pass frees them. Micro-batches
differ in length, so it is not their number that counts but the largest sum of those in flight together. Under
1F1B the first of four ranks holds up to four micro-batches and the last one.

Per token and layer, in elements of the compute type, h = hidden, q and k the widths of all query and of all
key heads, f = feed-forward (compare Korthikanti et al., Reducing Activation Recomputation, section 4):

    none        4 h + 2 q + 4 f               norm and residual inputs, projections' inputs, q, attention's
                                              output; both inner activations, their gate and product
    selective   2 h + 2 q + k + f             torchtitan's: every second matrix product, attention's output
    full        h                             the layer's input

and attention's log-sum-exp in float32 with the first two. Where tensor parallelism gathers a projection's
input it is not divided by TP. K and V of the whole sequence are on each context-parallel rank: with `none`
those of all layers in flight, otherwise of the one layer that runs. A backward pass needs the gradients of
one layer's activations besides: 2 h + 2 f at the most, of both ends of the MLP, and of its product, gate and
inner activation when the product itself is not needed any more.
Not counted: communication buffers, the allocator's fragmentation, CUDA's and NCCL's own memory; leave some
10 % for them.

Pure arithmetic on lengths and shapes; the simulator, `wlb-titan plan` and the planner's bound on the length
of micro-batches (L_max) use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from wlb_titan.planner.analytic import ModelShape
from wlb_titan.planner.degrees import Degrees
from wlb_titan.planner.errors import PlanError
from wlb_titan.planner.pipeline_schedule import Action, PipelineShape, rank_actions

GIB = 2**30
FLOAT32 = 4
KEY_COPIES = 2  # K and V as gathered, and in document order


@dataclass(frozen=True, kw_only=True, slots=True)
class MemorySettings:
    """What of a training configuration decides about memory, besides shape, degrees and lengths.

    Attributes:
        checkpointing: `none`, `selective` or `full` activation checkpointing.
        parameter_bytes: of a weight as the optimizer keeps it, and of its gradient.
        compute_bytes: of a weight or an activation in forward and backward.
        optimizer_bytes: of a weight's state: AdamW has two moments in float32.
        loss_chunks: pieces of a micro-batch of which the logits exist one at a time.
        reshard: whether FSDP frees a layer's gathered weights after each pass. None is torchtitan's default:
            not under pipeline parallelism, where micro-batches add up gradients before they are reduced.
    """

    checkpointing: Literal["none", "selective", "full"] = "selective"
    parameter_bytes: int = 4
    compute_bytes: int = 2
    optimizer_bytes: int = 8
    loss_chunks: int = 8
    reshard: bool | None = None

    def __post_init__(self) -> None:
        if self.checkpointing not in ("none", "selective", "full"):
            raise PlanError(
                f"No activation checkpointing is called {self.checkpointing!r}; there are none, selective "
                "and full."
            )

    def reshards(self, degrees: Degrees) -> bool:
        """Whether gathered weights are freed after each pass at these degrees."""
        return degrees.pipeline == 1 if self.reshard is None else self.reshard


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """The peak of one pipeline rank, term by term, in bytes of one GPU.

    Attributes:
        rank: pipeline-parallel rank.
        weights, gradients, optimizer: this GPU's shards of them.
        gathered: weights, and gradients not reduced yet, of whole layers, while FSDP has them together.
        activations: of the micro-batches in flight.
        keys_values: K and V of whole sequences on a context-parallel rank.
        recomputation: the one layer whose forward pass is repeated for its backward pass.
        backward: gradients of that layer's activations.
        loss: logits and their gradient, on the rank of the last stage.
        parameters: weights of the rank's stages, of all tensor-parallel and FSDP ranks together.
        layers: of the rank's stages.
        tokens: of the micro-batches in flight at the peak, summed over the rank's stages.
    """

    rank: int
    weights: int
    gradients: int
    optimizer: int
    gathered: int
    activations: int
    keys_values: int
    recomputation: int
    backward: int
    loss: int
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
    settings: MemorySettings | None = None,
    layers: Sequence[int] | None = None,
) -> tuple[RankMemory, ...]:
    """The peak memory of every pipeline rank over one step.

    Args:
        model: its shape.
        degrees: of parallelism.
        lengths: tokens of one data-parallel rank's micro-batches, padding included, in the order in which
            they run. For the most that a length may need, n times that length.
        schedule: of the pipeline; any of `pipeline_schedule.SCHEDULES`.
        chunks: stages of each pipeline rank.
        settings: data types and checkpointing; None takes bfloat16 with selective checkpointing.
        layers: of each stage; None divides them as torchtitan does.

    Returns:
        One `RankMemory` a pipeline rank.

    Raises:
        PlanError: the schedule is not known, or the layers cannot be divided into its stages.
    """
    settings = settings or MemorySettings()
    shape = PipelineShape(schedule, degrees.pipeline, chunks)
    layers = tuple(layers or layers_of_stages(model.layers, shape.stages))
    result = []
    for rank in range(shape.ranks):
        actions = list(rank_actions(shape, len(lengths), rank))
        in_flight = max(weighted_tokens(actions, lengths, layers))
        result.append(_rank(model, degrees, settings, shape, rank, layers, in_flight, max(lengths)))
    return tuple(result)


def weighted_tokens(actions: Sequence[Action], lengths: Any, layers: Sequence[int]) -> list[Any]:
    """Tokens in flight on a rank after each of its actions, each times the layers of its stage.

    Args:
        actions: the rank's, in order.
        lengths: tokens of the micro-batches; or an array (n, k) of those of k steps, for as many results.
        layers: of each stage.
    """
    live: Any = 0
    result = []
    for action in actions:
        tokens = lengths[action.place] * layers[action.stage]
        if action.kind == "F":
            live = live + tokens
        elif action.kind in ("B", "W"):  # I frees little: the weights' gradients need the activations still
            live = live - tokens
        result.append(live)
    return result


def layer_bytes(model: ModelShape, degrees: Degrees, settings: MemorySettings, checkpointing: str) -> float:
    """Bytes of activations that one layer keeps of one token of the micro-batch, on one GPU, without K/V."""
    h, f = model.hidden, model.feed_forward
    q, k = model.heads * model.head_dim, model.kv_heads * model.head_dim
    tensor = degrees.tensor
    log_sum_exp = FLOAT32 * model.heads / tensor
    if checkpointing == "none":
        # Of 4 h two are projections' inputs, which tensor parallelism gathers.
        elements = (2 * h + 2 * q + 4 * f) / tensor + 2 * h
        return (elements * settings.compute_bytes + log_sum_exp) / degrees.context
    if checkpointing == "selective":
        return ((2 * h + 2 * q + k + f) / tensor * settings.compute_bytes + log_sum_exp) / degrees.context
    return h / tensor * settings.compute_bytes / degrees.context


def key_bytes(model: ModelShape, degrees: Degrees, settings: MemorySettings) -> float:
    """Bytes of one layer's K and V of one token of the micro-batch, which every context-parallel rank has."""
    return 2 * model.kv_heads * model.head_dim / degrees.tensor * settings.compute_bytes


def rank_parameters(model: ModelShape, layers: Sequence[int], stages: Sequence[int]) -> int:
    """Weights of some stages, embedding and head included where they have them."""
    attention = model.hidden * model.head_dim * (2 * model.heads + 2 * model.kv_heads)
    layer = attention + 3 * model.hidden * model.feed_forward + 2 * model.hidden
    table = model.hidden * model.vocabulary
    ends = (0 in stages) * table + (len(layers) - 1 in stages) * (table + model.hidden)
    return sum(layers[stage] for stage in stages) * layer + ends


def _rank(
    model: ModelShape,
    degrees: Degrees,
    settings: MemorySettings,
    shape: PipelineShape,
    rank: int,
    layers: Sequence[int],
    in_flight: int,
    longest: int,
) -> RankMemory:
    stages = shape.stages_of(rank)
    parameters = rank_parameters(model, layers, stages)
    held = parameters / degrees.tensor
    shard = held / degrees.sharding_ranks
    is_last = len(layers) - 1 in stages
    own_layers = sum(layers[stage] for stage in stages)
    whole = layer_bytes(model, degrees, settings, "none")
    keys = key_bytes(model, degrees, settings)
    kept_keys = keys * in_flight if settings.checkpointing == "none" else 0
    if degrees.context == 1:
        transient_keys = 0.0 if settings.checkpointing == "none" else keys * longest
    else:
        transient_keys = KEY_COPIES * keys * longest
    gradients = 2 * (model.hidden + model.feed_forward / degrees.tensor) / degrees.context
    logits = longest / degrees.context / settings.loss_chunks * model.vocabulary / degrees.tensor
    return RankMemory(
        rank=rank,
        weights=round(shard * settings.parameter_bytes),
        gradients=round(shard * settings.parameter_bytes),
        optimizer=round(shard * settings.optimizer_bytes),
        gathered=round(_gathered(held, degrees, settings, own_layers)),
        activations=round(in_flight * layer_bytes(model, degrees, settings, settings.checkpointing)),
        keys_values=round(kept_keys + transient_keys),
        recomputation=round(whole * longest) if settings.checkpointing != "none" else 0,
        backward=round(gradients * longest * settings.compute_bytes),
        # Logits, their float32 copy and its gradient.
        loss=round(logits * (settings.compute_bytes + 2 * FLOAT32)) if is_last else 0,
        parameters=parameters,
        layers=own_layers,
        tokens=round(in_flight / max(own_layers, 1) * shape.chunks),
    )


def _gathered(held: float, degrees: Degrees, settings: MemorySettings, layers: int) -> float:
    """Bytes of weights and gradients that FSDP has together besides the shards."""
    if degrees.sharding_ranks == 1:
        return held * settings.compute_bytes if settings.compute_bytes != settings.parameter_bytes else 0.0
    if degrees.pipeline > 1 and not settings.reshards(degrees):
        return held * (settings.compute_bytes + settings.parameter_bytes)
    # The layer at hand and the one that is fetched ahead, and the gradients of one.
    return held / max(layers, 1) * (2 * settings.compute_bytes + settings.parameter_bytes)
