"""``hintloop tasks``: what there is to solve, a new task of one's own, and whether tasks are fit for training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hintloop.cli.errors import UserError
from hintloop.cli.options import AsJson

if TYPE_CHECKING:
    from hintloop.envs.task import Task, TaskSet, Tests

EXIT_UNFIT = 1
"""``check`` found something."""

app = typer.Typer(no_args_is_help=True, help="Tasks: list them, show one, make one, prove them.")

Place = Annotated[
    str, typer.Argument(metavar="SET|PATH", help="A task set's name, a folder of tasks, or a Python file.")
]
From = Annotated[
    str | None,
    typer.Option("--tasks", metavar="SET|PATH", help="Where a task id is from, if not a known set."),
]
Split = Annotated[str | None, typer.Option(help="Only the tasks of this split.")]


@app.command("list")
def list_tasks(
    place: Annotated[
        str | None,
        typer.Argument(
            metavar="[SET|PATH]", help="A task set's name, folder or Python file, to list its tasks."
        ),
    ] = None,
    split: Split = None,
    as_json: AsJson = False,
) -> None:
    """List the task sets, or the tasks of one.

    Example: `hintloop tasks list bugfix --split heldfn`
    """
    from hintloop.cli.output import show
    from hintloop.envs.registry import taskset_names

    if place is None:
        show([row for name in taskset_names() for row in _set_rows(name)], as_json=as_json)
        return
    chosen = _chosen(find(place), split)
    show([{"task": task, "split": name} for name, ids in chosen.items() for task in ids], as_json=as_json)


@app.command("show")
def show_task(
    task_id: Annotated[str, typer.Argument(metavar="TASK", help="A task id, or the folder of a task.")],
    tasks: From = None,
    solution: Annotated[bool, typer.Option("--solution", help="Show the reference solution, too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show one task: what the agent is told, its files, and the tests that it may run.

    Example: `hintloop tasks show bugfix/add-add-all.0.0`
    """
    from hintloop.cli.output import show_json
    from hintloop.envs.registry import get_task

    task = get_task(_ids_at(task_id, None, tasks)[0])
    if as_json:
        show_json(_facts(task, solution=solution))
        return
    typer.echo(f"{task.task_id}\n\n{task.instruction}")
    shown = task.files | (_solution_files(task) if solution else {})
    for path, text in shown.items():
        typer.echo(f"\n--- {path}\n{text}")
    typer.echo(f"\n--- visible tests\n{_visible(task.tests)}")


@app.command("new")
def new_task(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Folder to make; its last part names the task.")
    ],
    kind: Annotated[str, typer.Option(help="fix: mend given code; write: from an empty folder.")] = "fix",
) -> None:
    """Make the folder of a task that works: instruction, files, hidden tests, reference solution.

    Example: `hintloop tasks new mytasks/discount --kind fix`
    """
    from hintloop.envs.skeleton import write_skeleton

    folder = Path(name)
    try:
        write_skeleton(folder, kind)
    except (ValueError, FileExistsError) as error:
        raise UserError(str(error)) from error
    typer.echo(f"made {folder}; prove it with: hintloop tasks check {folder}")


@app.command("check")
def check_tasks(
    place: Annotated[
        str,
        typer.Argument(
            metavar="SET|PATH|TASK", help="A task set, a folder of tasks or of one, or a task id."
        ),
    ],
    tasks: From = None,
    split: Split = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first tasks.")] = None,
    times: Annotated[int, typer.Option(min=1, help="Gradings of the solution, and of doing nothing.")] = 3,
    sandbox: Annotated[str, typer.Option(help="local, docker or docker+gvisor.")] = "local",
    jobs: Annotated[int, typer.Option(min=1, help="Tasks at the same time.")] = 2,
    as_json: AsJson = False,
) -> None:
    """Prove tasks before training on them: the solution passes, doing nothing fails, nothing leaks, every time.

    Exit code 1 when a check fails. Example: `hintloop tasks check mytasks --times 5`
    """
    from hintloop.cli.check import check_all, load, show_findings

    chosen, unreadable = load(_ids_at(place, split, tasks)[:limit])
    findings = unreadable + check_all(chosen, sandbox=sandbox, times=times, jobs=jobs)
    show_findings(findings, as_json=as_json)
    if not all(finding.passed for finding in findings):
        raise typer.Exit(EXIT_UNFIT)


def _set_rows(name: str) -> list[dict[str, object]]:
    """One row per split; a set whose data is not on this machine says so instead."""
    from hintloop.envs.registry import load_taskset

    try:
        found = load_taskset(name)
    except ValueError as error:
        return [{"set": name, "split": None, "tasks": None, "about": str(error)}]
    return [
        {"set": name, "split": split, "tasks": len(ids), "about": found.description}
        for split, ids in found.splits().items()
    ]


def find(place: str) -> TaskSet:
    """The task set of that name, folder or Python file. ``UserError`` when it cannot be had."""
    from hintloop.envs.registry import find_taskset

    try:
        return find_taskset(place)
    except KeyError as error:
        raise UserError(error.args[0]) from error
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error


def _chosen(found: TaskSet, split: str | None) -> dict[str, list[str]]:
    splits = {name: list(ids) for name, ids in found.splits().items()}
    if split is not None and split not in splits:
        raise UserError(f"task set {found.name!r} has no split {split!r}; it has {', '.join(splits)}")
    return {name: ids for name, ids in splits.items() if split in (None, name)}


def _ids_at(place: str, split: str | None, of: str | None = None) -> list[str]:
    """The ids of a set's tasks, or of the one task that ``place`` names; ``of`` is the set's own place."""
    from hintloop.envs.registry import taskset_names

    if of is not None:
        find(of)
    if place.partition("/")[0] in taskset_names() and "/" in place and not Path(place).exists():
        return [place]
    ids = [task_id for ids in _chosen(find(place), split).values() for task_id in ids]
    if not ids:
        raise UserError(f"no tasks in {place}")
    return ids


def _solution_files(task: Task) -> dict[str, str]:
    files = task.solution if isinstance(task.solution, dict) else task.solution.files
    return {f"{path} (solution)": text for path, text in files.items()}


def _visible(tests: Tests) -> str:
    from hintloop.envs.task import AssertTests, FunctionTests

    if isinstance(tests, AssertTests):
        return tests.visible
    if not isinstance(tests, FunctionTests):
        return tests.visible or "none"
    calls = [
        f"{tests.function}({', '.join(map(repr, case.args))}) == {case.expected!r}" for case in tests.visible
    ]
    return "\n".join([*calls, f"(the reward comes from {len(tests.hidden)} cases)"])


def _facts(task: Task, *, solution: bool) -> dict[str, object]:
    return {
        "task_id": task.task_id,
        "instruction": task.instruction,
        "files": task.files,
        "tests": type(task.tests).__name__,
        "visible": _visible(task.tests),
        "max_turns": task.max_turns,
        "metadata": task.metadata,
        **({"solution": _solution_files(task)} if solution else {}),
    }
