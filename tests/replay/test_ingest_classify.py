"""What counts as an error, of which kind, and whose doing it is."""

from __future__ import annotations

import pytest

from hintloop.agent import hints
from hintloop.envs.errors import KINDS
from hintloop.replay.ingest.classify import CAUSES, Failure, classify
from hintloop.replay.ingest.trace import ToolCall, ToolResult


def verdict(
    text: str,
    name: str = "Bash",
    flag: bool | None = True,
    code: int | None = None,
    refused: bool = False,
) -> str | None:
    found = classify(ToolCall("c", name, "{}", ToolResult(text, flag, code, refused=refused)))
    return f"{found.cause}/{found.kind}" if found else None


def test_kinds_and_causes_are_those_of_the_live_errors() -> None:
    assert CAUSES.items() <= {kind: str(cause) for kind, cause in KINDS.items()}.items()
    assert {kind for kind, cause in CAUSES.items() if cause == "model"} <= set(hints.kinds())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<tool_use_error>InputValidationError: Task failed</tool_use_error>", "model/type_error"),
        ("<tool_use_error>File has not been read yet. Read it first</tool_use_error>", "model/edit_no_match"),
        ("<tool_use_error>String to replace not found in file.</tool_use_error>", "model/edit_no_match"),
        ("<tool_use_error>Error: No such tool available: Foo</tool_use_error>", "model/tool_not_found"),
        ("<tool_use_error>something new</tool_use_error>", "model/runtime_error"),
        ("File content (30000 tokens) exceeds maximum allowed tokens (25000).", "model/output_capped"),
        ("EISDIR: illegal operation on a directory, read", "model/file_not_found"),
        ("File does not exist.", "model/file_not_found"),
        ("Exit code 127\nbash: lss: command not found", "model/command_not_found"),
        ("  File 'a.py', line 1\nSyntaxError: invalid syntax", "model/syntax_error"),
        ("Traceback (most recent call last):\nValueError: x", "model/runtime_error"),
        ("cat: /etc/shadow: Permission denied", "model/permission_denied"),
        ("Command timed out after 2m 0.0s", "model/timeout"),
        ("===== 2 failed, 3 passed in 1.2s =====", "user/test_failure"),
        ("Tests:       1 failed, 4 passed", "user/test_failure"),
        ("curl: (6) Could not resolve host: example.org", "infra/connection_error"),
        ("Request failed with status code 503", "infra/connection_error"),
        ("Claude requested permissions to write, but you haven't granted it yet.", "user/permission_denied"),
        ("The user doesn't want to proceed with this tool use.", "user/permission_denied"),
        ("[Request interrupted by user for tool use]", "user/permission_denied"),
        ("PreToolUse:Bash hook error: blocked by the hook", "user/permission_denied"),
    ],
)
def test_flagged_texts(text: str, expected: str) -> None:
    assert verdict(text) == expected


@pytest.mark.parametrize(
    ("text", "code", "expected"),
    [
        ("", 0, None),
        ("SyntaxError in the docs", 0, None),
        ("no", 1, "model/runtime_error"),
        ("", 1, "infra/runtime_error"),
        ("no", 127, "model/command_not_found"),
        ("no", 124, "model/timeout"),
        ("Killed", 137, "infra/out_of_memory"),
        ("Out of memory: killed", 137, "model/out_of_memory"),
        ("", -1, "infra/timeout"),
        ("^C", 130, "user/permission_denied"),
        ("make: 3 failed", 2, "user/test_failure"),
        ("10 failed", 1, "user/test_failure"),
        ("0 failed, but no", 1, "model/runtime_error"),
    ],
)
def test_exit_codes_without_flag(text: str, code: int, expected: str | None) -> None:
    assert verdict(text, "shell", None, code) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("apply_patch verification failed: Failed to find expected lines", "model/edit_no_match"),
        ("failed to parse function arguments: missing field `command`", "model/type_error"),
        ("unsupported call: foo", "model/tool_not_found"),
        ("<tool_use_error>InputValidationError: x</tool_use_error>", "model/type_error"),
        ("1→ raise InputValidationError  # apply_patch verification failed", None),
        ("Plan updated", None),
    ],
)
def test_a_failure_without_flag_or_code_is_told_by_how_it_begins(text: str, expected: str | None) -> None:
    assert verdict(text, "apply_patch", None) == expected


def test_a_refused_call_is_the_users_doing_whatever_its_text() -> None:
    assert verdict("SyntaxError", refused=True) == "user/permission_denied"


def test_an_unknown_error_of_an_unknown_tool_is_nobodys() -> None:
    assert verdict("quota of the widget service", "mcp__widget") == "infra/runtime_error"


def test_the_message_is_short_and_without_tags() -> None:
    text = f"<tool_use_error>InputValidationError: {'x' * 10_000}</tool_use_error>"
    found = classify(ToolCall("c", "Edit", "{}", ToolResult(text, True)))
    assert isinstance(found, Failure)
    assert found.message.startswith("InputValidationError: xxx")
    assert len(found.message) == 2000


def test_a_call_without_result_is_no_error() -> None:
    assert classify(ToolCall("c", "Edit", "{}")) is None
