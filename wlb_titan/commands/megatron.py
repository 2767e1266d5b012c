"""A job as arguments of Megatron-LM's pretrain_gpt.py: model, degrees and batch."""

from __future__ import annotations

from wlb_titan.errors import PlanError
from wlb_titan.job import Job


def megatron_arguments(job: Job) -> str:
    """The arguments, one a line. Packing stays Megatron's own.

    Raises:
        PlanError: Megatron does not have the job's schedule.
    """
    model, degrees = job.model, job.degrees
    if degrees.pipeline > 1 and job.schedule not in ("1F1B", "Interleaved1F1B"):
        raise PlanError(f"--write megatron: Megatron-LM has no schedule {job.schedule}.")
    values = {
        "num-layers": model.layers,
        "hidden-size": model.hidden,
        "ffn-hidden-size": model.feed_forward,
        "num-attention-heads": model.heads,
        "num-query-groups": model.kv_heads,
        "kv-channels": model.head_dim,
        "seq-length": job.window,
        "max-position-embeddings": job.window,
        "micro-batch-size": 1,
        "global-batch-size": job.micro_batches,
        "tensor-model-parallel-size": degrees.tensor,
        "context-parallel-size": degrees.context,
        "pipeline-model-parallel-size": degrees.pipeline,
    }
    switches = ["group-query-attention", "swiglu", "use-distributed-optimizer", "bf16"]
    if degrees.tensor > 1:
        switches.append("sequence-parallel")
    if job.shape.chunks > 1:
        values["num-virtual-stages-per-pipeline-rank"] = job.shape.chunks
    if model.experts:
        values["num-experts"] = model.experts
        values["moe-router-topk"] = round(model.visits)
        values["moe-ffn-hidden-size"] = round(model.routed_width / model.visits)
        values["expert-model-parallel-size"] = degrees.expert
    lines = [f"--{name} {value}" for name, value in values.items()]
    return "\n".join([*lines, *(f"--{name}" for name in switches)])
