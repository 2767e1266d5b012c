"""What goes wrong with a corpus in ways that the user can mend."""

from wlb_titan.errors import UserError


class CorpusError(UserError):
    """A corpus cannot be read or made. The message names the path and says what to do."""
