"""Hints that a teacher writes: in place of the template's text where one comes in time, else the template stays.

The writer is told the end of the transcript, the turn that failed and the error: what the agent itself has seen,
and nothing of the hidden solution.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hintloop.agent.conversation import RenderError
from hintloop.agent.episode import TurnEvent
from hintloop.envs.errors import Cause
from hintloop.replay.episode import HintSite
from hintloop.rollout.teachers import Bill, Teacher

MAX_SHOWN_CHARS = 12_000
"""Of the transcript, its end."""
MAX_HINT_CHARS = 300
_OPENS = re.compile(r"<(?=[|/\w])")
"""How special tokens begin; in a hint they are plain text."""
_TASK = (
    "A coding agent made a mistake in a tool call. Write the one short sentence that would have kept it from this "
    "mistake had it read it just before: what it could have known or looked up. Rely on nothing but what is shown. "
    "Do not solve its task, do not write code, do not mention that the call has been made."
)


@dataclass(slots=True)
class WriterCounts:
    """What became of the errors that a hint was wanted for, summed over all episodes."""

    asked: int = 0
    written: int = 0
    """Hint sites with the writer's text."""
    failed: int = 0
    """The writer had no answer, or none that the chat template takes."""
    late: int = 0
    cost_usd: float = 0.0


class HintWriter:
    """Asks for the hints of one episode; ``on_turn`` watches it being played.

    ``paid_by`` names what they are booked on in the ledger.
    """

    def __init__(
        self,
        paid_by: str,
        teacher: Teacher,
        counts: WriterCounts,
        *,
        role: str,
        max_asks: int,
        deadline_s: float,
    ) -> None:
        self._teacher = teacher
        self._counts = counts
        self._role = role
        self._max_asks = max_asks
        self._deadline_s = deadline_s
        self._bill = Bill(paid_by)
        self._asked: dict[int, tuple[TurnEvent, asyncio.Task[str | None]]] = {}

    def on_turn(self, event: TurnEvent) -> None:
        """Ask for a hint if the turn was an error of the agent; returns at once."""
        if not event.errors or event.errors[0].cause is not Cause.MODEL or len(self._asked) >= self._max_asks:
            return
        self._counts.asked += 1
        writing = asyncio.create_task(self._teacher.write(question(event), self._bill))
        self._asked[event.episode_turn] = event, writing

    async def rewrite(self, sites: Sequence[HintSite]) -> tuple[HintSite, ...]:
        """The sites with what was written in time."""
        tasks = [task for _, task in self._asked.values()]
        if tasks:
            await asyncio.wait(tasks, timeout=self._deadline_s)
        made = tuple(self._rewritten(site) for site in sites)
        await self.cancel()
        return made

    async def cancel(self) -> None:
        """Stop asking."""
        late = [task for _, task in self._asked.values() if not task.done()]
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        self._counts.late += len(late)
        self._counts.cost_usd += self._bill.usd
        self._bill.usd = 0.0
        self._asked.clear()

    def _rewritten(self, site: HintSite) -> HintSite:
        event, task = self._asked.get(site.turn, (None, None))
        if event is None or task is None or not task.done():
            return site
        text = task.result()
        try:
            if text is None:
                raise RenderError("nothing was written")
            plain = _OPENS.sub("< ", text.removeprefix("Hint:").strip()[:MAX_HINT_CHARS])
            hint = f"Hint: {plain}"
            insertion = event.conversation.hint(event.turn, hint, role=self._role)
        except RenderError:
            self._counts.failed += 1
            return site
        self._counts.written += 1
        return replace(site, hint=hint, insert_at=insertion.insert_at, hint_ids=insertion.hint_ids)


def question(event: TurnEvent) -> list[dict[str, str]]:
    """What the writer is asked about a failed turn."""
    shown = "\n".join(json.dumps(message, ensure_ascii=False) for message in event.messages)[
        -MAX_SHOWN_CHARS:
    ]
    parts = {
        "The agent's tools": ", ".join(spec["name"] for spec in event.task.tools),
        "The end of its transcript": shown,
        "Its mistake": event.text[:MAX_SHOWN_CHARS],
        "The error": f"{event.errors[0].kind}: {event.errors[0].message}"[:MAX_SHOWN_CHARS],
    }
    text = "\n\n".join(f"{name}:\n{part}" for name, part in parts.items())
    return [{"role": "system", "content": _TASK}, {"role": "user", "content": text}]
