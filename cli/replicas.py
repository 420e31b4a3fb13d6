"""``hintloop learn --executor local``: all replicas of a learner by one command, each a process of this machine."""

from __future__ import annotations

import sys
from dataclasses import asdict

import typer

from hintloop.cli.config import Config
from hintloop.cli.errors import UserError
from hintloop.cli.output import show
from hintloop.cli.runfolder import RunFolder
from hintloop.learner.executors.local import LocalProcessExecutor
from hintloop.learner.executors.protocol import ReplicaSpec, ReplicaState
from hintloop.learner.executors.replica_entrypoint import ReplicaJob, command
from hintloop.learner.executors.run import run_replicas
from hintloop.learner.stop import sigterm

EXECUTORS = ("local",)
EXIT_FAILED = 1
EXIT_STOPPED = 130
_TIMEOUT_S = 30 * 86_400.0
"""How long replicas run at most; the steps that they have to do end them long before."""


def learn_all(
    folder: RunFolder,
    settings: Config,
    *,
    executor: str,
    count: int,
    journal: str | None,
    weights: str | None,
    follow: bool,
    as_json: bool,
) -> int:
    """Run all replicas to the end; the exit code, 0 when all succeeded. Ctrl-C and SIGTERM end them in peace.

    They meet in ``RUN/rounds`` unless the settings name another place. Then none goes on without the others.
    """
    if executor not in EXECUTORS:
        raise UserError(f"no executor {executor!r}; there is {', '.join(EXECUTORS)}")
    if count < 1:
        raise UserError("--executor starts all learners of --replicas N: give their number")
    lighthouse = settings.replicas.lighthouse
    rounds = None if lighthouse else settings.replicas.rounds or str(folder.path / "rounds")
    jobs = [
        ReplicaJob(
            index=index,
            count=count,
            run=str(folder.path),
            config=settings.to_toml(),
            rounds=rounds,
            lighthouse=lighthouse,
            journal=journal,
            weights=weights,
            follow=follow,
        )
        for index in range(count)
    ]
    threads = str(settings.learner.threads)
    env = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    specs = [
        ReplicaSpec(job.index, command(job, python=sys.executable), timeout_s=_TIMEOUT_S, env=env)
        for job in jobs
    ]
    try:
        with sigterm() as stopped, LocalProcessExecutor(folder.path / "logs") as local:
            results = run_replicas(
                local, specs, timeout_s=_TIMEOUT_S, together=rounds is not None, say=_say, stopped=stopped
            )
    except KeyboardInterrupt:
        return EXIT_STOPPED
    show([asdict(result) for result in results], as_json=as_json)
    if all(result.state is ReplicaState.SUCCEEDED for result in results):
        return 0
    return EXIT_FAILED if any(r.state is ReplicaState.FAILED for r in results) else EXIT_STOPPED


def _say(line: str) -> None:
    typer.echo(line, err=True)
