"""A run as Monarch actors on one host: one for each part, and one that starts them again when they die.

Needs the package ``torchmonarch``. The parts are those of ``hintloop play``, and meet where they do there: at the
journal, the weights and the servers' addresses. When each is started is in ``crew``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from monarch.actor import Actor, ActorError, MeshFailure, endpoint, this_host, this_proc

from hintloop.cli.config import Config
from hintloop.cli.crew import Crew, Dead, GaveUp, Status, Work
from hintloop.cli.display import Display
from hintloop.cli.errors import ERROR_PREFIX
from hintloop.cli.play import EXIT_FAILED, EXIT_STOPPED, arguments_of, old_run, resume_command
from hintloop.cli.runfolder import RunFolder, append_line
from hintloop.cli.supervise import ChildSpec

TICK_S = 0.5
"""Time between two looks at the actors."""
LOOK_S = 1200.0
"""How long a look may take: longer than all actors may take to answer, and to be started again."""


class PartActor(Actor):  # type: ignore[misc]
    """A part of a run, at work in the process of this actor."""

    def __init__(self, spec: ChildSpec) -> None:
        os.environ.update(spec.env)
        _print_into(spec.log)
        self._work = Work(arguments_of(spec))

    @endpoint  # type: ignore[untyped-decorator]
    async def status(self) -> Status:
        """What it does."""
        return self._work.status


class TrainerActor(PartActor):
    """Learns from the journal and publishes versions of the weights."""


class GeneratorActor(PartActor):
    """Plays episodes with the newest version into the journal, and asks the teachers."""


class RewarderActor(PartActor):
    """Serves the environment: the sandboxes, and the grader that makes an episode's reward."""


class TeacherPoolActor(PartActor):
    """Serves the scripted expert. Teachers that have an address already need no actor."""


ACTORS: dict[str, type[PartActor]] = {
    "learner": TrainerActor,
    "rollout": GeneratorActor,
    "env": RewarderActor,
    "expert": TeacherPoolActor,
}
"""Part of a run -> what it is as an actor."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What the supervisor saw."""

    over: bool
    gave_up: str
    """Why the run cannot go on; empty when it can."""


class SupervisorActor(Actor):  # type: ignore[misc]
    """Owns the actors of a run. Their deaths come to it, and end here: it starts them again."""

    def __init__(self, run: str) -> None:
        self._crew = Crew(*old_run(Path(run)), start=_ActorWorker)

    @endpoint  # type: ignore[untyped-decorator]
    async def look(self) -> Seen:
        """Ask all of them, and start those that are missing or dead."""
        try:
            return Seen(await self._crew.look(), "")
        except GaveUp as error:
            return Seen(False, str(error))

    @endpoint  # type: ignore[untyped-decorator]
    async def dismiss(self) -> None:
        """End all of them; one that does not ends with the process that asks for this."""
        with suppress(GaveUp):
            await self._crew.stop()

    def __supervise__(self, failure: MeshFailure) -> bool:
        """Take note that an actor failed; the next look finds it dead."""
        return True


class _ActorWorker:
    """An actor in a process of its own, as a worker."""

    def __init__(self, spec: ChildSpec) -> None:
        self._procs = this_host().spawn_procs(name=spec.name)
        self._actor = self._procs.spawn(spec.name, ACTORS[spec.name], spec)

    async def status(self) -> Status:
        try:
            status: Status = await self._actor.status.call_one()
        except (ActorError, RuntimeError) as error:  # the second is what a supervision error is
            raise Dead(str(error)) from error
        return status

    async def stop(self) -> None:
        await self._procs.stop()


def play(folder: RunFolder, config: Config, *, say: Callable[[str], None]) -> int:
    """What ``hintloop play`` does, with actors; the exit code is the same. ``say`` prints a line."""
    with folder.lock(), Display(folder, config) as display:
        append_line(folder.plays, seed=config.run.seed)
        supervisor = this_proc().spawn("supervisor", SupervisorActor, str(folder.path))
        try:
            gave_up = _until_over(supervisor, display)
        except KeyboardInterrupt:
            display.close()
            say(f"stopped; go on with: {resume_command(folder)}")
            return EXIT_STOPPED
        finally:
            supervisor.dismiss.call_one().get(timeout=LOOK_S)
    if gave_up:
        say(f"{ERROR_PREFIX}{gave_up}; go on with: {resume_command(folder)}")
        return EXIT_FAILED
    return 0


def _until_over(supervisor: SupervisorActor, display: Display) -> str:
    """Why the run gave up; empty when it is over."""
    while True:
        seen: Seen = supervisor.look.call_one().get(timeout=LOOK_S)
        display.refresh()
        if seen.over or seen.gave_up:
            return seen.gave_up
        time.sleep(TICK_S)


def _print_into(log: Path) -> None:
    """All that this process prints from now on goes there."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
