"""Task sets: by name, from Python, from installed packages, from files; and the split by id."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hintloop.envs import registry
from hintloop.envs.registry import (
    find_taskset,
    get_task,
    is_held_out,
    load_taskset,
    register_task,
    register_taskset,
    split_by_id,
    taskset_names,
)
from hintloop.envs.task import Case, FunctionTests, Task

CASES = (Case((2,), 4), Case((3,), 6))


def task(task_id: str) -> Task:
    return Task(task_id, "Double it.", {}, FunctionTests("s.py", "f", CASES[:1], CASES), {"s.py": "f = 1"})


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    taskset_names()
    for name in ("_LOADERS", "_LOADED", "_FOUND"):
        monkeypatch.setattr(registry, name, dict(getattr(registry, name)))


def test_the_bundled_sets_are_always_known() -> None:
    assert {"bugfix", "humanevalfix", "mbpp", "quixbugs", "exercism"} <= set(taskset_names())


def test_registered_tasks_are_a_set_with_splits() -> None:
    ids = [f"loose/{n}" for n in range(40)]
    for task_id in ids:
        register_task(task(task_id))
    found = load_taskset("loose")
    splits = found.splits()
    assert sorted([*splits["train"], *splits["heldout"]]) == sorted(ids)
    assert get_task("loose/7") == task("loose/7")
    assert "loose" in taskset_names()


@pytest.mark.parametrize("task_id", ["", "loose", "loose/", "/x"])
def test_a_task_needs_a_set_and_a_name(task_id: str) -> None:
    with pytest.raises(ValueError, match="a task id is"):
        register_task(task(task_id))


def test_nothing_is_registered_twice() -> None:
    register_task(task("loose/a"))
    with pytest.raises(ValueError, match="registered already"):
        register_task(task("loose/a"))
    with pytest.raises(ValueError, match="registered already"):
        register_taskset("loose", lambda: load_taskset("bugfix"))
    with pytest.raises(ValueError, match="a task set of its own"):
        register_task(task("bugfix/mine"))
    with pytest.raises(ValueError, match="before the first '/'"):
        register_taskset("a/b", lambda: load_taskset("bugfix"))


def test_unknown_names_are_told_with_the_known_ones() -> None:
    with pytest.raises(KeyError, match="bugfix"):
        find_taskset("nothing")
    with pytest.raises(KeyError, match="no task 'bugfix/nothing'"):
        get_task("bugfix/nothing")


def test_an_installed_package_offers_a_set(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("offered", "hintloop.envs.tasksets.bugfix.taskset:load", registry.ENTRY_POINTS)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point] if group == point.group else [])
    assert "offered" in taskset_names()
    assert load_taskset("offered") is load_taskset("bugfix")


def test_a_python_file_registers_its_set(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from hintloop.envs.registry import register_task\n"
        "from hintloop.envs.task import Case, FunctionTests, Task\n"
        "tests = FunctionTests('s.py', 'f', (Case((1,), 1),), (Case((1,), 1),))\n"
        "register_task(Task('fromfile/one', 'Do it.', {}, tests, {'s.py': 'f = int'}))\n"
    )
    assert find_taskset(str(path)).name == "fromfile"
    assert find_taskset(str(path)).get("fromfile/one").instruction == "Do it."
    empty = tmp_path / "empty.py"
    empty.write_text("")
    with pytest.raises(ValueError, match="must register one task set, not 0"):
        find_taskset(str(empty))
    with pytest.raises(ValueError, match="neither a folder"):
        find_taskset(str(tmp_path / "absent"))


@given(st.lists(st.text(min_size=1), unique=True, max_size=30), st.text(min_size=1))
def test_a_task_stays_in_its_split_when_others_come(ids: list[str], more: str) -> None:
    assume(more not in ids)
    before, after = split_by_id(ids), split_by_id([*ids, more])
    for name in before:
        assert [i for i in after[name] if i in ids] == list(before[name])


def test_about_a_fifth_is_held_out() -> None:
    assert 350 < sum(is_held_out(f"set/{n}") for n in range(2000)) < 450
