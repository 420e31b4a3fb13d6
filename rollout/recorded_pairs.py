"""Teachers at the states of recorded episodes; what they agree on goes to the journal as supplements.

A question is settled when it gave a pair, which is in the journal then, or when all of these teachers have answered.
Only what is not settled is asked, and an answer that came before a crash is in the cache: so the same command goes
on where it was, and at its end has nothing to do. A teacher that did not answer is asked again the next time.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Any

from hintloop.replay.episode import Episode, PreferencePair
from hintloop.replay.journal import Filter, Journal
from hintloop.replay.supplement import SOURCE, is_supplement, state_keys, supplement
from hintloop.rollout.answer_cache import AnswerCache, cache_key
from hintloop.rollout.asking import AskRule
from hintloop.rollout.chat_api import chat_url, read_calls
from hintloop.rollout.config import TeachersConfig, TeacherSpec
from hintloop.rollout.pairs import Agreement, canonical_turn, judge, said_otherwise
from hintloop.rollout.recording import CountTokens, Recording, State, cut_history
from hintloop.rollout.teachers import Bill, TeacherAnswer, question, worst_case_usd
from hintloop.rollout.teaching import Asking

WRITER = "replay"
_LINE = re.compile(r"([0-9a-f]{32}) ([0-9a-f]{16})")


@dataclass(frozen=True, slots=True)
class History:
    """How much of the transcript before a turn teachers are shown; ``max_tokens`` None is all of it."""

    max_tokens: int | None = None
    count: CountTokens | None = None
    """Tokens of a text; None takes four characters for one."""


def room_for(settings: TeachersConfig) -> int:
    """Questions to have under way: so few that none runs out of time while it waits for its teachers' limits."""
    own = [spec.in_flight for spec in settings.teachers if spec.in_flight is not None]
    limits = [spec.requests_per_minute for spec in settings.teachers if spec.requests_per_minute is not None]
    return max(
        1, min([settings.in_flight, *own, *(int(limit * settings.timeout_s / 120) for limit in limits)])
    )


@dataclass(slots=True)
class Found:
    """What is in the journal."""

    episodes: int = 0
    """Recordings: episodes that have text and no tokens."""
    not_recorded: int = 0
    """Episodes with tokens; they were asked about while they were played."""
    states: int = 0
    """Turns to ask about."""
    settled: int = 0
    """Of those, the turns that were asked about before, here or in a recording that begins the same."""
    too_long: int = 0
    """Of those, the turns that are not asked about, as their transcript is too long even when it is cut."""


@dataclass(slots=True)
class Replayed:
    """What became of a replay."""

    found: Found
    supplements: int = 0
    """Episodes that were written."""
    stopped: str = "end"
    """``end`` of the journal, or ``budget``: a teacher could not be asked for what it might cost."""


class Settled:
    """The keys of questions that a panel of teachers has answered without a pair, in a file that only grows.

    Other teachers, or another number that must agree, are another panel: they may give a pair.
    """

    def __init__(self, path: Path, teachers: Sequence[TeacherSpec], agree: int) -> None:
        self._path = path
        named = sorted([spec.base_url, spec.model] for spec in teachers)
        self._panel = blake2b(json.dumps([named, agree]).encode(), digest_size=8).hexdigest()
        text = path.read_text(encoding="ascii", errors="replace") if path.exists() else ""
        # What a crash cut off is no whole line, and is settled again.
        lines = filter(None, map(_LINE.fullmatch, text.split("\n")))
        self.keys = {line[1] for line in lines if line[2] == self._panel}

    def add(self, keys: Sequence[str]) -> None:
        """On the disk when this returns."""
        self.keys.update(keys)
        if not keys:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:
            file.write(b"\n" + "".join(f"{key} {self._panel}\n" for key in keys).encode())
            file.flush()
            os.fsync(file.fileno())


@dataclass(frozen=True, slots=True)
class _Question:
    recording: Recording
    state: State
    bill: Bill

    def messages(self, history: History, found: Found) -> list[dict[str, Any]] | None:
        """Made when it is their turn: those of one long recording, all at once, would fill the memory."""
        told = cut_history(self.recording.messages(self.state.turn), history.max_tokens, history.count)
        found.too_long += told is None
        return told


async def replay(
    journal: Journal,
    asking: Asking,
    settled: Settled,
    *,
    history: History,
    in_flight: int,
    progress: Callable[[int], None] = lambda _: None,
) -> Replayed:
    """Ask about every recording of the journal; ``asking.counts`` says what came of it.

    ``in_flight`` questions are under way at the same time, each to all teachers; ``progress`` is told of every one
    that is over. ``ValueError`` as ``Recording.states``; errors of ``JournalReader.poll_segment`` and
    ``JournalWriter.append``.
    """
    done = Replayed(Found())
    writer, room = journal.writer(WRITER), asyncio.Semaphore(in_flight)

    async def ask(one: _Question) -> list[TeacherAnswer]:
        async with room:  # before the time of the question begins
            messages, tools = one.messages(history, done.found), one.recording.tools
            asked = [each.ask(messages, tools, one.bill) for each in asking.teachers if messages is not None]
            answers = await asyncio.gather(*asked)
        progress(1)
        return [_as_recorded(one.recording, answer) for answer in answers]

    for questions in _questions(journal, asking.rule, settled, done.found):
        answered = await asyncio.gather(*map(ask, questions))
        pairs: dict[str, tuple[Episode, list[PreferencePair]]] = {}
        without = []
        for one, answers in zip(questions, answered, strict=True):
            pair = _account(one, answers, asking) if answers else None
            if pair is not None:
                episode = one.recording.episode
                pairs.setdefault(episode.episode_id, (episode, []))[1].append(pair)
            elif answers and all(answer.calls or answer.unusable for answer in answers):
                without.append(one.state.key)
        if pairs:
            writer.append([supplement(episode, made) for episode, made in pairs.values()])
            done.supplements += len(pairs)
        settled.add(without)
        if any(answer.over_budget for answers in answered for answer in answers):
            done.stopped = "budget"
            break
    return done


def estimate(
    journal: Journal,
    rule: AskRule,
    specs: Sequence[TeacherSpec],
    settled: Settled,
    cache: AnswerCache,
    *,
    attempts: int,
    history: History,
) -> tuple[Found, list[dict[str, Any]]]:
    """What ``replay`` would ask, and a row for each teacher with what that may cost at worst; asks nothing.

    ``usd`` is the worst case when every question is asked once, ``worst_usd`` when each of ``attempts`` tries is
    billed in full. Answers that are there already cost nothing.
    """
    found, counts = Found(), {spec.name: Counter[str]() for spec in specs}
    nano: Counter[str] = Counter()
    for one in chain.from_iterable(_questions(journal, rule, settled, found)):
        messages = one.messages(history, found)
        if messages is not None:
            for spec in specs:
                body = question(spec, messages, one.recording.tools)
                known = cache.get(cache_key(chat_url(spec), body), read_calls) is not None
                counts[spec.name]["answered" if known else "questions"] += 1
                nano[spec.name] += (
                    0 if known else round(worst_case_usd(spec, json.dumps(body).encode()) * 1e9)
                )
    rows = [
        {
            "teacher": spec.name,
            "questions": counts[spec.name]["questions"],
            "answered": counts[spec.name]["answered"],
            "usd": nano[spec.name] / 1e9,
            "worst_usd": nano[spec.name] * attempts / 1e9,
        }
        for spec in specs
    ]
    return found, rows


def _questions(journal: Journal, rule: AskRule, settled: Settled, found: Found) -> Iterator[list[_Question]]:
    """The questions of one segment after the other, without those that are settled; ``found`` counts."""
    known = settled.keys | _with_pairs(journal)
    reader = journal.reader()
    while segment := reader.poll_segment():
        questions = []
        for episode in segment.episodes:
            if is_supplement(episode):
                continue
            if episode.token_ids:
                found.not_recorded += 1
                continue
            found.episodes += 1
            recording = Recording(episode)
            for state in recording.states(rule):
                found.states += 1
                if state.key in known:
                    found.settled += 1
                else:
                    known.add(state.key)
                    questions.append(_Question(recording, state, Bill(episode.episode_id)))
        if questions:
            yield questions


def _with_pairs(journal: Journal) -> set[str]:
    keys: set[str] = set()
    reader = journal.reader(only=Filter(sources=(SOURCE,)))
    while segment := reader.poll_segment():
        for episode in segment.episodes:
            of_turn = state_keys(episode.turns)
            keys.update(of_turn[pair.turn] for pair in episode.pairs)
    return keys


def _account(one: _Question, answers: Sequence[TeacherAnswer], asking: Asking) -> PreferencePair | None:
    """The pair, if it became one; counted like those of a run."""
    counts, value = asking.counts, asking.counts.value(one.state.reason)
    counts.asked_turns += 1
    value.questions += 1
    counts.cost_usd += one.bill.usd
    value.cost_usd += one.bill.usd
    own = one.recording.calls(one.state.turn)
    agreed = judge(answers, own, asking.rule.agree, counts)
    if agreed is None:
        return None
    counts.pairs += 1
    value.pairs += 1
    return _pair(one, answers, agreed)


def _pair(one: _Question, answers: Sequence[TeacherAnswer], agreed: Agreement) -> PreferencePair:
    """Text only: tokens come with those of the recording, from the tokenizer of the model that learns."""
    text = one.recording.episode.turns[one.state.turn].text
    own = canonical_turn(one.recording.calls(one.state.turn))
    return PreferencePair(
        turn=one.state.turn,
        prompt_end=0,
        chosen_ids=(),
        rejected_ids=(),
        chosen_text=canonical_turn(agreed.calls),
        rejected_text=f"{text}\n{own}" if text else own,
        asked=len(answers),
        agreed=len(agreed.teachers),
        verified=False,
        teachers=agreed.teachers,
        cost_usd=sum(answer.cost_usd for answer in answers),
        others=said_otherwise(answers, agreed),
    )


def _as_recorded(recording: Recording, answer: TeacherAnswer) -> TeacherAnswer:
    return replace(answer, calls=tuple(map(recording.recorded_call, answer.calls)))
