"""Hints: one short text per kind of tool error, shown to the teacher just before the turn that went wrong.

A hint says what the agent could have known or looked up (the tools there are, what a line really holds). It
never holds anything of the hidden solution: it is made from the tool error and what the agent has seen itself.

The texts for the bundled tools are what the bundled student learned to read; a test holds them as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hintloop.envs.errors import Cause, ToolError
from hintloop.envs.models import ToolCall

Template = Callable[[dict[str, Any]], str]
_TEMPLATES: dict[str, Template] = {}
BUNDLED = ("read_file", "edit_file", "run_tests", "submit", "write_file", "bash")
"""The tools that the student knows, in the order in which its hints name them."""
_TAIL_LINES, _TAIL_CHARS = 3, 200
_MAX_FILES = 20


def register(kind: str, template: Template) -> None:
    """Set the hint template of an error kind. Replaces an earlier one.

    ``template`` gets the error's ``meta`` and what ``context`` adds to it.
    """
    _TEMPLATES[kind] = template


def dispatch(error: ToolError, known: Mapping[str, Any] | None = None) -> str | None:
    """The hint for an error, or None when the agent did not cause it. ``KeyError`` for a kind without template.

    ``known`` is the ``context`` of the call, where there is one; what the error says itself comes first.
    """
    if error.cause is not Cause.MODEL:
        return None
    return "Hint: " + _TEMPLATES[error.kind]({**(known or {}), **error.meta})


def context(
    tools: Sequence[Mapping[str, Any]], call: ToolCall, output: str, files: Sequence[str] = ()
) -> dict[str, Any]:
    """What the agent knows of a failed call.

    ``tools``: the names of the task's tools; ``name`` and ``arguments`` of the call; ``schema``: the parameters of the
    tool that was called, if there is such a tool; ``tail``: the last lines of what it gave; ``files``: the first of the
    ``files`` that the task began with, if it did.
    """
    known: dict[str, Any] = {"tools": [spec["name"] for spec in tools], "tail": _tail(output)}
    if files:
        known["files"] = list(files[:_MAX_FILES])
    if call.malformed is None:
        known |= {"name": call.name, "arguments": call.arguments}
        schemas = {spec["name"]: spec.get("parameters") for spec in tools}
        if schemas.get(call.name):
            known["schema"] = schemas[call.name]
    return known


def kinds() -> list[str]:
    """The kinds that have a template, sorted."""
    return sorted(_TEMPLATES)


def _tail(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return " / ".join(lines[-_TAIL_LINES:])[-_TAIL_CHARS:]


def _tool_not_found(meta: dict[str, Any]) -> str:
    near = f"use {meta['nearest']}; " if meta.get("nearest") else ""
    there = meta.get("tools") or BUNDLED
    own = [name for name in BUNDLED if name in there] + [name for name in there if name not in BUNDLED]
    return f"there is no {meta['name']}; {near}tools are {', '.join(own)}"


def _type_error(meta: dict[str, Any]) -> str:
    required = meta["required"]
    if meta["name"] not in BUNDLED and meta.get("schema"):
        types = meta["schema"].get("properties", {})
        required = [f"{name} ({types.get(name, {}).get('type', 'any')})" for name in required]
    near = f"there is no {meta['unknown']}, use {meta['nearest']}; " if meta.get("unknown") else ""
    return f"{near}{meta['name']} needs {', '.join(required) or 'no arguments'}"


def _runtime_error(meta: dict[str, Any]) -> str:
    if meta.get("name", "bash") in BUNDLED or not meta.get("tail"):
        return "the command failed, read the last lines of its output"
    return f"{meta['name']} failed: {meta['tail']}"


def _file_not_found(meta: dict[str, Any]) -> str:
    missing = f"there is no {meta['path']}; " if meta.get("path") else ""
    if "files" not in meta:
        return f"{missing}look which files there are"
    return f"{missing}files are {', '.join(meta['files']) or 'none yet'}"


def _edit_no_match(meta: dict[str, Any]) -> str:
    """Where the old text is, if anywhere. What was wrong about the call is not named: a small model copies it."""
    if meta.get("num_lines"):
        return f"the file has {meta['num_lines']} lines"
    if meta.get("found"):
        return f"{meta['old']} is in line {', '.join(map(str, meta['found']))}"
    if meta.get("line"):
        return f"line {meta['line']} is: {meta['line_text'].strip()}"
    if meta.get("line_text") is None:
        return "old must be text of the file, read it first"
    return f"the nearest line is: {meta['line_text']}"


def _repeated_failure(meta: dict[str, Any]) -> str:
    return "this call failed before; " + _TEMPLATES[meta["first_kind"]]({**meta, **meta["first_meta"]})


_DEFAULTS: dict[str, Template] = {
    "tool_not_found": _tool_not_found,
    "json_decode": lambda meta: "write one tool call as valid JSON",
    "type_error": _type_error,
    "command_not_found": lambda meta: "that command is not installed here",
    "file_not_found": _file_not_found,
    "permission_denied": lambda meta: "use a path inside of the working directory",
    "syntax_error": lambda meta: "the code that ran has a syntax error, look at the line that it names",
    "edit_no_match": _edit_no_match,
    "runtime_error": _runtime_error,
    "test_failure": lambda meta: "a test still fails, compare what it gave with what it wants",
    "timeout": lambda meta: "the command took too long, avoid waiting for input and endless loops",
    "output_capped": lambda meta: "print less, for example with head or grep",
    "out_of_memory": lambda meta: "the command used too much memory, work on less data at a time",
    "connection_error": lambda meta: "there is no network here",
    "repeated_failure": _repeated_failure,
}
for _kind, _template in _DEFAULTS.items():
    register(_kind, _template)
