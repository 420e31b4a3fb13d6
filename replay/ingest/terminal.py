"""What the text of a terminal says of a command whose exit code nobody recorded.

Only texts that a shell, an interpreter or the agent's own tools write about a failure count, and only in the first
or the last line of an output: in between it may be the content of a file.
"""

from __future__ import annotations

import re

from hintloop.replay.ingest.classify import CAUSES, INFRA
from hintloop.replay.ingest.trace import Failure

_TAIL_CHARS = 4000
_LINE_CHARS = 400
_PROMPT = re.compile(r"\n?\((?:Open file|Current directory): [^\n]*\)|\n(?:bash-)?\$\s*$")
_RULES: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in [
        (
            "timeout",
            r"EXECUTION TIMED OUT|COMMAND TIMED OUT|The command '.* (?:was cancelled because|timed out)",
        ),
        ("syntax_error", r"Your proposed edit has introduced new syntax error"),
        ("edit_no_match", r"No replacement was performed|Text .* not found in displayed lines"),
        ("type_error", r"[\w./-]{1,60}: error: |Invalid `\w{1,40}` parameter"),
        (
            "command_not_found",
            r"[\w./-]{1,60}: (?:line \d{1,6}: |\d{1,6}: )?\S{1,80}: (?:command )?not found$",
        ),
        (
            "file_not_found",
            r"[\w./-]{1,60}: .*(?:No such file or directory|Is a directory)|File .* (?:not found|does not exist)\.?$"
            r"|No file open\.|Error: File .* does not exist",
        ),
        ("permission_denied", r"[\w./-]{1,60}: .*Permission denied$"),
    ]
)
_TRACEBACK = re.compile(r"^Traceback \(most recent call last\):\s*$", re.MULTILINE)
_EXCEPTION = re.compile(r"(?:\w+\.)*(\w*(?:Error|Exception|Interrupt|Exit|Iteration))(?::|$)")
_SYNTAX_ERRORS = ("SyntaxError", "IndentationError", "TabError")
_NAMED = {
    **dict.fromkeys(_SYNTAX_ERRORS, "syntax_error"),
    "FileNotFoundError": "file_not_found",
    "MemoryError": "out_of_memory",
    "PermissionError": "permission_denied",
    "AssertionError": "test_failure",
}
_DIED = "Environment died unexpectedly"


def without_prompt(text: str) -> str:
    """What a command printed: without carriage returns and the prompt lines that SWE-agent puts behind it."""
    return _PROMPT.sub("", text.replace("\r\n", "\n")).strip()


def went_wrong(text: str) -> Failure | None:
    """The failure that a command's output tells of; None when it tells of none."""
    text = text.strip()
    first, last = (line.strip()[:_LINE_CHARS] for line in (text.partition("\n")[0], text.rpartition("\n")[2]))
    if _DIED in first:
        return Failure("runtime_error", INFRA, text[:2000])
    kind = next((kind for kind, rule in _RULES if rule.match(first) or rule.match(last)), None)
    kind = kind or _exception(text[-_TAIL_CHARS:], last)
    return Failure(kind, CAUSES[kind], text[:2000]) if kind else None


def _exception(tail: str, last: str) -> str | None:
    """The kind of a Python error that ended the output."""
    found = _EXCEPTION.match(last)
    if found is None or (_TRACEBACK.search(tail) is None and found[1] not in _SYNTAX_ERRORS):
        return None
    return _NAMED.get(found[1], "runtime_error")
