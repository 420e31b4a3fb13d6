"""What a job runs to be a replica: ``python -m hintloop.learner.executors.replica_entrypoint JOB``.

``JOB`` is a ``ReplicaJob`` as JSON, in the argument or in the variable ``HINTLOOP_REPLICA``. The process becomes
``hintloop learn``, so signals and exit code are that command's. Both its streams go to standard output: not every
service keeps two in order.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

VARIABLE = "HINTLOOP_REPLICA"
EXIT_BAD_JOB = 2
_MODULE = "hintloop.learner.executors.replica_entrypoint"


class ReplicaJob(BaseModel):
    """One of several learners, for a machine that has the package and nothing else. URIs are fsspec's."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    index: int = Field(ge=0)
    """Number of the replica, from 0."""
    count: int = Field(ge=1)
    """How many there are."""
    run: str
    """Run folder in the job; its checkpoints survive the job on a volume only."""
    config: str = ""
    """Settings as TOML, the same for all replicas; empty: those of the run folder."""
    rounds: str | None = None
    """URI of the folder in which the replicas meet."""
    lighthouse: str | None = None
    """URL where they meet instead."""
    journal: str | None = None
    """URI of the journal; None: the run folder's."""
    weights: str | None = None
    """URI of the weight store; None: the run folder's."""
    follow: bool = False
    """Wait for more at the end of the journal."""

    def learn(self, settings: Path | None) -> list[str]:
        """The words of ``hintloop learn``, with a file of settings if there is one."""
        options = {
            "--run": self.run,
            "--config": None if settings is None else str(settings),
            "--replicas": str(self.count),
            "--replica": str(self.index),
            "--rounds": self.rounds,
            "--lighthouse": self.lighthouse,
            "--journal": self.journal,
            "--weights": self.weights,
        }
        words = [word for name, value in options.items() if value is not None for word in (name, value)]
        return ["learn", *words, *(["--follow"] if self.follow else [])]


def command(job: ReplicaJob, *, python: str = "python") -> tuple[str, ...]:
    """The command of a ``ReplicaSpec``; ``python`` is the interpreter in the job that has the package."""
    return (python, "-m", _MODULE, job.model_dump_json(exclude_defaults=True))


def main(arguments: Sequence[str] | None = None) -> int:
    """Become ``hintloop learn``; an exit code only when that cannot be, with one line that says why."""
    words = sys.argv[1:] if arguments is None else arguments
    os.dup2(1, 2)
    try:
        job = ReplicaJob.model_validate_json(words[0] if words else os.environ.get(VARIABLE, ""))
        learn = [sys.executable, "-m", "hintloop.cli.main", *job.learn(_write_settings(job))]
        os.execv(learn[0], learn)
    except ValidationError as error:
        return _fail(f"the replica's job is not one: {_first_problem(error)}")
    except (OSError, ValueError) as error:
        return _fail(str(error))


def _write_settings(job: ReplicaJob) -> Path | None:
    if not job.config:
        return None
    path = Path(job.run, f"replica-{job.index}", "settings.toml")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_text(job.config, encoding="utf-8")
    part.replace(path)
    return path


def _first_problem(error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    return f"{where}: {first['msg']}" if where else first["msg"]


def _fail(why: str) -> int:
    print(f"hintloop: error: {' '.join(why.split())}", file=sys.stderr, flush=True)
    return EXIT_BAD_JOB


if __name__ == "__main__":
    sys.exit(main())
