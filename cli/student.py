"""``hintloop student``: make the bundled student anew, and measure whether a student uses hints."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from hintloop.cli.options import AsJson

SAY_EVERY_S = 10.0

app = typer.Typer(no_args_is_help=True, help="The bundled student.")


@app.command()
def build(
    folder: Annotated[Path, typer.Argument(help="New folder for the student.")],
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps.")] = None,
    seed: Annotated[int, typer.Option(help="Same seed and threads, same student.")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
) -> None:
    """Build the tiny student: its tokenizer, and a warm start on expert traces. Takes minutes.

    Example: `hintloop student build runs/my-student --seed 1`
    """
    from hintloop.agent.student.build import Recipe, build

    recipe = (
        Recipe(seed=seed, threads=threads) if steps is None else Recipe(steps, seed=seed, threads=threads)
    )
    due = time.monotonic()

    def say(step: int, total: int, values: dict[str, float]) -> None:
        nonlocal due
        if time.monotonic() >= due or step == total:
            due = time.monotonic() + SAY_EVERY_S
            shown = ", ".join(f"{name} {value:.3f}" for name, value in values.items())
            typer.echo(f"step {step} of {total}: {shown}")

    typer.echo(f"student in {build(folder, recipe, say)}")


@app.command("eval")
def evaluate(
    model: Annotated[str, typer.Argument(help="Model folder, or student-tiny.")] = "student-tiny",
    states: Annotated[int, typer.Option(min=32, help="Held-out states to ask at.")] = 1500,
    split: Annotated[str, typer.Option(help="Split of the bugfix tasks.")] = "heldmut",
    seed: Annotated[int, typer.Option(help="Decides the states and the sampling.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Measure what a matching and a non-matching hint change at the student's own failing calls.

    The numbers are changes of a whole call's log-probability (nats). Takes about a minute.

    Example: `hintloop student eval runs/my-student`
    """
    from hintloop.agent.student.hint_use import measure
    from hintloop.cli.model import find_model
    from hintloop.cli.output import show, show_json

    rows = [asdict(row) for row in measure(find_model(model), num_states=states, split=split, seed=seed)]
    if as_json:
        show_json(rows)
    else:
        show([{name: _with_error(value) for name, value in row.items()} for row in rows], as_json=False)


def _with_error(value: object) -> object:
    """A mean and its standard error in one cell."""
    return f"{value[0]:+.3f} ± {value[1]:.3f}" if isinstance(value, tuple) else value
