"""Tasks that are fit for training pass every check; each way to be unfit fails the check that names it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hintloop.envs.check import check_task
from hintloop.envs.harbor import load_taskset_folder
from hintloop.envs.sandbox.local import LocalProvider
from hintloop.envs.skeleton import KINDS, write_skeleton
from hintloop.envs.task import Case, FunctionTests, Script, Task

GOOD, BAD = "def double(x):\n    return x * 2\n", "def double(x):\n    return x + 2\n"
CASES = tuple(Case((x,), 2 * x) for x in range(4))
TASK = Task(
    "checked/double",
    "Mend `solution.py`: double should give twice its argument",
    {"solution.py": BAD},
    FunctionTests("solution.py", "double", CASES[:2], CASES),
    {"solution.py": GOOD},
)


@pytest.fixture(scope="module")
def provider() -> Iterator[LocalProvider]:
    with LocalProvider() as made:
        yield made


def failed(provider: LocalProvider, task: Task) -> set[str]:
    return {finding.check for finding in check_task(provider, task, times=2) if not finding.passed}


def test_a_good_task_passes_everything(provider: LocalProvider) -> None:
    findings = check_task(provider, TASK, times=2)
    assert len(findings) >= 7
    assert all(finding.passed and not finding.detail for finding in findings)


@pytest.mark.parametrize(
    ("change", "checks"),
    [
        ({"instruction": " "}, {"static.manifest"}),
        ({"max_turns": 0}, {"static.manifest"}),
        ({"instruction": "Mend `other.py`"}, {"runtime.task_declaration_accuracy"}),
        ({"solution": {"solution.py": BAD}}, {"semantic.oracle_max"}),
        ({"files": {"solution.py": GOOD}}, {"semantic.floor_gap"}),
        ({"files": {"solution.py": BAD, "backup.py": GOOD}}, {"semantic.no_solution_leakage"}),
    ],
)
def test_what_is_wrong_fails_its_check(
    provider: LocalProvider, change: dict[str, object], checks: set[str]
) -> None:
    assert failed(provider, replace(TASK, **change)) == checks  # type: ignore[arg-type]


def test_a_grader_that_changes_its_mind_is_found(provider: LocalProvider) -> None:
    chance = "import random\ndef double(x):\n    return x * random.choice([2] * 9 + [3])\n"
    task = replace(TASK, solution={"solution.py": chance}, tests=replace(TASK.tests, hidden=CASES * 12))
    assert "semantic.verifier_determinism" in failed(provider, task)


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_task_of_each_kind_is_fit_as_it_stands(
    provider: LocalProvider, tmp_path: Path, kind: str
) -> None:
    write_skeleton(tmp_path / "mine" / kind, kind)
    found = load_taskset_folder(tmp_path / "mine")
    (task_id,) = [task_id for ids in found.splits().values() for task_id in ids]
    assert task_id == f"mine/{kind}"
    assert failed(provider, found.get(task_id)) == set()


def test_a_solution_script_without_a_time_limit_is_found(provider: LocalProvider, tmp_path: Path) -> None:
    write_skeleton(tmp_path / "mine" / "one", "fix")
    task = load_taskset_folder(tmp_path / "mine").get("mine/one")
    assert isinstance(task.solution, Script)
    slow = replace(task, solution=replace(task.solution, timeout=7200.0))
    assert failed(provider, slow) == {"static.timeout_ceiling"}


def test_a_solution_that_fails_is_told(provider: LocalProvider, tmp_path: Path) -> None:
    write_skeleton(tmp_path / "mine" / "one", "fix")
    task = load_taskset_folder(tmp_path / "mine").get("mine/one")
    assert isinstance(task.solution, Script)
    broken = replace(task, solution=replace(task.solution, command="exit 3"))
    assert failed(provider, broken) == {"semantic.oracle_max"}


def test_a_task_that_fails_says_what_its_tests_said(provider: LocalProvider, tmp_path: Path) -> None:
    write_skeleton(tmp_path / "mine" / "one", "fix")
    task = load_taskset_folder(tmp_path / "mine").get("mine/one")
    assert isinstance(task.solution, Script)
    script = replace(task.solution, command="true")
    findings = check_task(provider, replace(task, solution=script), times=1)
    (oracle,) = [finding for finding in findings if finding.check == "semantic.oracle_max"]
    assert "its tests said: " in oracle.detail
    assert "FAILED" in oracle.detail or "assert" in oracle.detail


def test_a_skeleton_is_made_whole_or_not_at_all(tmp_path: Path) -> None:
    write_skeleton(tmp_path / "task", "fix")
    before = sorted(path.name for path in (tmp_path / "task").rglob("*"))
    assert {"instruction.md", "task.toml", "Dockerfile", "test.sh", "solve.sh"} <= set(before)
    assert "local/task" in (tmp_path / "task" / "task.toml").read_text()
    with pytest.raises(FileExistsError, match="exists already"):
        write_skeleton(tmp_path / "task", "write")
    for name, kind in (("bad name", "fix"), ("other", "port")):
        with pytest.raises(ValueError, match="a task"):
            write_skeleton(tmp_path / name, kind)
    assert [path.name for path in tmp_path.iterdir()] == ["task"]
