"""Faults of the system that no part of a command sees to itself, in words: whichever meets one first ends with it."""

from __future__ import annotations

import errno

from penstock.errors import DISK_IS_FULL, DoesNotFit, RecipeError, UserError


def no_output(error: OSError) -> UserError:
    """What a command prints is its result: one that nobody gets is no success, though a run does without its lines."""
    remedy = "Free space on the disk that it goes to, or send it elsewhere."
    return DoesNotFit(f"cannot be written ({error.strerror})", where="the output", remedy=remedy)


def of_system(error: Exception) -> UserError | None:
    """Output that a full disk does not take, or a name that the system does not even look up; None for other errors."""
    if not isinstance(error, OSError):
        return None
    if error.filename is None:
        return no_output(error) if error.errno in DISK_IS_FULL else None
    if error.errno not in (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG):
        return None
    remedy = "Check the name, and that you have the rights to it and to the directories above it."
    return RecipeError(f"cannot be used ({error.strerror})", where=str(error.filename), remedy=remedy)
