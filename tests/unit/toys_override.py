"""An override of torchtitan's as a user would write it: attention that knows no documents."""

from torchtitan.config import override
from torchtitan.models.common.attention import VarlenAttention

from wlb_titan.runtime.attention.module import DocumentAttention


@override(target=DocumentAttention.Config)
def with_varlen(config):
    return VarlenAttention.Config()
