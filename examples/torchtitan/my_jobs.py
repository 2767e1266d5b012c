"""Jobs for torchtitan's own command, `--module my_jobs --config NAME`, without a TOML file."""

from wlb_titan.runtime.models.bases import base_config


def plain():
    """A small Llama, with packed documents, on a corpus of `wlb-titan prepare outputs/corpus`."""
    # Or a function of torchtitan's or yours, such as "torchtitan.models.llama3.config_registry:llama3_8b".
    config = base_config("llama3_debug")
    config.wlb.corpus.path = "outputs/corpus"
    return config


def balanced():
    """The same with equal work in micro-batches and on context-parallel ranks."""
    config = plain()
    config.wlb.packing = config.wlb.packing.named("wlb_lazy")
    config.wlb.context = config.wlb.context.named("hybrid")
    return config
