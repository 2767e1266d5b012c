"""The base of all errors whose message is written for the user."""


class UserError(ValueError):
    """A mistake that the user can mend. The message is one paragraph that says what is wrong and what to do.

    The command line shows the message alone, without a traceback, and exits with code 2.
    """
