"""The degrees of the paper's Table 1; `PAPER_MODELS` has its sizes."""

from wlb_titan.cost.degrees import Degrees

PAPER_DEGREES = {
    "550M-64K": Degrees(tensor=2, context=2, pipeline=4, shard=2),
    "550M-128K": Degrees(tensor=2, context=4, pipeline=4),
    "7B-64K": Degrees(tensor=4, context=2, pipeline=4),
    "7B-128K": Degrees(tensor=8, context=2, pipeline=4),
    "30B-64K": Degrees(tensor=8, context=2, pipeline=4),
    "30B-128K": Degrees(tensor=8, context=4, pipeline=4),
    "70B-64K": Degrees(tensor=16, context=4, pipeline=4),
    "70B-128K": Degrees(tensor=16, context=4, pipeline=4),
}
"""A global batch is of pipeline x data-parallel degree micro-batches."""
