"""What went wrong in a recorded tool call, and whose doing it was.

Kinds and causes carry the names of the live tool errors. Recordings say less than a live environment does: a
flag alone is no verdict (refusals set it, too), and a missing one is none either. An error is put down to the
model only where the text or the exit code says so; one that nobody can be blamed for counts as ``infra``.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from hintloop.replay.ingest.trace import Failure, ToolCall, ToolResult

__all__ = ["CAUSES", "INFRA", "MODEL", "USER", "Failure", "classify", "said_so"]

MODEL, INFRA, USER = "model", "infra", "user"

CAUSES: dict[str, str] = {
    "tool_not_found": MODEL,
    "json_decode": MODEL,
    "type_error": MODEL,
    "command_not_found": MODEL,
    "file_not_found": MODEL,
    "permission_denied": MODEL,
    "syntax_error": MODEL,
    "edit_no_match": MODEL,
    "runtime_error": MODEL,
    "test_failure": USER,
    "timeout": MODEL,
    "output_capped": MODEL,
    "out_of_memory": MODEL,
    "connection_error": INFRA,
}
"""The kinds that are told apart here, and their usual causes."""

MESSAGE_CHARS = 2000
_EDGE_CHARS = 1000
"""Of a longer text only the two ends are searched."""
_SHELLS = frozenset(
    [
        "bash",
        "shell",
        "exec",
        "exec_command",
        "local_shell",
        "local_shell_call",
        "container.exec",
        "run_shell_command",
        "terminal",
        "execute_bash",
        "execute_ipython_cell",
        "execute_command",
        "run",
        "run_ipython",
        "run_command",
        "run_terminal_cmd",
        "shell_command",
        "python",
    ]
)
_TELLS = re.compile(
    r"\s*(?:<tool_use_error>|apply_patch verification failed|failed to parse function arguments"
    r"|unsupported (?:custom tool )?call: |Error: No such tool available)"
)
"""How the result of a failed call begins where there is no flag; a file that holds such a text begins otherwise."""
_SPECIAL = re.compile(r"[\\^$.|?*+()\[\]{}]")
_TAGS = re.compile(r"</?tool_use_error>")


class _Rule(NamedTuple):
    """What a text in lower case says where it holds one of the words, or matches."""

    kind: str
    cause: str
    words: tuple[str, ...]
    pattern: re.Pattern[str] | None

    def holds(self, text: str) -> bool:
        for word in self.words:  # finding a word takes a tenth of matching it
            if word in text:
                return True
        return self.pattern is not None and self.pattern.search(text) is not None


def _rule(kind: str, *alternatives: str) -> _Rule:
    """For text in lower case: ignoring case costs five times as much. So does a pattern without a first letter."""
    words = tuple(each for each in alternatives if not _SPECIAL.search(each))
    rest = "|".join(each for each in alternatives if each not in words)
    return _Rule(kind, CAUSES[kind], words, re.compile(rest, re.MULTILINE) if rest else None)


_REFUSED = re.compile(
    r"haven't granted it yet|user doesn't want to (?:proceed|take this action)|\[request interrupted by user"
    r"|rejected by (?:the )?user|aborted by (?:the )?user|tool use was rejected|blocked by .{0,40}hook"
    r"|hook .{0,80}(?:blocked|denied)|has been denied|permission to use .{0,80} denied|approval (?:denied|required)",
)
_SAYS_SO = (
    _rule("tool_not_found", "no such tool available", r"^unsupported (?:custom tool )?call: ", r"unknown tool\b",
          r"tool ['\"][^'\"\n]{1,80}['\"] not found"),
    _rule("json_decode", "not valid json", r"json ?(?:decode|parse) ?error", "could not be parsed as json"),
    _rule("type_error", "inputvalidationerror", r"failed to parse (?:function )?arguments", "required parameter",
          "mcp error -32602", "invalid arguments", r"agent type '.*' not found", "unknown skill",
          r"invalid `\w{1,40}` parameter", r"error validating (?:args|tool)", "missing required",
          r"missing '\w{1,40}' argument", "cannot execute multiple commands at once",
          "params must have required property"),
    _rule("edit_no_match", "has not been read yet", "modified since read", "string to replace not found",
          "matches of the string to replace", "old_string and new_string are exactly the same",
          "apply_patch verification failed", r"failed to find (?:expected lines|context)",
          r"invalid (?:patch|context)\b",
          "no replacement was performed", "did not appear verbatim", "could not find the string to replace",
          r"\b0 occurrences found for old_string", "determined that no changes were necessary"),
    _rule("output_capped", r"exceeds maximum allowed (?:tokens|size)", "maxfilereadtokenexceeded",
          r"file content .* exceeds"),
)  # fmt: skip
"""Texts of the tools themselves, at the beginning of a result that is known to be a failure."""
_IN_OUTPUT = (
    _rule("connection_error", "econnrefused", "econnreset", "enotfound", "eai_again", "etimedout",
          "could not resolve host", r"connection (?:refused|reset|error)", "fetch failed", "network is unreachable",
          r"status code [45]\d\d", r"rate.?limit", "overloaded_error", "internal server error", "service unavailable"),
    _rule("timeout", "timed out", "timeout expired", r"timeout(?<=^timeout)\b"),
    _rule("out_of_memory", "out of memory", "memoryerror", "heap limit", r"oom-?kill"),
    _rule("test_failure", "--- fail", "test result: failed",
          r"fail(?:ed(?:(?<=[1-9] failed)|(?<=\d0 failed)|(?<=^failed) )|ing(?:(?<=[1-9] failing)|(?<=\d0 failing))"
          r"|(?<=^fail)\s+\S+)"),
    _rule("command_not_found", "command not found", "not recognized as an internal", r": not found$",
          "executable file not found"),
    _rule("syntax_error", "syntaxerror", "indentationerror", "taberror", "syntax error",
          r"unexpected (?:token|eof|end of file)"),
    _rule("file_not_found", "no such file or directory", "enoent", "file does not exist", "filenotfounderror", "eisdir",
          "is a directory", "directory does not exist", "path does not exist", r"cannot find the (?:path|file)"),
    _rule("permission_denied", "permission denied", "eacces", "eperm", "operation not permitted",
          "read-only file system"),
)  # fmt: skip
"""Texts inside of a command's output: they name the kind of a failure that is known from elsewhere."""
_BY_EXIT_CODE = {
    124: ("timeout", MODEL),
    126: ("permission_denied", MODEL),
    127: ("command_not_found", MODEL),
    130: ("permission_denied", USER),  # interrupted from the keyboard
    137: ("out_of_memory", INFRA),  # killed, by whom and why is not known
    -1: ("timeout", INFRA),  # no exit code: still running, or its sandbox broke
}


def classify(call: ToolCall) -> Failure | None:
    """The failure of a call; None when it succeeded or has no result."""
    result = call.result
    if result is None:
        return None
    if result.judged or result.failure is not None:
        return result.failure
    told = _TELLS.match(result.text) is not None
    if not (told or result.refused or result.is_error or result.exit_code not in (None, 0)):
        return None
    text = _TAGS.sub("", result.text).strip()
    edges = text if len(text) <= 2 * _EDGE_CHARS else f"{text[:_EDGE_CHARS]}\n{text[-_EDGE_CHARS:]}"
    kind, cause = _verdict(call, result, edges.lower(), told)
    return Failure(kind, cause, text[:MESSAGE_CHARS])


def said_so(text: str) -> tuple[str, str] | None:
    """Kind and cause that the text of a failure names at its beginning; None when it names none."""
    return _first(_SAYS_SO, text[:200].lower())


def _verdict(call: ToolCall, result: ToolResult, text: str, told: bool) -> tuple[str, str]:
    if result.refused or _REFUSED.search(text[:1000]):
        return "permission_denied", USER
    if (said := said_so(text)) is not None:
        return said
    found = _first(_IN_OUTPUT, text)
    by_code = _BY_EXIT_CODE.get(result.exit_code or 0)
    if by_code is not None:
        # Being killed is nobody's fault until the output names the reason.
        return (
            found if found and by_code[1] == INFRA and found[0] in ("timeout", "out_of_memory") else by_code
        )
    if found is not None:
        return found
    ran = result.exit_code is not None or call.name.lower() in _SHELLS
    if told or (ran and text):
        return "runtime_error", MODEL
    # A tool with an error text of its own, or a command that failed without a word, as grep does.
    return "runtime_error", INFRA


def _first(rules: tuple[_Rule, ...], text: str) -> tuple[str, str] | None:
    return next(((rule.kind, rule.cause) for rule in rules if rule.holds(text)), None)
