"""How an expected failure reaches the user: one line, no traceback."""

from __future__ import annotations

import os
import traceback


class UserError(Exception):
    """Something that the user can mend; its text says what and how."""


ERROR_PREFIX = "hintloop: error: "
TRACEBACK = "HINTLOOP_TRACEBACK"
"""Environment variable: when set, a failure also shows its traceback. Set for the processes of a run."""


def is_expected(error: BaseException) -> bool:
    """Whether a line is enough: our own exceptions, and the built-in ones that our parts raise for users."""
    ours = type(error).__module__.startswith("hintloop.")
    return ours or isinstance(error, (ValueError, KeyError, OSError))


def one_line(error: BaseException) -> str:
    """The error as one line of text."""
    if isinstance(error, KeyError) and error.args:
        text = str(error.args[0])
    elif isinstance(error, OSError) and error.strerror:
        where = f": {error.filename}" if error.filename else ""
        text = f"{error.strerror}{where}"
    else:
        text = str(error)
    return " ".join(text.split()) or type(error).__name__


def report_line(error: BaseException) -> str:
    """What goes to stderr."""
    shown = "".join(traceback.format_exception(error)) if os.environ.get(TRACEBACK) else ""
    return f"{shown}{ERROR_PREFIX}{one_line(error)}"
