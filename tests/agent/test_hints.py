"""Hints say what the agent could have looked up, for every kind of error, and nothing of the solution."""

import pytest

from hintloop.agent import hints
from hintloop.envs.errors import KINDS, Cause, tool_error
from hintloop.envs.models import ToolCall
from hintloop.envs.registry import get_task, load_taskset
from hintloop.envs.tools import ToolBox


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
