"""Hints say what the agent could have looked up, for every kind of error, and nothing of the solution."""

import pytest

from hintloop.agent import hints
from hintloop.envs.errors import KINDS, Cause, tool_error
from hintloop.envs.models import ToolCall
from hintloop.envs.registry import get_task, load_taskset
from hintloop.envs.tools import TOOLS, ToolBox


class Files(dict):
    """The file part of a workspace."""

    def read(self, path):
        if path not in self:
            raise FileNotFoundError(path)
        return self[path]

    def write(self, path, data):
        self[path] = data

    def list_files(self):
        return sorted(self)


@pytest.fixture
def task():
    return get_task(load_taskset("bugfix").splits()["train"][0])


def error_of(task, **call):
    return ToolBox(task, Files({p: t.encode() for p, t in task.files.items()})).call(ToolCall(**call)).error


def edit(**changes):
    return {"path": "solution.py", "line": 2, "old": "??", "new": "1", **changes}


def test_every_kind_of_error_has_a_template():
    assert set(hints.kinds()) >= set(KINDS)


@pytest.mark.parametrize(
    ("call", "kind", "says"),
    [
        ({"name": "edit", "arguments": edit()}, "tool_not_found", "use edit_file"),
        ({"name": "read_file", "arguments": {"path": "main.py"}}, "file_not_found", "solution.py"),
        ({"name": "read_file", "arguments": {}}, "type_error", "read_file needs path"),
        ({"name": "edit_file", "arguments": edit(line="2")}, "type_error", "needs path, old, new"),
        (
            {"name": "read_file", "arguments": {"pth": "solution.py"}},
            "type_error",
            "Hint: there is no pth, use path; read_file needs path",
        ),
        (
            {"name": "edit_file", "arguments": {**edit(), "content": "x"}},
            "type_error",
            "Hint: edit_file needs path, old, new",
        ),
        ({"name": "edit_file", "arguments": edit()}, "edit_no_match", "line 2 is: "),
        (
            {"name": "edit_file", "arguments": edit(line=1, old="return")},
            "edit_no_match",
            "return is in line 2",
        ),
        ({"name": "edit_file", "arguments": edit(line=99)}, "edit_no_match", "the file has 2 lines"),
        ({"malformed": '{"name": "read_file"'}, "json_decode", "valid JSON"),
    ],
)
def test_hint_tells_what_would_have_helped(call, kind, says):
    task = load_taskset("bugfix").get("bugfix/add-twice-sum-of-a-and-twice-b.0.0")
    task = type(task)(
        **{f: getattr(task, f) for f in task.__slots__}
        | {"files": {"solution.py": "def add_twice(a, b):\n    return a + 2 * b"}}
    )
    error = error_of(task, **call)
    assert error.kind == kind
    hint = hints.dispatch(error)
    assert hint.startswith("Hint: ")
    assert says in hint


def test_same_failing_call_again_is_a_repeated_failure_with_the_first_hint_inside(task):
    box = ToolBox(task, Files({"solution.py": b"x = 1"}))
    call = ToolCall(name="read_file", arguments={"path": "main.py"})
    first, second = box.call(call).error, box.call(call).error
    assert (first.kind, second.kind) == ("file_not_found", "repeated_failure")
    assert "solution.py" in hints.dispatch(second)


@pytest.mark.parametrize("cause", [Cause.INFRA, Cause.USER])
def test_only_what_the_model_caused_gets_a_hint(cause):
    error = tool_error("timeout", "too slow").model_copy(update={"cause": cause})
    assert hints.dispatch(error) is None


def test_a_registered_template_replaces_the_default():
    default = hints._TEMPLATES["timeout"]
    try:
        hints.register("timeout", lambda meta: f"mind {meta['command']}")
        assert hints.dispatch(tool_error("timeout", "x", command="sleep 9")) == "Hint: mind sleep 9"
    finally:
        hints.register("timeout", default)


ALL_TOOLS = "tools are read_file, edit_file, run_tests, submit, write_file, bash"
READ = {"path": "main.py", "files": ["a.py", "b.py"]}
LEARNED = [
    ("tool_not_found", {"name": "edit", "tools": list(TOOLS), "nearest": "edit_file"},
     f"there is no edit; use edit_file; {ALL_TOOLS}"),
    ("tool_not_found", {"name": "go", "tools": list(TOOLS), "nearest": None}, f"there is no go; {ALL_TOOLS}"),
    ("tool_not_found", {"name": "go"}, f"there is no go; {ALL_TOOLS}"),
    ("json_decode", {"text": "{"}, "write one tool call as valid JSON"),
    ("type_error", {"name": "edit_file", "required": ["path", "old", "new"]}, "edit_file needs path, old, new"),
    ("type_error", {"name": "submit", "required": []}, "submit needs no arguments"),
    ("command_not_found", {"command": "foo"}, "that command is not installed here"),
    ("file_not_found", READ, "there is no main.py; files are a.py, b.py"),
    ("file_not_found", {"path": "main.py", "files": []}, "there is no main.py; files are none yet"),
    ("permission_denied", {"path": "/etc"}, "use a path inside of the working directory"),
    ("syntax_error", {"command": "x"}, "the code that ran has a syntax error, look at the line that it names"),
    ("edit_no_match", {"num_lines": 3, "line": 9, "old": "x"}, "the file has 3 lines"),
    ("edit_no_match", {"old": "x", "found": [1, 4], "line": 2, "line_text": "y"}, "x is in line 1, 4"),
    ("edit_no_match", {"old": "x", "found": [], "line": 2, "line_text": " y"}, "line 2 is: y"),
    ("edit_no_match", {"old": "x", "found": [], "line_text": None}, "old must be text of the file, read it first"),
    ("edit_no_match", {"old": "x", "found": [], "line_text": "xy"}, "the nearest line is: xy"),
    ("runtime_error", {"command": "x"}, "the command failed, read the last lines of its output"),
    ("timeout", {"command": "x"}, "the command took too long, avoid waiting for input and endless loops"),
    ("output_capped", {"command": "x"}, "print less, for example with head or grep"),
    ("out_of_memory", {"command": "x"}, "the command used too much memory, work on less data at a time"),
    ("repeated_failure", {"first_kind": "file_not_found", "first_meta": READ},
     "this call failed before; there is no main.py; files are a.py, b.py"),
]  # fmt: skip
"""What the bundled student was trained on: these texts stay."""


@pytest.mark.parametrize(("kind", "meta", "text"), LEARNED)
@pytest.mark.parametrize("with_context", [False, True])
def test_the_texts_for_the_bundled_tools_stay_as_the_student_learned_them(kind, meta, text, with_context):
    call = ToolCall(name=meta.get("name", "bash"), arguments={"command": "x", "n": 1})
    known = hints.context(list(TOOLS.values()), call, "Traceback\nZeroDivisionError: x\n", ["z.py"])
    error = tool_error(kind, "message", **meta).model_copy(update={"cause": Cause.MODEL})
    assert hints.dispatch(error, known if with_context else None) == f"Hint: {text}"


@pytest.mark.parametrize(
    ("meta", "files", "says"),
    [
        ({"command": "cat x", "files": ["made.py"]}, ["a.py"], "files are made.py"),
        ({"command": "cat x", "files": []}, ["a.py"], "files are none yet"),
        ({"command": "cat x"}, ["a.py", "b.py"], "files are a.py, b.py"),
        ({"command": "cat x"}, [f"{number}.py" for number in range(99)], "19.py"),
        ({"command": "cat x"}, [], "look which files there are"),
    ],
)
def test_a_command_that_misses_a_file_is_told_of_those_that_are_known(meta, files, says):
    call = ToolCall(name="bash", arguments={"command": "cat x"})
    hint = hints.dispatch(tool_error("file_not_found", "x", **meta), hints.context([], call, "", files))
    assert hint.startswith("Hint: ")
    assert hint.endswith(says)


def test_the_bundled_tools_are_those_of_the_environment():
    assert set(hints.BUNDLED) == set(TOOLS)


SEARCH = {
    "name": "search",
    "description": "Search.",
    "parameters": {
        "type": "object",
        "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}, "free": {}},
        "required": ["query", "limit", "free"],
    },
}


@pytest.mark.parametrize(
    ("kind", "meta", "says"),
    [
        ("tool_not_found", {"name": "find", "nearest": None}, "there is no find; tools are read_file, bash, search"),
        ("type_error", {"name": "search", "required": ["query", "limit", "free"]},
         "search needs query (string), limit (integer), free (any)"),
        ("runtime_error", {}, "search failed: c / d / E: no such index"),
        ("repeated_failure", {"first_kind": "runtime_error", "first_meta": {}},
         "this call failed before; search failed: c / d / E: no such index"),
    ],
)  # fmt: skip
def test_hints_for_other_tools_say_what_the_task_has(kind, meta, says):
    tools = [SEARCH, TOOLS["bash"], TOOLS["read_file"]]
    known = hints.context(
        tools, ToolCall(name="search", arguments={"query": 1}), "a\nb\n c\n\nd\nE: no such index\n"
    )
    assert hints.dispatch(tool_error(kind, "x", **meta), known) == f"Hint: {says}"


def test_a_template_gets_the_call_its_schema_and_the_end_of_its_output():
    default = hints._TEMPLATES["timeout"]
    seen = []
    try:
        hints.register("timeout", lambda meta: seen.append(meta) or "x")
        call = ToolCall(name="search", arguments={"query": "q"})
        hints.dispatch(tool_error("timeout", "x", name="meta wins"), hints.context([SEARCH], call, "y" * 999))
        hints.dispatch(tool_error("timeout", "x"), hints.context([SEARCH], ToolCall(malformed="{"), ""))
    finally:
        hints.register("timeout", default)
    assert seen[0] == {
        "tools": ["search"],
        "tail": "y" * 200,
        "name": "meta wins",
        "arguments": {"query": "q"},
        "schema": SEARCH["parameters"],
    }
    assert seen[1] == {"tools": ["search"], "tail": ""}


def test_a_task_without_visible_tests_is_not_told_of_run_tests():
    tools = [spec for name, spec in TOOLS.items() if name != "run_tests"]
    known = hints.context(tools, ToolCall(name="go"), "")
    hint = hints.dispatch(tool_error("tool_not_found", "x", name="go"), known)
    assert hint == "Hint: there is no go; tools are read_file, edit_file, submit, write_file, bash"
