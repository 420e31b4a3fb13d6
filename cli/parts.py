"""The commands that run one part of the loop: servers, rollout, learner, evaluation."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hintloop.cli.errors import UserError
from hintloop.cli.options import (
    AsJson,
    Assignments,
    ConfigFile,
    Preset,
    ReadyFile,
    TaskSource,
    tasks_setting,
)

if TYPE_CHECKING:
    from hintloop.cli.config import Config
    from hintloop.cli.runfolder import RunFolder

EXIT_STOPPED = 130
"""A signal ended it before it was done."""
SANDBOX_POOL = 8
"""Sandboxes kept ready at most, where starting one takes long."""

serve_app = typer.Typer(no_args_is_help=True, help="Servers of the loop.")

RunOption = Annotated[
    Path | None,
    typer.Option("--run", metavar="RUN", help="Run folder; its settings are used when it has some."),
]
Journal = Annotated[
    str | None, typer.Option("--journal", metavar="URI", help="Episodes; default: RUN/journal.")
]
Weights = Annotated[
    str | None, typer.Option("--weights", metavar="URI", help="Versions; default: RUN/weights.")
]


@serve_app.command("env")
def serve_env(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    max_sessions: Annotated[int, typer.Option(min=1, help="Episodes at the same time at most.")] = 64,
    task_sources: Annotated[
        list[str] | None,
        typer.Option(
            "--tasks", metavar="SET|PATH", help="Folder or Python file with tasks; may be repeated."
        ),
    ] = None,
    sandbox: Annotated[str, typer.Option(help="local, docker or docker+gvisor.")] = "local",
    web: Annotated[bool, typer.Option("--web", help="Also serve a page at /web to play by hand.")] = False,
    ready_file: ReadyFile = None,
) -> None:
    """Serve the coding environment (OpenEnv over WebSocket), each episode in a sandbox of its own.

    The bundled task sets are always there. Example: `hintloop serve env --port 8000 --tasks mytasks`
    """
    from hintloop.envs.mcp_tools import DEFAULT_TASKSET
    from hintloop.envs.registry import find_taskset
    from hintloop.envs.sandbox.providers import open_provider
    from hintloop.envs.server import serve

    _log_to_stderr()
    names = [find_taskset(place).name for place in task_sources or ()]
    if web:
        os.environ["ENABLE_WEB_INTERFACE"] = "true"  # how OpenEnv is told
        os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # nothing is told to its makers
    provider = open_provider(sandbox, pool=min(max_sessions, SANDBOX_POOL))
    try:
        serve(
            provider,
            host=host,
            port=port,
            taskset=names[0] if names else DEFAULT_TASKSET,
            max_sessions=max_sessions,
            ready_file=ready_file,
        )
    finally:
        provider.close()


@serve_app.command("expert")
def serve_expert(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8001,
    ready_file: ReadyFile = None,
) -> None:
    """Serve the scripted expert of the bugfix tasks as an OpenAI-compatible chat API.

    Example: `hintloop serve expert --port 8001`
    """
    from hintloop.cli.config import EXPERT_TASKS
    from hintloop.envs.registry import load_taskset
    from hintloop.envs.tasksets.bugfix.expert import next_call
    from hintloop.rollout.expert_server import serve

    _log_to_stderr()
    load_taskset(EXPERT_TASKS)  # takes a second; not at the first question
    serve(next_call, host=host, port=port, ready_file=ready_file)


def rollout(
    env_url: Annotated[str, typer.Option(metavar="URL", help="Environment server.")],
    run: RunOption = None,
    journal: Journal = None,
    weights: Weights = None,
    expert_url: Annotated[
        str | None, typer.Option(metavar="URL", help="Server of the scripted expert.")
    ] = None,
    task_source: TaskSource = None,
    preset: Preset = None,
    config: ConfigFile = None,
    assignments: Assignments = None,
) -> None:
    """Play episodes into a journal with the newest weights, until the learner says that it is done.

    Example: `hintloop rollout --run runs/one --env-url http://127.0.0.1:8000`
    """
    from hintloop.envs.registry import find_taskset
    from hintloop.rollout.run import run_rollout

    _log_to_stderr()
    folder, settings = _run_of(
        run, preset, config, assignments, part="rollout", values=tasks_setting(task_source)
    )
    if settings.teachers.scripted and expert_url is None:
        raise UserError("teachers.scripted needs --expert-url, the address of `hintloop serve expert`")
    found = find_taskset(settings.env.tasks)
    summary = run_rollout(
        run_dir=folder.path,
        journal_uri=journal or str(folder.journal),
        weights_uri=weights or str(folder.weights),
        env_url=env_url,
        splits=found.splits(),
        model=settings.student.model,
        env=found.name,
        seed=settings.run.seed,
        config=settings.rollout,
        evaluation=settings.evaluation,
        teachers=settings.teachers.with_expert(expert_url),
    )
    typer.echo(
        f"rollout ended ({summary.stopped}) at version {summary.version}: {summary.groups} groups in the "
        f"journal, {summary.seconds:.0f} s, of which {summary.waited_s:.0f} s waiting for the learner"
    )
    if summary.stopped == "signal":
        raise typer.Exit(EXIT_STOPPED)


def learn(
    run: RunOption = None,
    journal: Journal = None,
    weights: Weights = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Wait for more at the end of the journal.")
    ] = False,
    student: Annotated[
        str | None,
        typer.Option(help="student-tiny, a model folder, or owner/name on the hub.", metavar="MODEL"),
    ] = None,
    preset: Preset = None,
    config: ConfigFile = None,
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Train on a journal and publish weight versions; alone, or beside `hintloop rollout`.

    Example: `hintloop learn --journal file:///data/journal --student student-tiny --set learner.steps=50`
    """
    from hintloop.cli.model import prepare_student
    from hintloop.cli.output import show_json

    _log_to_stderr()
    if run is None and journal is None:
        raise UserError("give a --journal to learn from, or the --run that has one")
    model = {} if student is None else {"student.model": student}
    folder, settings = _run_of(run, preset, config, assignments, part="learn", values=model)
    start = prepare_student(settings.student, folder.student)
    from hintloop.learner.run import run_learner  # takes seconds; not before the input is known to be good

    summary = run_learner(
        start,
        journal or str(folder.journal),
        weights or str(folder.weights),
        folder.path,
        settings.learner,
        follow=follow,
    )
    if as_json:
        show_json({**asdict(summary), "folder": str(folder.path)})
    else:
        used = {name: count for name, count in summary.counts.items() if "_" not in name}
        unused = {name: count for name, count in summary.counts.items() if "_" in name and count}
        typer.echo(
            f"learner ended ({summary.reason}) after step {summary.step}: version {summary.version}, "
            f"{summary.seconds:.0f} s; files in {folder.path}\n"
            f"used: {_listed(used)}\nnot used: {_listed(unused) or 'nothing'}"
        )
    if summary.reason == "signal":
        raise typer.Exit(EXIT_STOPPED)
    if summary.reason == "idle":
        raise UserError(
            f"no new episodes for {settings.learner.idle_timeout_s:g} s; is the rollout side running?"
        )


def evaluate(
    model: Annotated[
        str, typer.Argument(help="student-tiny, a model folder, or owner/name on the hub.")
    ] = "student-tiny",
    task_source: TaskSource = None,
    preset: Preset = None,
    config: ConfigFile = None,
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Measure how many held-out tasks a model solves.

    Example: `hintloop evaluate runs/one/weights/v000200 --set evaluation.num_tasks=300`
    """
    from hintloop.cli.config import load_config
    from hintloop.cli.evaluate import evaluate_model
    from hintloop.cli.output import show

    _log_to_stderr()
    values = {"student.model": model, **tasks_setting(task_source)}
    settings = load_config(preset=preset, file=config, assignments=assignments or (), values=values)
    show(evaluate_model(settings), as_json=as_json)


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def _run_of(
    run: Path | None,
    preset: str | None,
    file: Path | None,
    assignments: list[str] | None,
    *,
    part: str,
    values: dict[str, str] | None = None,
) -> tuple[RunFolder, Config]:
    """The run folder (a new one by default) and its settings; those it has give way to a preset or a file."""
    from hintloop.cli.config import load_config
    from hintloop.cli.runfolder import RunFolder

    saved = run / "config.toml" if run else None
    if preset is None and file is None and saved is not None and saved.is_file():
        file = saved
    settings = load_config(preset=preset, file=file, assignments=assignments or (), values=values or {})
    folder = RunFolder(run or settings.run.output / f"{part}-{time.strftime('%Y%m%d-%H%M%S')}")
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to {folder.path}: {error.strerror}") from error
    return folder, settings


def _log_to_stderr() -> None:
    """What the parts log must not mix with what a command prints."""
    import structlog

    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
