"""What can go wrong for a user, and the exit code each gets.

Every error here is one message: what happened, where (file:line, field, step), and the remedy. The command prints it
without a traceback. Anything that is not one of these is a bug of ours and exits 1.
"""

from __future__ import annotations

import difflib
import errno
import json
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress

DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What the system says then; any other fault of a disk is not for want of space."""


def tell(message: str, exit_code: int, words: Iterable[str], found: Mapping[str, object] | None = None) -> None:
    """Print an error. If `words`, a command line, ask for JSON, standard output gets an object, with what was found."""
    with suppress(OSError):  # nobody reads it any more, or its disk is full; the exit code tells
        print(f"penstock: {message}", file=sys.stderr)
    if "--json" in words:
        with suppress(OSError):
            print(json.dumps({**(found or {}), "error": message, "exit_code": exit_code}))


class UserError(Exception):
    """Something the user can mend. `where` comes first in the message, `remedy` last."""

    exit_code = 2
    found: Mapping[str, object] = {}
    """What there is to say in JSON beside the error."""

    def __init__(self, what: str, *, where: str = "", remedy: str = "") -> None:
        self.what, self.where, self.remedy = what, where, remedy
        message = f"{where}: {what}" if where else what
        super().__init__(f"{message}\n  {remedy}" if remedy else message)


class RecipeError(UserError):
    """The recipe, a flag or the YAML file is at fault."""


class DataError(UserError):
    """The training data is at fault."""


class ModelError(UserError):
    """The model or its tokenizer cannot be found, read or used."""


class OutputError(UserError):
    """The output directory cannot be used."""


class DoesNotFit(UserError):
    """Memory or disk is too small."""

    exit_code = 3


class Diverged(UserError):
    """Training produced numbers that are not finite."""

    exit_code = 4


class CheckpointError(UserError):
    """A saved file is damaged or does not belong to this run."""

    exit_code = 5


class RankLost(UserError):
    """Another rank of the run failed or died, and this one cannot go on without it."""

    exit_code = 6


class Interrupted(UserError):
    """The run was told to stop; what it had was written first."""

    def __init__(self, what: str, *, signal_number: int, where: str = "", remedy: str = "") -> None:
        super().__init__(what, where=where, remedy=remedy)
        self.exit_code = 128 + signal_number


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A suggestion for a misspelt word, or the list of what there is when nothing is near."""
    choices = sorted(known)
    near = difflib.get_close_matches(word, choices, n=1, cutoff=0.6)
    return f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(choices)}."


def counted(count: int, noun: str) -> str:
    """`1 row`, `1,200 rows`."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def size(num_bytes: float) -> str:
    """`37 MiB`, `1.5 GiB`."""
    return f"{num_bytes / 2**30:,.1f} GiB" if num_bytes >= 2**29 else f"{num_bytes / 2**20:,.0f} MiB"


def short(number: float) -> str:
    """Three digits that matter, never in powers of ten."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}" if number >= 0.001 else f"{number:.6f}"
