"""Preference pairs: what the teachers agree on, against what the agent did at the same turn.

Teachers are asked while the episode goes on; nothing waits for them but the journal entry of their group, and
that only up to a deadline. Agreement is about the action (tools and arguments of a turn), not about the words around
it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass

from hintloop.agent.conversation import RenderError
from hintloop.agent.engine import Sample
from hintloop.agent.episode import Environment, Keep, TurnEvent
from hintloop.envs.client import EnvironmentLost
from hintloop.envs.errors import Cause
from hintloop.envs.models import ToolCall
from hintloop.replay.episode import PreferencePair
from hintloop.rollout.asking import AskRule, PairCounts, Reason, Uncertainty, planned
from hintloop.rollout.teachers import Bill, Teacher, TeacherAnswer
from hintloop.rollout.verify import objection

VERIFY_TIMEOUT_S = 60.0
"""Time for all trials of one episode together."""
ENVIRONMENT_GONE = "environment gone"


@dataclass(frozen=True, slots=True)
class Agreement:
    """The action that enough teachers gave: all calls of a turn."""

    calls: tuple[ToolCall, ...]
    teachers: tuple[str, ...]


def canonical(call: ToolCall) -> str:
    """The action as text: equal for two calls exactly when they do the same."""
    if call.malformed is not None:
        return "malformed"
    return f"{call.name} {json.dumps(call.arguments, sort_keys=True)}"


def canonical_turn(calls: Sequence[ToolCall]) -> str:
    """All calls of a turn as text, a line for each: their order is that in which they are made."""
    return "\n".join(canonical(call) for call in calls)


def agree(answers: Sequence[TeacherAnswer], threshold: int) -> Agreement | None:
    """The action given most often, if ``threshold`` teachers gave it; on a tie, the one given first.

    A teacher has one vote, its first answer.
    """
    votes: dict[str, list[TeacherAnswer]] = {}
    voted = set[str]()
    for answer in answers:
        if answer.calls and answer.teacher not in voted:
            voted.add(answer.teacher)
            votes.setdefault(canonical_turn(answer.calls), []).append(answer)
    best = max(votes.values(), key=len, default=[])
    if not best or len(best) < threshold:
        return None
    return Agreement(best[0].calls, tuple(answer.teacher for answer in best))


def said_otherwise(answers: Sequence[TeacherAnswer], agreed: Agreement) -> tuple[str, ...]:
    """What the teachers said who did not agree, each as ``name: action``."""
    return tuple(
        f"{answer.teacher}: {canonical_turn(answer.calls) if answer.calls else 'no answer'}"
        for answer in answers
        if answer.teacher not in agreed.teachers
    )


def judge(
    answers: Sequence[TeacherAnswer], own: Sequence[ToolCall], threshold: int, counts: PairCounts
) -> Agreement | None:
    """What the teachers agree on, if the agent's ``own`` calls were others; ``counts`` gets what became of it."""
    counts.answers += sum(bool(answer.calls) for answer in answers)
    counts.cached += sum(answer.cached for answer in answers)
    counts.errors.update(answer.teacher for answer in answers if answer.error is not None)
    counts.over_budget += sum(answer.over_budget for answer in answers)
    agreed = agree(answers, threshold)
    if agreed is None:
        counts.disagreed += 1
        return None
    if canonical_turn(own) == canonical_turn(agreed.calls):
        counts.same += 1
        return None
    return agreed


def make_pair(
    event: TurnEvent, answers: Sequence[TeacherAnswer], agreed: Agreement, *, verified: bool = False
) -> PreferencePair:
    """The pair of an agreed action and the agent's own turn. Raises ``RenderError``."""
    return PreferencePair(
        turn=event.episode_turn,
        prompt_end=event.conversation.prompt_end(event.turn),
        chosen_ids=event.conversation.encode_calls(event.turn, agreed.calls),
        rejected_ids=event.sampled_ids,
        chosen_text=canonical_turn(agreed.calls),
        rejected_text=event.text,
        asked=len(answers),
        agreed=len(agreed.teachers),
        verified=verified,
        teachers=agreed.teachers,
        cost_usd=sum(answer.cost_usd for answer in answers),
        others=said_otherwise(answers, agreed),
    )


@dataclass(slots=True)
class _Question:
    event: TurnEvent
    reason: Reason
    bill: Bill


_Found = tuple[_Question, Sequence[TeacherAnswer], Agreement]
"""A question that the teachers agreed on, otherwise than the agent."""


class PairMaker:
    """Asks all teachers about turns of one episode: ``keep`` and ``on_turn`` watch it being played.

    Where pairs are verified, ``verify_in`` follows while its environment is still there; then ``pairs``.
    """

    def __init__(
        self,
        episode_id: str,
        teachers: Sequence[Teacher],
        rule: AskRule,
        counts: PairCounts,
        uncertainty: Uncertainty | None = None,
        *,
        paid_by: str | None = None,
    ) -> None:
        """``paid_by`` names what the answers are booked on in the ledger; None: the episode."""
        self._episode_id = episode_id
        self._paid_by = paid_by or episode_id
        self._teachers = teachers
        self._rule = rule
        self._counts = counts
        self._uncertainty = uncertainty or Uncertainty()
        self._plans: dict[int, Reason | None] = {}
        self._asked: dict[asyncio.Task[list[TeacherAnswer]], _Question] = {}
        self._num_asked = 0
        self._made: list[PreferencePair] = []

    def keep(self, turn: int, sample: Sample, calls: Sequence[ToolCall]) -> Keep:
        """Whether the state before the turn has to stay at hand, in case that an action is tried there."""
        if self._rule.verify == "none" or not self._may_ask(sample.finish_reason == "stop"):
            return "no"
        return "on_error" if self._plan(turn, sample.logprobs) is None else "always"

    def on_turn(self, event: TurnEvent) -> None:
        """Ask about this turn, or not; returns at once."""
        # A failing test shows a mistake, and is none.
        mistake = any(error.cause is Cause.MODEL for error in event.errors)
        plan = self._plan(event.turn, event.logprobs)
        reason = Reason.ERROR if mistake else plan
        if reason is None or not self._may_ask(event.ended):
            return
        self._num_asked += 1
        self._counts.asked_turns += 1
        self._counts.value(reason).questions += 1
        question = _Question(event, reason, Bill(self._paid_by))
        self._asked[asyncio.create_task(self._ask_all(event, question.bill))] = question

    async def verify_in(self, env: Environment) -> None:
        """Make the pairs, where they have to be verified, in the environment that the episode was played in."""
        if self._rule.verify == "none":
            return
        agreed = await self._answered()
        try:
            async with asyncio.timeout(VERIFY_TIMEOUT_S):
                while agreed:
                    await self._verify(env, *agreed[0])
                    agreed.pop(0)
        except (EnvironmentLost, TimeoutError):
            self._counts.unverified[ENVIRONMENT_GONE] += len(agreed)

    async def pairs(self) -> tuple[PreferencePair, ...]:
        """The pairs of the episode; waits for answers up to the deadline and drops the rest."""
        if self._rule.verify == "none":
            for found in await self._answered():
                self._add(*found, verified=False)
        return tuple(self._made)

    async def cancel(self) -> None:
        """Stop asking."""
        late = [task for task in self._asked if not task.done()]
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        self._counts.late += len(late)
        for question in self._asked.values():
            self._counts.cost_usd += question.bill.usd
            self._counts.value(question.reason).cost_usd += question.bill.usd
        self._asked.clear()

    def _may_ask(self, ended: bool) -> bool:
        return ended and self._num_asked < self._rule.max_asks

    def _plan(self, turn: int, logprobs: Sequence[float]) -> Reason | None:
        if turn not in self._plans:
            self._plans[turn] = planned(self._rule, self._uncertainty, self._episode_id, turn, logprobs)
        return self._plans[turn]

    async def _ask_all(self, event: TurnEvent, bill: Bill) -> list[TeacherAnswer]:
        questions = [teacher.ask(event.messages, event.task.tools, bill) for teacher in self._teachers]
        return list(await asyncio.gather(*questions))

    async def _answered(self) -> list[_Found]:
        """What the teachers said in time and agree on."""
        if self._asked:
            await asyncio.wait(self._asked, timeout=self._rule.deadline_s)
        in_time = [(task.result(), question) for task, question in self._asked.items() if task.done()]
        await self.cancel()
        found = [self._agreed(question, answers) for answers, question in in_time]
        return [one for one in found if one is not None]

    def _agreed(self, question: _Question, answers: Sequence[TeacherAnswer]) -> _Found | None:
        agreed = judge(answers, question.event.calls, self._rule.agree, self._counts)
        return None if agreed is None else (question, answers, agreed)

    async def _verify(
        self, env: Environment, question: _Question, answers: Sequence[TeacherAnswer], agreed: Agreement
    ) -> None:
        assert self._rule.verify != "none"
        problem = await objection(env, question.event, agreed.calls, self._rule.verify)
        if problem is None:
            self._add(question, answers, agreed, verified=True)
        else:
            self._counts.unverified[problem] += 1

    def _add(
        self, question: _Question, answers: Sequence[TeacherAnswer], agreed: Agreement, *, verified: bool
    ) -> None:
        try:
            pair = make_pair(question.event, answers, agreed, verified=verified)
        except RenderError as error:
            self._counts.unrenderable[str(error)] += 1
            return
        self._made.append(pair)
        self._counts.pairs += 1
        self._counts.value(question.reason).pairs += 1
