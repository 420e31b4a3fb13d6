"""The ``hintloop`` command. Everything heavy is imported by the command that needs it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from typer.exceptions import TyperException

from hintloop.cli import journal, parts, sim, student, tasks, traces
from hintloop.cli.errors import ERROR_PREFIX, UserError, is_expected, report_line
from hintloop.cli.options import AsJson, Assignments, ConfigFile, Preset, TaskSource
from hintloop.cli.setup import setup
from hintloop.cli.view.command import view

EXIT_USER_ERROR = 2
EXIT_BROKEN_PIPE = 141

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Online self-play for coding agents: reward, hints at the failing turn, preferences.",
)
app.add_typer(parts.serve_app, name="serve")
app.add_typer(tasks.app, name="tasks")
app.add_typer(student.app, name="student")
app.add_typer(traces.app, name="traces")
app.add_typer(journal.app, name="journal")
app.command()(setup)
app.command()(parts.rollout)
app.command()(parts.learn)
app.command()(parts.evaluate)
app.command("sim-engine")(sim.sim_engine)
app.command()(view)

Run = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, such as runs/NAME.")]


@app.command()
def play(
    preset: Preset = None,
    config: ConfigFile = None,
    assignments: Assignments = None,
    name: Annotated[str | None, typer.Option(help="Name of the run folder.")] = None,
    seed: Annotated[int | None, typer.Option(help="Same as --set run.seed=SEED.")] = None,
    task_source: TaskSource = None,
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Go on with a run.")] = None,
) -> None:
    """Run the whole loop on this machine and report what it brought.

    Example: `hintloop play --preset laptop --seed 1`
    """
    from hintloop.cli import play as playing
    from hintloop.cli.config import DEFAULT_PRESET, load_config

    if resume is not None:
        if preset or config or assignments or name or seed is not None or task_source:
            raise UserError("--resume goes on with the settings of the run; give no other options")
        folder, settings = playing.old_run(resume)
    else:
        chosen = preset or DEFAULT_PRESET
        values = {"run.name": name, "run.seed": seed, "env.tasks": task_source}
        settings = load_config(
            preset=chosen,
            file=config,
            assignments=assignments or (),
            values={key: value for key, value in values.items() if value is not None},
        )
        folder, settings = playing.new_run(settings, preset=chosen)
    code = playing.play(folder, settings, say=typer.echo)
    if code:
        raise typer.Exit(code)
    _report(folder.path, as_json=False)


@app.command()
def config(
    preset: Preset = None, config: ConfigFile = None, assignments: Assignments = None, as_json: AsJson = False
) -> None:
    """Print the effective settings, as TOML or JSON. Without a preset these are the defaults.

    Example: `hintloop config --preset laptop --set rollout.group_size=16`
    """
    from hintloop.cli.config import load_config
    from hintloop.cli.output import show_json

    settings = load_config(preset=preset, file=config, assignments=assignments or ())
    if as_json:
        show_json(settings.model_dump(mode="json"))
    else:
        typer.echo(settings.to_toml(), nl=False)


@app.command()
def report(run: Run, journal: parts.Journal = None, as_json: AsJson = False) -> None:
    """Summarise a run, also one that still goes on; writes summary.json, report.md and report.png into it.

    Example: `hintloop report runs/laptop-20260101-120000`
    """
    _report(run, journal, as_json=as_json)


@app.command()
def status(run: Run, as_json: AsJson = False) -> None:
    """Say what each part of a run does right now, and who waits for whom.

    Example: `hintloop status runs/laptop-20260101-120000 --json`
    """
    from hintloop.cli.runfolder import existing
    from hintloop.cli.status import print_status

    print_status(existing(run), as_json=as_json)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Say whether this machine can run the loop, and how well sandboxes are isolated here.

    Example: `hintloop doctor`
    """
    from hintloop.cli.doctor import examine
    from hintloop.cli.output import show

    rows = examine()
    show(rows, as_json=as_json)
    if any(row["verdict"] == "missing" for row in rows):
        raise typer.Exit(1)


def main() -> None:
    """The console entry. An expected failure is one line on stderr and exit status 2."""
    sys.exit(run_command(sys.argv[1:]))


def run_command(arguments: Sequence[str]) -> int:
    """Run one command; its exit status. What is no expected failure passes through."""
    try:
        return int(app(list(arguments), prog_name="hintloop", standalone_mode=False) or 0)
    except TyperException as error:
        return _usage(error)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nobody reads on: flush to nowhere
        return EXIT_BROKEN_PIPE
    except Exception as error:
        if not is_expected(error):
            raise
        print(report_line(error), file=sys.stderr)
        return EXIT_USER_ERROR


def _usage(error: TyperException) -> int:
    text = error.format_message() if hasattr(error, "format_message") else str(error)
    if text:
        print(f"{ERROR_PREFIX}{text}", file=sys.stderr)
    return EXIT_USER_ERROR


def _report(run: Path, journal: str | None = None, *, as_json: bool) -> None:
    from hintloop.cli.output import show_json
    from hintloop.cli.report import write_report
    from hintloop.cli.runfolder import existing

    folder = existing(run)
    keep = os.access(run, os.W_OK)
    if not keep:
        print(f"hintloop: {run} may only be read: the report is not kept there", file=sys.stderr)
    summary, text = write_report(folder, journal, keep=keep)
    if as_json:
        show_json(summary)
    else:
        typer.echo(text)


if __name__ == "__main__":
    main()
