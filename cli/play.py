"""``hintloop play``: the whole loop on one machine, from an empty folder to a report.

Environment server and teacher first, then learner and rollout; whichever process is killed, ``--resume``
goes on from what is on the disk.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from urllib.parse import urlsplit

from hintloop.cli.config import Config, EnvSection, load_config
from hintloop.cli.display import Display
from hintloop.cli.errors import ERROR_PREFIX, TRACEBACK, UserError
from hintloop.cli.model import prepare_student
from hintloop.cli.runfolder import RunFolder, append_line, existing, write_text
from hintloop.cli.supervise import ChildFailed, ChildSpec, Stopped, Supervisor
from hintloop.cli.tasks import find

READY_S = 120.0
"""How long a server may take to start."""
LEARNER_END_S = 120.0
"""How long the learner may take to end once the rollout side has played its last version."""
EXIT_FAILED = 1
EXIT_STOPPED = 130
_HINTLOOP = (sys.executable, "-m", "hintloop.cli.main")
_CHILD_ENV = {
    TRACEBACK: "1",
    "PYTHONUNBUFFERED": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",  # the model is in the run folder
}


def new_run(config: Config, *, preset: str) -> tuple[RunFolder, Config]:
    """Make the folder of a new run, with its config and its model. ``UserError`` when that cannot be."""
    if not config.env.servers:
        find(config.env.tasks)
    name = config.run.name or f"{preset}-{time.strftime('%Y%m%d-%H%M%S')}"
    config = config.model_copy(update={"run": config.run.model_copy(update={"name": name})})
    folder = RunFolder(config.run.output / name)
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        if folder.is_run():
            raise UserError(f"{folder.path} holds a run; go on with it: {resume_command(folder)}")
        if any(folder.path.iterdir()):
            raise UserError(f"{folder.path} is not empty; choose another --name")
        (folder.path / "status").mkdir()
    except OSError as error:
        raise UserError(f"cannot write to {folder.path}: {error.strerror}") from error
    try:
        prepare_student(config.student, folder.student)
    except BaseException:
        (folder.path / "status").rmdir()
        folder.path.rmdir()
        raise
    write_text(folder.config, config.to_toml())
    return folder, config


def old_run(path: Path) -> tuple[RunFolder, Config]:
    """A run to go on with, and the config that it was started with. ``UserError`` when there is none."""
    folder = existing(path)
    return folder, load_config(file=folder.config)


def resume_command(folder: RunFolder) -> str:
    """What to type to go on."""
    return f"hintloop play --resume {shlex.quote(str(folder.path))}"


def play(folder: RunFolder, config: Config, *, say: Callable[[str], None]) -> int:
    """Run until learner and rollout are done; the exit code. ``say`` prints a line.

    0: all done; ``EXIT_FAILED``: a process ended that should not have; ``EXIT_STOPPED``: by a signal.
    """
    with folder.lock(), Display(folder, config) as display:
        append_line(folder.plays, seed=config.run.seed)
        supervisor = Supervisor(display.refresh)
        try:
            with supervisor.signals(), supervisor:
                _start(supervisor, folder, config)
                supervisor.wait_end("rollout")
                supervisor.wait_end("learner", timeout_s=LEARNER_END_S)
        except Stopped:
            display.close()
            say(f"stopped; go on with: {resume_command(folder)}")
            return EXIT_STOPPED
        except ChildFailed as error:
            display.close()
            say(_failure(error, folder))
            return EXIT_FAILED
    return 0


def _start(supervisor: Supervisor, folder: RunFolder, config: Config) -> None:
    for spec in server_specs(folder, config):
        folder.ready(spec.name).unlink(missing_ok=True)
        supervisor.start(spec)
    supervisor.start(learner_spec(folder, config))
    urls = {
        spec.name: supervisor.wait_file(spec.name, folder.ready(spec.name), timeout_s=READY_S)
        for spec in server_specs(folder, config)
    }
    supervisor.start(rollout_spec(folder, config, urls))


def server_specs(
    folder: RunFolder, config: Config, before: Mapping[str, str] = MappingProxyType({})
) -> list[ChildSpec]:
    """The servers of a run; those that have an URL in ``before`` come back to it."""
    ports = {name: urlsplit(url).port or 0 for name, url in before.items()}
    made = []
    if not config.env.servers:
        port = ports.get("env", config.env.port)
        options = ["--host", config.env.host, *env_options(config.env, port=port)]
        made.append(_spec(folder, "env", ["serve", "env", *options], threads=1, server=True))
    if config.teachers.scripted:
        options = ["--port", str(ports.get("expert", 0))]
        made.append(_spec(folder, "expert", ["serve", "expert", *options], threads=1, server=True))
    return made


def env_options(env: EnvSection, *, port: int) -> list[str]:
    """The options of ``hintloop serve env`` for a config, all but the address."""
    options = ["--port", str(port), "--max-sessions", str(env.max_sessions)]
    return [*options, "--tasks", env.tasks, "--sandbox", env.sandbox]


def learner_spec(folder: RunFolder, config: Config) -> ChildSpec:
    """The learner of a run."""
    command = ["learn", "--run", str(folder.path), "--follow"]
    return _spec(folder, "learner", command, threads=config.learner.threads)


def rollout_spec(folder: RunFolder, config: Config, urls: Mapping[str, str]) -> ChildSpec:
    """The rollout side of a run; ``urls`` are those of its servers."""
    command = ["rollout", "--run", str(folder.path)]
    if "env" in urls:
        command += ["--env-url", urls["env"]]
    if "expert" in urls:
        command += ["--expert-url", urls["expert"]]
    return _spec(folder, "rollout", command, threads=config.rollout.engine_threads)


def _spec(
    folder: RunFolder, name: str, command: Sequence[str], *, threads: int | None, server: bool = False
) -> ChildSpec:
    ready = ["--ready-file", str(folder.ready(name))] if server else []
    env = dict(_CHILD_ENV)
    if threads is not None:
        env |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return ChildSpec(
        name,
        [*_HINTLOOP, *command, *ready],
        folder.log(name),
        env,
        server,
    )


def arguments_of(spec: ChildSpec) -> list[str]:
    """What follows ``hintloop`` in the command."""
    return list(spec.command[len(_HINTLOOP) :])


def _failure(error: ChildFailed, folder: RunFolder) -> str:
    """One line for what the user can mend; the end of the log for the rest."""
    log, lines = folder.log(error.name), error.tail.splitlines()
    resume = f"go on with: {resume_command(folder)}"
    said = [line for line in lines if line.startswith(ERROR_PREFIX)]
    if said:
        return f"{ERROR_PREFIX}{error.name}: {said[-1].removeprefix(ERROR_PREFIX)} (log: {log}); {resume}"
    tail = "".join(f"\n  {line}" for line in lines)
    return f"{ERROR_PREFIX}{error}; {resume}\nthe end of {log}:{tail}"
