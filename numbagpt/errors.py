"""The exceptions a user is meant to see, and what is said of those of the operating system."""

import errno

# What a user can do about the system's refusals; the others are too rare or say it themselves.
_FIXES = {
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR), "; check the path"),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "; check the permissions"),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "; make room or name another folder"),
    errno.EROFS: "; name another folder",
    errno.ENAMETOOLONG: "; choose a shorter one",
}


class UserError(Exception):
    """Something outside the program's control is wrong: a file, a flag, a machine.

    The message is one line that says what was found, what was expected and how to fix it. The
    command-line programs print it without a traceback and exit with status 1.
    """


class OutOfMemory(UserError):
    """What was asked for does not fit into the memory that is free."""


class DataError(UserError):
    """The data cannot be read on. A run that meets it has weights that are worth keeping."""


class NotFinite(UserError):
    """What a model computes is not finite: its weights were so already, or a step made them so."""


def refusal(error: OSError) -> str:
    """The system's reason for not doing something with a file, and a remedy if there is one."""
    return f"{error.strerror or error}{_FIXES.get(error.errno, '')}"
