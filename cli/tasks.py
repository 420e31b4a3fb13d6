"""``hintloop tasks``: what there is to solve."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hintloop.cli.errors import UserError
from hintloop.cli.options import AsJson

if TYPE_CHECKING:
    from hintloop.envs.task import Task

app = typer.Typer(no_args_is_help=True, help="The registered tasks.")


@app.command("list")
def list_tasks(
    taskset: Annotated[
        str | None, typer.Argument(metavar="SET", help="A task set, to list its tasks.")
    ] = None,
    split: Annotated[str | None, typer.Option(help="Only the tasks of this split.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the task sets, or the tasks of one.

    Example: `hintloop tasks list bugfix --split heldfn`
    """
    from hintloop.cli.output import show
    from hintloop.envs.task import load_taskset, taskset_names

    if taskset is None:
        sets = [load_taskset(name) for name in taskset_names()]
        show(
            [
                {"set": each.name, "split": name, "tasks": len(ids), "about": each.description}
                for each in sets
                for name, ids in each.splits().items()
            ],
            as_json=as_json,
        )
        return
    splits = load_taskset(taskset).splits()
    if split is not None and split not in splits:
        raise UserError(f"task set {taskset!r} has no split {split!r}; it has {', '.join(splits)}")
    chosen = {name: ids for name, ids in splits.items() if split in (None, name)}
    show([{"task": task, "split": name} for name, ids in chosen.items() for task in ids], as_json=as_json)


@app.command("show")
def show_task(
    task_id: Annotated[str, typer.Argument(metavar="TASK", help="A task id.")],
    solution: Annotated[bool, typer.Option("--solution", help="Show the reference solution, too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show one task: what the agent is told, its files, and the tests that it may run.

    Example: `hintloop tasks show bugfix/add_all.0.0`
    """
    from hintloop.cli.output import show_json
    from hintloop.envs.task import get_task

    task = get_task(task_id)
    if as_json:
        show_json(_facts(task, solution=solution))
        return
    solved = {f"{path} (solution)": text for path, text in task.solution.items()} if solution else {}
    typer.echo(f"{task.task_id}\n\n{task.instruction}")
    for path, text in (task.files | solved).items():
        typer.echo(f"\n--- {path}\n{text}")
    typer.echo(
        f"\n--- visible tests of {task.tests.function} (the reward comes from {len(task.tests.hidden)} cases)"
    )
    for case in task.tests.visible:
        arguments = ", ".join(repr(argument) for argument in case.args)
        typer.echo(f"{task.tests.function}({arguments}) == {case.expected!r}")


def _facts(task: Task, *, solution: bool) -> dict[str, object]:
    return {
        "task_id": task.task_id,
        "instruction": task.instruction,
        "files": task.files,
        "function": task.tests.function,
        "visible": [{"args": case.args, "expected": case.expected} for case in task.tests.visible],
        "hidden_tests": len(task.tests.hidden),
        "max_turns": task.max_turns,
        "metadata": task.metadata,
        **({"solution": task.solution} if solution else {}),
    }
