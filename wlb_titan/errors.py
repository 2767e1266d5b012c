"""The base of all errors whose message is written for the user."""


class UserError(ValueError):
    """A mistake that the user can mend. The message is one paragraph that says what is wrong and what to do.

    The command line shows the message alone, without a traceback, and exits with code 2.

    Args:
        message: the paragraph.
        setting: the setting to blame, as a dotted key or the end of one (`packing.max_length`); where the
            mistake is found by a configuration, the message gets the file, line and value of that key.
    """

    def __init__(self, message: str, *, setting: str = "") -> None:
        super().__init__(message)
        self.setting = setting
