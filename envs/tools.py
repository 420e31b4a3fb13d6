"""The tools an agent has: their schemas, what they do in a workspace, and how they fail.

A tool never raises for what the agent did wrong: that comes back as a typed ``ToolError`` in the result.
``SandboxDead`` passes through, for the environment to report as an infrastructure failure.
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from hintloop.envs.errors import ToolError, tool_error
from hintloop.envs.grading.grade import has_visible_tests, run_visible
from hintloop.envs.models import ToolCall, ToolResult
from hintloop.envs.sandbox.base import CallResult, ExecResult, SandboxProvider, Status
from hintloop.envs.task import Task

_STRING = {"type": "string"}
_INTEGER = {"type": "integer"}
MAX_READ_CHARS = 20_000
MAX_LINE_CHARS = 200
"""How much of a line an error repeats or compares."""
MAX_COMPARED_LINES = 1_000
MAX_BASH_SECONDS = 30.0
MAX_LISTED_FILES = 20
"""How many files an error names."""


def _spec(name: str, description: str, required: dict[str, Any], optional: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": required | optional, "required": list(required)}
    return {"name": name, "description": description, "parameters": parameters}


TOOLS: dict[str, dict[str, Any]] = {
    spec["name"]: spec
    for spec in (
        _spec("read_file", "Show a file with line numbers.", {"path": _STRING}, {}),
        _spec("write_file", "Write a whole file.", {"path": _STRING, "content": _STRING}, {}),
        _spec(
            "edit_file",
            "Replace the text `old` by `new`, within line number `line` if given, else where `old` occurs once.",
            {"path": _STRING, "old": _STRING, "new": _STRING},
            {"line": _INTEGER},
        ),
        _spec("bash", "Run a shell command in the working directory.", {"command": _STRING}, {}),
        _spec("run_tests", "Run the visible tests.", {}, {}),
        _spec("submit", "Hand in the work and end the episode.", {}, {}),
    )
}
"""Function specs by tool name; a task whose tests are all hidden has no ``run_tests``."""

TOOL_PROMPT = "read_file(path), edit_file(path, line, old, new), run_tests(), submit()"
"""The tools in one line, for models too small for the schemas (which cost about 650 tokens)."""
_UNTESTED_PROMPT = "read_file(path), edit_file(path, line, old, new), bash(command), submit()"

_TYPES: dict[str, type] = {"string": str, "integer": int}


class Workspace(Protocol):
    """What the tools need of a sandbox; see ``hintloop.envs.sandbox.base.Sandbox``."""

    def exec(self, command: str, *, timeout: float, stdin: bytes = b"") -> ExecResult: ...
    def call_function(
        self, path: str, function: str, calls: Sequence[Sequence[Any]], *, timeout: float
    ) -> list[CallResult]: ...
    def read(self, path: str) -> bytes: ...
    def write(self, path: str, data: bytes) -> None: ...
    def list_files(self) -> list[str]: ...


class _Failed(Exception):
    """Carries a ``ToolError`` from where it was found to ``ToolBox.call``."""

    def __init__(self, error: ToolError):
        self.error = error


class ToolBox:
    """The tools of one episode. ``provider`` is for visible tests that need a sandbox of their own."""

    def __init__(self, task: Task, workspace: Workspace, provider: SandboxProvider | None = None):
        self._task = task
        self._workspace = workspace
        self._provider = provider
        self.specs = tool_specs(task)
        self._last_failure: ToolCall | None = None
        self._run: dict[str, Callable[..., ToolResult]] = {
            "read_file": self._read_file,
            "write_file": self._write_file,
            "edit_file": self._edit_file,
            "bash": self._bash,
            "run_tests": self._run_tests,
            "submit": lambda: ToolResult(output="submitted"),
        }

    def call(self, call: ToolCall) -> ToolResult:
        """Execute one call. Raises ``SandboxDead`` only."""
        start = time.monotonic()
        try:
            check_call(call, self.specs)
            result = self._run[call.name](**call.arguments)
        except _Failed as failed:
            result = failure(failed.error)
        if result.error is not None and result.error.kind != "test_failure":
            if call == self._last_failure:
                result = result.model_copy(update={"error": _repeated(result.error)})
            self._last_failure = call
        else:
            self._last_failure = None
        return result.model_copy(update={"seconds": time.monotonic() - start})

    def _read_file(self, path: str) -> ToolResult:
        lines = self._text(path).split("\n")
        text = "\n".join(f"{number}: {line}" for number, line in enumerate(lines, 1))
        if len(text) > MAX_READ_CHARS:
            text = text[:MAX_READ_CHARS] + f"\n[cut: the file has {len(lines)} lines]"
        return ToolResult(output=text)

    def _write_file(self, path: str, content: str) -> ToolResult:
        self._save(path, content)
        return ToolResult(output="ok")

    def _edit_file(self, path: str, old: str, new: str, line: int | None = None) -> ToolResult:
        text = self._text(path)
        edited = replace_once(text, old, new) if line is None else replace_in_line(text, line, old, new)
        self._save(path, edited)
        return ToolResult(output="ok")

    def _bash(self, command: str) -> ToolResult:
        result = self._workspace.exec(command, timeout=MAX_BASH_SECONDS)
        error = classify_exec(command, result)
        if error is not None and error.kind == "file_not_found":
            error = error.model_copy(update={"meta": error.meta | {"files": self._files()}})
        output = result.output if error is None else f"error: {error.message}\n{result.output}"
        return ToolResult(output=output, error=error, exit_code=result.exit_code)

    def _run_tests(self) -> ToolResult:
        result = run_visible(self._provider, self._task, self._workspace)
        error = None if result.passed else tool_error("test_failure", result.output)
        return ToolResult(output=result.output, exit_code=0 if result.passed else 1, error=error)

    def _text(self, path: str) -> str:
        try:
            return self._workspace.read(path).decode("utf-8", errors="replace")
        except FileNotFoundError:
            raise _Failed(self._no_file(path)) from None
        except PermissionError:
            raise _Failed(tool_error("permission_denied", f"not allowed: {path[:80]}", path=path)) from None

    def _save(self, path: str, text: str) -> None:
        try:
            self._workspace.write(path, text.encode(errors="replace"))
        except PermissionError:
            raise _Failed(tool_error("permission_denied", f"not allowed: {path[:80]}", path=path)) from None

    def _no_file(self, path: str) -> ToolError:
        return tool_error("file_not_found", f"no such file: {path[:80]}", path=path, files=self._files())

    def _files(self) -> list[str]:
        return self._workspace.list_files()[:MAX_LISTED_FILES]


def tool_specs(task: Task) -> dict[str, dict[str, Any]]:
    """The specs of the tools that a task's agent has, by name."""
    return {name: spec for name, spec in TOOLS.items() if name != "run_tests" or has_visible_tests(task)}


def tool_prompt(task: Task) -> str:
    """The same in one line; see ``TOOL_PROMPT``."""
    return TOOL_PROMPT if has_visible_tests(task) else _UNTESTED_PROMPT


def failure(error: ToolError) -> ToolResult:
    """The result that tells the agent of an error."""
    return ToolResult(output=f"error: {error.message}", error=error)


def check_call(call: ToolCall, tools: Mapping[str, dict[str, Any]]) -> None:
    """Raise when the call cannot be executed: unparsed, unknown tool, or arguments that do not fit the schema."""
    if call.malformed is not None:
        message = "bad JSON in the tool call" if "{" in call.malformed else "no tool call"
        raise _Failed(tool_error("json_decode", message, text=call.malformed[:200]))
    if call.name not in tools:
        nearest = difflib.get_close_matches(call.name, tools, n=1)
        meta = {"name": call.name[:40], "tools": list(tools), "nearest": nearest[0] if nearest else None}
        raise _Failed(tool_error("tool_not_found", f"unknown tool: {call.name[:40]}", **meta))
    parameters = tools[call.name]["parameters"]
    problem = _argument_problem(call.arguments, parameters["properties"], parameters["required"])
    if problem:
        meta = {"name": call.name, "required": parameters["required"]}
        meta |= _misspelt(call.arguments, parameters["properties"])
        raise _Failed(tool_error("type_error", problem, **meta))


def _misspelt(arguments: dict[str, Any], properties: dict[str, Any]) -> dict[str, str]:
    """The first argument that there is not, with the nearest that there is and that was not given, if any is near."""
    free = [name for name in properties if name not in arguments]
    for name in arguments:
        if name not in properties and (nearest := difflib.get_close_matches(name[:40], free, n=1)):
            return {"unknown": name[:40], "nearest": nearest[0]}
    return {}


def _argument_problem(
    arguments: dict[str, Any], properties: dict[str, Any], required: list[str]
) -> str | None:
    for name in required:
        if name not in arguments:
            return f"missing argument: {name}"
    for name, value in arguments.items():
        if name not in properties:
            return f"unknown argument: {name[:40]}"
        wanted = properties[name]["type"]
        if type(value) is not _TYPES[wanted]:
            return f"{name} must be {'an' if wanted == 'integer' else 'a'} {wanted}"
    return None


def replace_in_line(text: str, line: int, old: str, new: str) -> str:
    """``text`` with the first ``old`` within line number ``line`` (from 1) replaced."""
    lines = text.split("\n")
    if not 1 <= line <= len(lines):
        message = f"no line {line}, the file has {len(lines)} lines"
        raise _Failed(tool_error("edit_no_match", message, line=line, num_lines=len(lines), old=old))
    content = lines[line - 1]
    if not old or old not in content:
        found = [number for number, other in enumerate(lines, 1) if old and old in other]
        message = f"old text not found in line {line}: {content[:MAX_LINE_CHARS]}"
        raise _Failed(
            tool_error(
                "edit_no_match",
                message,
                line=line,
                line_text=content[:MAX_LINE_CHARS],
                old=old,
                found=found[:5],
            )
        )
    lines[line - 1] = content.replace(old, new, 1)
    return "\n".join(lines)


def replace_once(text: str, old: str, new: str) -> str:
    """``text`` with ``old``, which must occur exactly once, replaced."""
    count = text.count(old) if old else 0
    if count == 1:
        return text.replace(old, new, 1)
    if count > 1:
        found = [number for number, line in enumerate(text.split("\n"), 1) if old.split("\n")[0] in line]
        message = f"old text found {count} times: give its line"
        raise _Failed(tool_error("edit_no_match", message, old=old, found=found[:5]))
    first = old.split("\n")[0][:MAX_LINE_CHARS]  # bounded, for the comparison takes quadratic time
    lines = [line[:MAX_LINE_CHARS] for line in text.split("\n")[:MAX_COMPARED_LINES]]
    nearest = difflib.get_close_matches(first, lines, n=1, cutoff=0.3)
    message = "old text not found" + (f", the nearest line is: {nearest[0]}" if nearest else "")
    raise _Failed(
        tool_error("edit_no_match", message, old=old, found=[], line_text=nearest[0] if nearest else None)
    )


def classify_exec(command: str, result: ExecResult) -> ToolError | None:
    """The tool error in a command's outcome, if any."""
    by_status = {
        Status.TIMEOUT: "timeout",
        Status.OOM: "out_of_memory",
        Status.OUTPUT_CAPPED: "output_capped",
    }
    if result.status is Status.OK:
        return None
    kind = by_status.get(result.status)
    if kind is None:
        kind = _classify_text(result.exit_code, result.output)
    return tool_error(kind, f"{kind.replace('_', ' ')} (exit code {result.exit_code})", command=command[:200])


def _classify_text(exit_code: int | None, output: str) -> str:
    if exit_code == 127:
        return "command_not_found"
    for needle, kind in (
        ("Permission denied", "permission_denied"),
        ("No such file or directory", "file_not_found"),
        ("SyntaxError", "syntax_error"),
        ("IndentationError", "syntax_error"),
    ):
        if needle in output:
            return kind
    return "runtime_error"


def _repeated(error: ToolError) -> ToolError:
    meta = {"first_kind": error.kind, "first_meta": error.meta}
    return tool_error("repeated_failure", error.message, **meta)
