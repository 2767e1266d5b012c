"""The planner's own error."""

from wlb_titan.errors import UserError


class PlanError(UserError):
    """Lengths, settings or a saved state from which no plan can be made; one paragraph for the user.

    The `setting` that it blames is one of [wlb.*], as `packing.max_length`.
    """
