"""From a trace to an episode of the journal: text turns, no token ids, and hint sites that name a turn and a kind.

Tokens come later, once, from the tokenizer of the model that learns. Until then ``token_ids`` is empty,
``tokenizer_fingerprint`` is the empty string, and all positions are 0. A tool turn repeats name and arguments of
the call that it answers, so the calls of an assistant turn are the tool turns behind it. A recording that nobody
graded has the outcome ``ungraded`` and the reward None.

The same error may be in several traces: a resumed session copies its history, a branch shares its beginning, a
file that grew is read again. It is a hint site once: whoever has seen the same conversation up to the same error
does not make another.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

from hintloop.replay.episode import Episode, HintSite, Outcome, Turn
from hintloop.replay.ingest.classify import MODEL, classify
from hintloop.replay.ingest.report import Report
from hintloop.replay.ingest.trace import Failure, Grade, Message, ToolCall, Trace

ENV = "recorded"
NO_RESULT = "no result was recorded"
"""``error_message`` of the tool turn of a call without one; it has no kind, as nothing is known of it."""


def to_episode(trace: Trace, seen: set[bytes], report: Report) -> Episode:
    """The episode of a trace; ``seen`` holds the errors that are hint sites already, and gets the new ones."""
    turns: list[Turn] = []
    failed: list[tuple[int, int, str]] = []
    for message in trace.messages:
        failure = _failure(message)
        if failure is not None and not message.copied:
            report.errors[f"{failure.cause}/{failure.kind}"] += 1
        first = len(turns)
        turns.extend(_turns(message, failure))
        if failure is not None and failure.cause == MODEL and not message.copied:
            failed.append((first, len(turns), failure.kind))
    digests = _digests(turns, [end for _, end, _ in failed])
    sites = []
    for (turn, _, kind), digest in zip(failed, digests, strict=False):
        if digest in seen:
            report.note("error_known_already")
            continue
        seen.add(digest)
        sites.append(_site(turn, kind))
    episode_id = f"{trace.source}/{trace.session or 'unnamed'}/{trace.branch}/{digests[-1].hex()[:12]}"
    report.sites += len(sites)
    grade = trace.grade or Grade(Outcome.UNGRADED, None)
    return Episode(
        episode_id=episode_id,
        group_id=episode_id,
        task_id=f"{trace.source}/{trace.session or 'unnamed'}",
        env=ENV,
        source=trace.source,
        created_at=trace.ended_at or 0.0,
        model=trace.model,
        tokenizer_fingerprint="",
        token_ids=(),
        loss_mask=(),
        logprobs=(),
        policy_versions=(),
        turns=tuple(turns),
        outcome=grade.outcome,
        reward=grade.reward,
        reward_parts=dict(grade.parts),
        hint_sites=tuple(sites),
    )


def known_sites(episodes: Iterable[Episode]) -> set[bytes]:
    """The errors that are hint sites of these episodes, in the form of ``seen``; only of what has no tokens yet."""
    found: set[bytes] = set()
    for episode in episodes:
        if episode.hint_sites and not episode.token_ids:
            ends = [_end_of(episode.turns, site.turn) for site in episode.hint_sites]
            found.update(_digests(episode.turns, ends)[: len(ends)])
    return found


def _failure(message: Message) -> Failure | None:
    """What went wrong in a turn: itself, else the first failure that the model caused, else the first of all."""
    if message.failure is not None:
        return message.failure
    found = [failure for call in message.calls if (failure := classify(call))]
    return next((failure for failure in found if failure.cause == MODEL), found[0] if found else None)


def _turns(message: Message, failure: Failure | None) -> list[Turn]:
    called = message.calls[0] if message.calls else None
    own = Turn(
        role=message.role,
        start=0,
        end=0,
        text=message.text,
        tool_name=called.name if called else None,
        tool_arguments=called.arguments if called else None,
        error_kind=failure.kind if failure else None,
        error_message=failure.message if failure else None,
        error_cause=failure.cause if failure else None,
    )
    return [own, *(_tool_turn(call) for call in message.calls)]


def _tool_turn(call: ToolCall) -> Turn:
    result = call.result
    return Turn(
        role="tool",
        start=0,
        end=0,
        text=result.text if result else "",
        tool_name=call.name,
        tool_arguments=call.arguments,
        error_message=None if result else NO_RESULT,
        exit_code=result.exit_code if result else None,
        seconds=result.seconds if result else 0.0,
    )


def _site(turn: int, kind: str) -> HintSite:
    return HintSite(turn=turn, kind=kind, hint="", insert_at=0, start=0, end=0, hint_ids=())


def _end_of(turns: tuple[Turn, ...], turn: int) -> int:
    """Index behind the tool turns of an assistant turn."""
    end = turn + 1
    while end < len(turns) and turns[end].role == "tool":
        end += 1
    return end


def _digests(turns: Iterable[Turn], ends: list[int]) -> list[bytes]:
    """Digests of the conversation up to each of ``ends``, which ascend, and of all of it as the last."""
    running, found = blake2b(digest_size=16), []
    waiting = iter([*ends, -1])
    end = next(waiting)
    for number, turn in enumerate(turns, 1):
        for part in (turn.role, turn.text, turn.tool_name, turn.tool_arguments):
            data = part.encode("utf-8", "surrogatepass") if part else b""
            running.update(len(data).to_bytes(8, "little"))
            running.update(data)
        if number == end:
            found.append(running.digest())
            end = next(waiting)
    return [*found, running.digest()]
