"""Tasks that are fit for training pass every check; each way to be unfit fails the check that names it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hintloop.envs.check import check_task
from hintloop.envs.harbor import load_taskset_folder
from hintloop.envs.sandbox.base import SandboxSpec
from hintloop.envs.sandbox.local import LocalProvider
from hintloop.envs.skeleton import KINDS, write_skeleton
from hintloop.envs.task import Case, FunctionTests, Script, Task

GOOD, BAD = "def double(x):\n    return x * 2\n", "def double(x):\n    return x + 2\n"
SED = "#!/bin/sh\nsed -i 's/x + 2/x * 2/' solution.py\n"
CASES = tuple(Case((x,), 2 * x) for x in range(4))
TESTS = FunctionTests("solution.py", "double", CASES[:2], CASES)
TASK = Task(
    "checked/double",
    "Mend `solution.py`: double should give twice its argument",
    {"solution.py": BAD},
    TESTS,
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
        ({"instruction": "See `python3 -m pytest other.py`"}, {"runtime.task_declaration_accuracy"}),
        ({"sandbox": SandboxSpec(memory=2**60)}, {"static.resource_declaration"}),
        ({"sandbox": SandboxSpec(cpus=0.0)}, {"static.resource_declaration"}),
        ({"tests": replace(TESTS, visible=(Case((1,), 3),))}, {"hintloop.visible_tests"}),
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
    task = replace(TASK, solution={"solution.py": chance}, tests=replace(TESTS, hidden=CASES * 12))
    findings = check_task(provider, task, times=6)  # two may well be alike
    assert "semantic.verifier_determinism" in {found.check for found in findings if not found.passed}


def test_a_line_of_the_task_that_the_solution_has_twice_gives_nothing_away(provider: LocalProvider) -> None:
    other = f'"""Or:\n{GOOD.replace("x * 2", "2 * x")}"""\n'
    assert failed(provider, replace(TASK, solution={"solution.py": GOOD + other})) == set()


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


@pytest.mark.parametrize("name", ["solution.py", "made.txt", "/tmp/far.txt", "not-made.txt"])
def test_files_that_a_script_makes_may_be_named(provider: LocalProvider, name: str) -> None:
    solution = Script({}, "sed -i 's/x + 2/x * 2/' solution.py && touch made.txt /tmp/far.txt", timeout=20.0)
    wrong = {"runtime.task_declaration_accuracy"} if name == "not-made.txt" else set()
    assert failed(provider, replace(TASK, instruction=f"Mend it: `cat {name}`", solution=solution)) == wrong


@pytest.mark.parametrize(
    ("files", "command", "left", "leaks"),
    [
        ({"solution.py": GOOD}, "cp /solution/solution.py .", {}, False),
        ({"solve.sh": f"cat >solution.py <<END\n{GOOD}END\n"}, "sh /solution/solve.sh", {}, False),
        ({}, "sed -i 's/x + 2/x * 2/' solution.py", {}, False),
        ({}, "sed -i 's/x + 2/x * 2/' solution.py", {"old.py": GOOD}, True),
        ({"solution.py": GOOD}, "cp /solution/solution.py .", {"old.py": GOOD}, True),
        ({"solve.sh": SED}, "sh /solution/solve.sh", {"hint.sh": SED}, True),
    ],
)
def test_a_solution_script_gives_nothing_away_by_what_the_agent_has_anyway(
    provider: LocalProvider, files: dict[str, str], command: str, left: dict[str, str], leaks: bool
) -> None:
    solution = Script(files, command, timeout=20.0)
    found = failed(provider, replace(TASK, files={**TASK.files, **left}, solution=solution))
    assert found == ({"semantic.no_solution_leakage"} if leaks else set())
