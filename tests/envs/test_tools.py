"""The tools: what they do in a real sandbox, and that every mistake of the agent comes back as typed data."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hintloop.envs.errors import Cause
from hintloop.envs.models import ToolCall, ToolResult
from hintloop.envs.sandbox.base import ExecResult, Sandbox, SandboxDead, Status
from hintloop.envs.sandbox.local import LocalProvider
from hintloop.envs.task import Case, FunctionTests, Task
from hintloop.envs.tools import (
    MAX_READ_CHARS,
    TOOL_PROMPT,
    TOOLS,
    ToolBox,
    classify_exec,
    replace_in_line,
    replace_once,
)

PATH = "solution.py"
CODE = "def add(a, b):\n    c = a\n    c = c\n    return c - b\n"
MENDED = CODE.replace("c - b", "c + b")
CASES = (Case((1, 2), 3), Case((2, 0), 2))
TASK = Task("tools/add", "add", {PATH: CODE}, FunctionTests(PATH, "add", CASES, CASES), {PATH: MENDED})


@pytest.fixture(scope="module")
def provider() -> Iterator[LocalProvider]:
    with LocalProvider() as local:
        yield local


@pytest.fixture
def sandbox(provider: LocalProvider) -> Iterator[Sandbox]:
    made = provider.start(dict(TASK.files))
    yield made
    made.close()


@pytest.fixture
def box(sandbox: Sandbox) -> ToolBox:
    return ToolBox(TASK, sandbox)


def call(box: ToolBox, name: str, **arguments: Any) -> ToolResult:
    return box.call(ToolCall(name=name, arguments=arguments))


def kind(result: ToolResult) -> str | None:
    return result.error.kind if result.error else None


def test_read_file_numbers_the_lines(box: ToolBox) -> None:
    result = call(box, "read_file", path=PATH)
    assert result.output.split("\n")[:2] == ["1: def add(a, b):", "2:     c = a"]
    assert result.error is None


def test_read_file_cuts_long_files_and_says_so(box: ToolBox) -> None:
    call(box, "write_file", path="long", content="x" * 99 + "\n" + "y\n" * MAX_READ_CHARS)
    output = call(box, "read_file", path="long").output
    assert len(output) < MAX_READ_CHARS + 100
    assert output.endswith(f"[cut: the file has {MAX_READ_CHARS + 2} lines]")


def test_write_file_makes_folders(box: ToolBox, sandbox: Sandbox) -> None:
    assert call(box, "write_file", path="a/b.txt", content="é").output == "ok"
    assert sandbox.read("a/b.txt") == "é".encode()


def test_edit_file_with_a_line_changes_that_line_only(box: ToolBox, sandbox: Sandbox) -> None:
    assert call(box, "edit_file", path=PATH, line=3, old="c", new="a").output == "ok"
    assert sandbox.read(PATH).decode() == CODE.replace("    c = c", "    a = c")


def test_edit_file_without_a_line_changes_the_only_occurrence(box: ToolBox, sandbox: Sandbox) -> None:
    assert call(box, "edit_file", path=PATH, old="c - b", new="c + b").output == "ok"
    assert sandbox.read(PATH).decode() == MENDED


def test_run_tests_shows_the_first_failure_and_then_success(box: ToolBox) -> None:
    failing = call(box, "run_tests")
    assert failing.output == "1/2 pass, FAIL add(1, 2) gave -1 want 3"
    assert failing.exit_code == 1
    assert failing.error is not None
    assert (failing.error.kind, failing.error.cause) == ("test_failure", Cause.USER)
    call(box, "edit_file", path=PATH, old="c - b", new="c + b")
    passing = call(box, "run_tests")
    assert (passing.output, passing.exit_code, passing.error) == ("2/2 pass", 0, None)


@pytest.mark.parametrize(
    ("code", "got"),
    [
        ("def add(a, b:\n", "SyntaxError"),
        ("x = 1\n", "AttributeError"),
        ("def add(a, b):\n    return [][0]\n", "IndexError"),
        ("def add(a, b):\n    while True: pass\n", "Timeout"),
        ("def add(a, b):\n    return float(a + b)\n", "3.0"),
    ],
)
def test_run_tests_tells_how_the_code_fails(box: ToolBox, code: str, got: str) -> None:
    call(box, "write_file", path=PATH, content=code)
    result = call(box, "run_tests")
    assert kind(result) == "test_failure"
    assert f"gave {got} want 3" in result.output


def test_bash_runs_in_the_working_directory(box: ToolBox) -> None:
    result = call(box, "bash", command="ls")
    assert (result.output, result.exit_code, result.error) == ("solution.py\n", 0, None)
    assert result.seconds > 0


def test_a_command_that_misses_a_file_tells_which_there_are(box: ToolBox) -> None:
    call(box, "write_file", path="made.py", content="x = 1")
    error = call(box, "bash", command="cat nothing").error
    assert error is not None
    assert error.meta == {"command": "cat nothing", "files": ["made.py", PATH]}


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("no_such_program", "command_not_found"),
        ("cat nothing", "file_not_found"),
        ("echo x > /etc/passwd", {"permission_denied", "runtime_error"}),
        ("python3 -c 'def'", "syntax_error"),
        ("python3 -c '1/0'", "runtime_error"),
        ("exit 3", "runtime_error"),
    ],
)
def test_bash_errors_are_classified_and_keep_their_output(
    box: ToolBox, command: str, expected: str | set[str]
) -> None:
    result = call(box, "bash", command=command)
    assert kind(result) in ({expected} if isinstance(expected, str) else expected)
    assert result.output.startswith("error: ")
    assert result.exit_code not in (0, None)


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (Status.OK, None),
        (Status.TIMEOUT, "timeout"),
        (Status.OOM, "out_of_memory"),
        (Status.OUTPUT_CAPPED, "output_capped"),
    ],
)
def test_what_stopped_a_command_is_its_kind_of_error(status: Status, expected: str | None) -> None:
    error = classify_exec("x", ExecResult(status, None, "SyntaxError", 1.0))
    assert (error.kind if error else None) == expected


@pytest.mark.parametrize(
    ("made", "expected", "says"),
    [
        (ToolCall(malformed='{"name": '), "json_decode", "bad JSON in the tool call"),
        (ToolCall(malformed="I would read the file"), "json_decode", "no tool call"),
        (ToolCall(name="reed_file"), "tool_not_found", "unknown tool: reed_file"),
        (ToolCall(name="read_file"), "type_error", "missing argument: path"),
        (ToolCall(name="read_file", arguments={"path": 3}), "type_error", "path must be a string"),
        (ToolCall(name="read_file", arguments={"path": PATH, "x": 1}), "type_error", "unknown argument: x"),
        (
            ToolCall(name="edit_file", arguments={"path": PATH, "old": "a", "new": "b", "line": True}),
            "type_error",
            "line must be an integer",
        ),
        (ToolCall(name="read_file", arguments={"path": "nope"}), "file_not_found", "no such file: nope"),
        (ToolCall(name="read_file", arguments={"path": "../x"}), "permission_denied", "not allowed: ../x"),
        (ToolCall(name="read_file", arguments={"path": "."}), "permission_denied", "not allowed: ."),
        (
            ToolCall(name="write_file", arguments={"path": "/etc/x", "content": ""}),
            "permission_denied",
            "not allowed: /etc/x",
        ),
        (
            ToolCall(name="edit_file", arguments={"path": PATH, "old": "c", "new": "b"}),
            "edit_no_match",
            "old text found",
        ),
        (
            ToolCall(name="edit_file", arguments={"path": PATH, "old": "return c * b", "new": ""}),
            "edit_no_match",
            "old text not found, the nearest line is:     return c - b",
        ),
        (
            ToolCall(name="edit_file", arguments={"path": PATH, "old": "return", "new": "", "line": 9}),
            "edit_no_match",
            "no line 9, the file has 5 lines",
        ),
        (
            ToolCall(name="edit_file", arguments={"path": PATH, "old": "return", "new": "", "line": 1}),
            "edit_no_match",
            "old text not found in line 1: def add(a, b):",
        ),
        (
            ToolCall(name="edit_file", arguments={"path": PATH, "old": "", "new": "x"}),
            "edit_no_match",
            "old text not found",
        ),
    ],
)
def test_a_mistake_is_an_error_of_the_agent(box: ToolBox, made: ToolCall, expected: str, says: str) -> None:
    result = box.call(made)
    assert result.error is not None
    assert (result.error.kind, result.error.cause) == (expected, Cause.MODEL)
    assert result.output.startswith(f"error: {says}")


def test_errors_carry_what_a_hint_needs(box: ToolBox) -> None:
    unknown = call(box, "reed_file").error
    assert unknown is not None
    assert unknown.meta["nearest"] == "read_file"
    missing = call(box, "read_file", path="nope").error
    assert missing is not None
    assert missing.meta["files"] == [PATH]
    elsewhere = call(box, "edit_file", path=PATH, line=1, old="return", new="").error
    assert elsewhere is not None
    assert elsewhere.meta["found"] == [4]


def test_the_same_failing_call_again_is_a_repeated_failure(box: ToolBox) -> None:
    first, second, third = (call(box, "read_file", path="nope") for _ in range(3))
    assert [kind(result) for result in (first, second, third)] == [
        "file_not_found",
        "repeated_failure",
        "repeated_failure",
    ]
    assert third.error is not None
    assert third.error.meta["first_kind"] == "file_not_found"
    assert second.output == first.output
    call(box, "read_file", path=PATH)
    assert kind(call(box, "read_file", path="nope")) == "file_not_found"


def test_failing_tests_are_never_a_repeated_failure(box: ToolBox) -> None:
    assert [kind(call(box, "run_tests")) for _ in range(2)] == ["test_failure", "test_failure"]


def test_a_dead_sandbox_passes_through(box: ToolBox, sandbox: Sandbox) -> None:
    sandbox.close()
    for name, arguments in (("read_file", {"path": PATH}), ("bash", {"command": "ls"}), ("run_tests", {})):
        with pytest.raises(SandboxDead):
            call(box, name, **arguments)


def test_a_hopeless_edit_of_a_huge_line_is_answered_quickly_and_briefly() -> None:
    letters = "".join(chr(0x4E00 + i) for i in range(300))
    text = letters * 500
    start = time.process_time()
    for edit in (
        lambda: replace_once(text, text[::-1], ""),
        lambda: replace_in_line(text, 1, "absent", ""),
    ):
        with pytest.raises(Exception) as failed:  # noqa: PT011 - the type is private to the module
            edit()
        assert len(failed.value.error.message) < 400  # type: ignore[attr-defined]
    assert time.process_time() - start < 1.0


@given(st.lists(st.text("ab ", max_size=6), min_size=1, max_size=6), st.data())
def test_an_edit_by_line_touches_no_other_line(lines: list[str], data: st.DataObject) -> None:
    number = data.draw(st.integers(1, len(lines)))
    old = data.draw(
        st.sampled_from(["a", "b", " ", "ab"]).filter(lambda old: old in lines[number - 1]) | st.none()
    )
    if old is None:
        return
    edited = replace_in_line("\n".join(lines), number, old, "X\nY").split("\n")
    assert edited[: number - 1] == lines[: number - 1]
    assert edited[number + 1 :] == lines[number:]
    assert "\n".join(edited[number - 1 : number + 1]) == lines[number - 1].replace(old, "X\nY", 1)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 10) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from([*sorted(set(TOOLS) - {"bash"}), "", "rm"]),
    arguments=st.dictionaries(
        st.sampled_from(["path", "old", "new", "line", "content", "x"]),
        st.sampled_from([PATH, "", "a/b", "\x00", "/", "x" * 5000]) | JSON,
        max_size=5,
    ),
)
def test_no_call_makes_the_tools_raise(box: ToolBox, name: str, arguments: dict[str, Any]) -> None:
    result = box.call(ToolCall(name=name, arguments=arguments))
    assert (result.error is not None) == result.output.startswith("error: ") or kind(result) == "test_failure"
    assert result.error is None or result.error.cause is not Cause.INFRA
    assert not result.done


def test_the_prompt_line_agrees_with_the_schemas() -> None:
    for text in TOOL_PROMPT.removesuffix(")").split("), "):
        name, _, parameters = text.partition("(")
        wanted = set(TOOLS[name]["parameters"]["properties"])
        assert set(filter(None, parameters.split(", "))) == wanted
