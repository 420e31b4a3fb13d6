"""Any command-line program as the agent: it plays episodes as ``Player`` does, and they come out the same.

The program is started once per episode with the task. It asks the model at a loopback address that is its alone, and
reaches the sandbox by the command ``hintloop-sandbox`` or by HTTP; what the model writes runs there and not here. When
the program ends with status 0, the work is handed in and graded by the environment.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from hintloop.agent import program
from hintloop.agent.endpoint import Desk
from hintloop.agent.engine import Sampling
from hintloop.agent.episode import (
    Environment,
    EpisodeLost,
    EpisodeSpec,
    Keeper,
    Observer,
    Played,
    Player,
    task_of,
)
from hintloop.agent.policy import retaining
from hintloop.agent.visit import Visit

BROKEN = "agent"
"""What an episode is lost to when its program breaks; see ``EpisodeLost.reason``."""


@dataclass(frozen=True, slots=True)
class ExternalPlayer(Player):
    """A player whose agent is a program. Make it with ``open_external``."""

    command: str = ""
    """A shell command line."""
    idle_s: float = 120.0
    """Time that the program may take for itself in one episode, waiting for model and sandbox not counted."""
    refuse_sampling: bool = False
    """Whether questions with sampling settings of their own are refused, instead of answered with the run's."""
    desk: Desk | None = None
    bin_folder: Path = Path()
    """Goes in front of the program's search path."""

    async def _play(
        self,
        env: Environment,
        spec: EpisodeSpec,
        sampling: Sampling,
        observe: Observer | None,
        keep: Keeper | None,
    ) -> Played:
        opened = await env.reset(task_id=spec.task_id, episode_id=spec.episode_id)
        visit = Visit(
            self,
            env,
            spec,
            task_of(opened.observation),
            sampling,
            observe,
            keep,
            refuse_sampling=self.refuse_sampling,
        )
        try:
            problem = await self._run(visit)
            asked = visit.num_answers > 0 or visit.lost is not None
            if problem is not None and not (asked and visit.over.is_set()):
                raise EpisodeLost(BROKEN, problem)
            return await visit.finish(submit=True)
        finally:
            await visit.close()

    async def _run(self, visit: Visit) -> str | None:
        """Run the program to its end; what is wrong with how it ended, if anything."""
        assert self.desk is not None
        task = visit.task
        with self.desk.admit(visit) as key:
            told = program.variables(
                url=self.desk.url,
                token=key,
                model=self.model,
                task_id=task.task_id,
                instruction=task.instruction,
            )
            try:
                ended = await program.run(
                    self.command,
                    told,
                    bin_folder=self.bin_folder,
                    instruction=task.instruction,
                    over=visit.over,
                    waited=visit.waited,
                    idle_s=self.idle_s,
                )
            except program.Hung as error:
                return str(error)
        said = ended.output.replace(key, "[key]")
        if ended.status:
            return f"it ended with status {ended.status}: {said}"
        return None if visit.num_answers else f"it ended without a question to the model: {said}"


@contextlib.asynccontextmanager
async def open_player(
    player: Player, command: str | None, *, idle_s: float, refuse_sampling: bool = False
) -> AsyncIterator[Player]:
    """``player`` itself without a ``command``, else one whose agent is that program."""
    if command is None:
        yield player
    else:
        opened = open_external(player, command, idle_s=idle_s, refuse_sampling=refuse_sampling)
        async with opened as external:
            yield external


@contextlib.asynccontextmanager
async def open_external(
    player: Player, command: str, *, idle_s: float, refuse_sampling: bool = False
) -> AsyncIterator[ExternalPlayer]:
    """A player whose agent is the program ``command``, with the model and all else of ``player``."""
    desk = Desk(player.model)
    with program.commands() as folder:
        async with desk.open():
            yield ExternalPlayer(
                engine=player.engine,
                chat=retaining(player.chat),
                model=player.model,
                env=player.env,
                max_tokens=player.max_tokens,
                hint_role=player.hint_role,
                command=command,
                idle_s=idle_s,
                refuse_sampling=refuse_sampling,
                desk=desk,
                bin_folder=folder,
            )
