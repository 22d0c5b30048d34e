"""The exceptions a user is meant to see."""


class UserError(Exception):
    """Something outside the program's control is wrong: a file, a flag, a machine.

    The message is one line that says what was found, what was expected and how to fix it. The
    command-line programs print it without a traceback and exit with status 1.
    """


class OutOfMemory(UserError):
    """What was asked for does not fit into the memory that is free."""


class DataError(UserError):
    """The data cannot be read on. A run that meets it has weights that are worth keeping."""
