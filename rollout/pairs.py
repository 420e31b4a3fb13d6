"""Preference pairs: what the teachers agree on, against what the agent did at the same turn.

Teachers are asked while the episode goes on; nothing waits for them but the journal entry of their group, and
that only up to a deadline. Agreement is about the action (tool and arguments), not about the words around it.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from hintloop.agent.conversation import RenderError
from hintloop.agent.episode import TurnEvent
from hintloop.envs.errors import Cause
from hintloop.envs.models import ToolCall
from hintloop.replay.episode import PreferencePair
from hintloop.rollout.teachers import Teacher, TeacherAnswer


@dataclass(frozen=True, slots=True)
class Agreement:
    """The action that enough teachers gave."""

    call: ToolCall
    teachers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AskRule:
    """When to ask, and how many must agree."""

    agree: int
    """Teachers that must give the same action."""
    ask_probability: float
    """For a turn without an error of the agent; turns with one are always asked about."""
    max_asks: int
    """Turns asked about per episode at most."""
    deadline_s: float
    """How long answers may come in after the end of the episode, seconds."""


@dataclass(slots=True)
class PairCounts:
    """What became of the questions, summed over all episodes."""

    asked_turns: int = 0
    answers: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    """Answers that were none, by teacher."""
    late: int = 0
    """Turns whose answers did not come before the deadline."""
    disagreed: int = 0
    same: int = 0
    """Turns where the teachers agreed with the agent."""
    unrenderable: int = 0
    pairs: int = 0
    cost_usd: float = 0.0


def canonical(call: ToolCall) -> str:
    """The action as text: equal for two calls exactly when they do the same."""
    if call.malformed is not None:
        return "malformed"
    return f"{call.name} {json.dumps(call.arguments, sort_keys=True)}"


def agree(answers: Sequence[TeacherAnswer], threshold: int) -> Agreement | None:
    """The action given most often, if ``threshold`` teachers gave it; on a tie, the one given first."""
    votes: dict[str, list[tuple[str, ToolCall]]] = {}
    for answer in answers:
        if answer.call is not None:
            votes.setdefault(canonical(answer.call), []).append((answer.teacher, answer.call))
    best = max(votes.values(), key=len, default=[])
    if not best or len(best) < threshold:
        return None
    return Agreement(best[0][1], tuple(name for name, _ in best))


def make_pair(event: TurnEvent, answers: Sequence[TeacherAnswer], agreed: Agreement) -> PreferencePair:
    """The pair of an agreed action and the agent's own turn. Raises ``RenderError``."""
    chosen_ids = event.conversation.encode_call(agreed.call)
    if event.conversation.parse(chosen_ids) != [agreed.call]:
        raise RenderError("the agreed call does not survive the chat template")  # a special token within, say
    return PreferencePair(
        turn=event.episode_turn,
        prompt_end=event.conversation.prompt_end(event.turn),
        chosen_ids=chosen_ids,
        rejected_ids=event.sampled_ids,
        chosen_text=canonical(agreed.call),
        rejected_text=event.text,
        asked=len(answers),
        agreed=len(agreed.teachers),
        verified=False,  # nobody has executed the chosen action
        teachers=agreed.teachers,
        cost_usd=sum(answer.cost_usd for answer in answers),
    )


class PairMaker:
    """Asks all teachers about turns of one episode; ``on_turn`` is its observer."""

    def __init__(self, episode_id: str, teachers: Sequence[Teacher], rule: AskRule, counts: PairCounts):
        self._teachers = teachers
        self._rule = rule
        self._counts = counts
        self._random = random.Random(f"ask:{episode_id}")
        self._asked: dict[asyncio.Task[list[TeacherAnswer]], TurnEvent] = {}

    def on_turn(self, event: TurnEvent) -> None:
        """Ask about this turn, or not; returns at once."""
        chance = self._random.random() < self._rule.ask_probability
        mistake = any(
            error.cause is Cause.MODEL for error in event.errors
        )  # a failing test shows one, is none
        wanted = event.ended and (chance or mistake)
        if wanted and len(self._asked) < self._rule.max_asks:
            self._counts.asked_turns += 1
            self._asked[asyncio.create_task(self._ask_all(event))] = event

    async def pairs(self) -> tuple[PreferencePair, ...]:
        """The pairs of the episode; waits for answers up to the deadline and drops the rest."""
        if self._asked:
            await asyncio.wait(self._asked, timeout=self._rule.deadline_s)
        made = [self._pair(event, task.result()) for task, event in self._asked.items() if task.done()]
        self._counts.late += await self.cancel()
        return tuple(pair for pair in made if pair is not None)

    async def cancel(self) -> int:
        """Stop asking; the number of questions that were still open."""
        late = [task for task in self._asked if not task.done()]
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        self._asked.clear()
        return len(late)

    async def _ask_all(self, event: TurnEvent) -> list[TeacherAnswer]:
        questions = [teacher.ask(event.messages, event.task.tools) for teacher in self._teachers]
        return list(await asyncio.gather(*questions))

    def _pair(self, event: TurnEvent, answers: Sequence[TeacherAnswer]) -> PreferencePair | None:
        counts = self._counts
        counts.answers += sum(answer.call is not None for answer in answers)
        counts.errors.update(answer.teacher for answer in answers if answer.error is not None)
        counts.cost_usd += sum(answer.cost_usd for answer in answers)
        agreed = agree(answers, self._rule.agree)
        if agreed is None:
            counts.disagreed += 1
            return None
        if [canonical(call) for call in event.calls] == [canonical(agreed.call)]:
            counts.same += 1
            return None
        try:
            pair = make_pair(event, answers, agreed)
        except RenderError:
            counts.unrenderable += 1
            return None
        counts.pairs += 1
        return pair
