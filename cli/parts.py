"""The commands that run one part of the loop: servers, rollout, learner, evaluation."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO, cast

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
POLL_S = 0.2
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


@serve_app.command("lighthouse")
def serve_lighthouse(
    host: Annotated[str, typer.Option(help="Address to listen on; nobody is asked who he is.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 29510,
    min_replicas: Annotated[int, typer.Option(min=1, help="Replicas without which nobody goes on.")] = 1,
) -> None:
    """Serve the place where the replicas of a learner find each other (torchft's lighthouse).

    Example: `hintloop serve lighthouse --min-replicas 2`
    """
    from hintloop.learner.replicas.lighthouse import open_lighthouse
    from hintloop.learner.stop import sigterm

    with sigterm() as stopped, open_lighthouse(host, port, min_replicas=min_replicas) as url:
        typer.echo(url)
        while not stopped():
            time.sleep(POLL_S)


def rollout(
    env_url: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="Environment server; may be repeated. Default: env.servers."),
    ] = None,
    run: RunOption = None,
    journal: Journal = None,
    weights: Weights = None,
    expert_url: Annotated[
        str | None, typer.Option(metavar="URL", help="Server of the scripted expert.")
    ] = None,
    engine_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Inference servers, one at each address of the name; sets rollout.engines."
        ),
    ] = None,
    agent: Annotated[
        str | None,
        typer.Option(
            metavar="CMD", help="Command line of the program that is the agent; sets rollout.agent."
        ),
    ] = None,
    show_progress: Annotated[
        bool, typer.Option("--progress", help="Log a line about the run now and then.")
    ] = False,
    task_source: TaskSource = None,
    preset: Preset = None,
    config: ConfigFile = None,
    assignments: Assignments = None,
) -> None:
    """Play episodes into a journal with the newest weights, until the learner says that it is done.

    Example: `hintloop rollout --run runs/one --env-url http://127.0.0.1:8000`
    """
    from hintloop.cli.services import progress, servers_by_name, spread
    from hintloop.envs.registry import find_taskset
    from hintloop.rollout.loading import ROSTER
    from hintloop.rollout.run import run_rollout

    _log_to_stderr()
    values = tasks_setting(task_source) | ({"rollout.engines": [engine_url]} if engine_url else {})
    values |= {"rollout.agent": agent} if agent else {}
    folder, settings = _run_of(run, preset, config, assignments, part="rollout", values=values)
    env_urls = env_url or settings.env.servers
    if not env_urls:
        raise UserError("give an --env-url, the address of `hintloop serve env`, or set env.servers")
    if settings.teachers.scripted and expert_url is None:
        raise UserError("teachers.scripted needs --expert-url, the address of `hintloop serve expert`")
    found = find_taskset(settings.env.tasks)
    with ExitStack() as beside:
        if engine_url:
            beside.enter_context(servers_by_name(engine_url, folder.path / ROSTER))
        if show_progress:
            beside.enter_context(progress(folder, settings))
        summary = run_rollout(
            run_dir=folder.path,
            journal_uri=journal or str(folder.journal),
            weights_uri=weights or str(folder.weights),
            env_url=spread(env_urls),
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
    replicas: Annotated[
        int | None, typer.Option(metavar="N", help="This is one of N learners; sets replicas.count.")
    ] = None,
    replica: Annotated[
        int | None, typer.Option(metavar="I", help="Its number, from 0; sets replicas.index.")
    ] = None,
    lighthouse: Annotated[
        str | None, typer.Option(metavar="URL", help="Where they find each other; sets replicas.lighthouse.")
    ] = None,
    rounds: Annotated[
        str | None, typer.Option(metavar="URI", help="Folder to meet in instead; sets replicas.rounds.")
    ] = None,
    executor: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Start all N here; `local` runs each as a process of this machine."
        ),
    ] = None,
    preset: Preset = None,
    config: ConfigFile = None,
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Train on a journal and publish weight versions; alone, beside `hintloop rollout`, or as one of several.

    Example: `hintloop learn --journal file:///data/journal --student student-tiny --set learner.steps=50`

    One of three, with a run folder that all of them share or one for each:
    `hintloop learn --run RUN --replicas 3 --replica 0 --lighthouse http://127.0.0.1:29510`

    All of three, by one command: `hintloop learn --run RUN --replicas 3 --executor local`
    """
    from hintloop.cli.model import find_model, prepare_student
    from hintloop.cli.output import show_json
    from hintloop.cli.runfolder import RunFolder

    _log_to_stderr()
    if run is None and journal is None:
        raise UserError("give a --journal to learn from, or the --run that has one")
    values = {
        "student.model": student,
        "replicas.count": replicas,
        "replicas.index": replica,
        "replicas.lighthouse": lighthouse,
        "replicas.rounds": rounds,
    }
    given = {key: value for key, value in values.items() if value is not None}
    if executor is not None:
        if given.pop("replicas.index", None) is not None:
            raise UserError("--executor starts all replicas, --replica is one of them: give one of the two")
        given.pop("replicas.count", None)  # with it a place to meet would be needed already
        folder, settings = _run_of(run, preset, config, assignments, part="learn", values=given)
        from hintloop.cli.replicas import learn_all

        code = learn_all(
            folder,
            settings,
            executor=executor,
            count=replicas or settings.replicas.count,
            journal=journal,
            weights=weights,
            follow=follow,
            as_json=as_json,
        )
        raise typer.Exit(code)
    folder, settings = _run_of(run, preset, config, assignments, part="learn", values=given)
    several = settings.replicas if settings.replicas.count else None
    own = RunFolder(folder.path / f"replica-{several.index}") if several else folder
    leads = (
        os.environ.get("RANK", "0") == "0"
    )  # of several processes of this learner the first one does the writing
    if leads or own.student.exists():
        start = prepare_student(settings.student, own.student)
    else:
        start = find_model(settings.student.model)
    # These take seconds: not before the input is known to be good.
    from hintloop.learner.ranks import leave_process_group
    from hintloop.learner.run import run_learner

    summary = run_learner(
        start,
        journal or str(folder.journal),
        weights or str(folder.weights),
        own.path,
        settings.learner,
        follow=follow,
        replicas=several,
    )
    leave_process_group()
    if not leads:
        return
    if as_json:
        show_json({**asdict(summary), "folder": str(own.path)})
    else:
        used = {name: count for name, count in summary.counts.items() if "_" not in name}
        unused = {name: count for name, count in summary.counts.items() if "_" in name and count}
        typer.echo(
            f"learner ended ({summary.reason}) after step {summary.step}: version {summary.version}, "
            f"{summary.seconds:.0f} s; files in {own.path}\n"
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
    values: Mapping[str, object] | None = None,
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

    structlog.configure(logger_factory=structlog.PrintLoggerFactory(cast(TextIO, _Stderr())))


class _Stderr:
    """Where the log goes: a full disk costs it lines, and nobody else anything."""

    def write(self, text: str) -> None:
        with suppress(OSError):
            sys.stderr.write(text)

    def flush(self) -> None:
        with suppress(OSError):
            sys.stderr.flush()
