"""Pairs for an episode that is in the journal already: an episode of their own, which holds nothing else.

A segment never changes, so teachers that are asked about a recording later cannot add to its episode. What they
gave is a *supplement*: the conversation up to the last turn with a pair, and the pairs. It has its own id and group,
no hint sites, no reward and no outcome, so a reader of the whole journal trains each hint site and each pair once,
in whatever order the two come, and neither replaces the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

from hintloop.replay.episode import Episode, Outcome, PreferencePair, Turn
from hintloop.replay.export.chat import answers_to

SOURCE = "replay"
"""The ``source`` of supplements."""
_MARK = "+pairs/"


def supplement(episode: Episode, pairs: Sequence[PreferencePair]) -> Episode:
    """The pairs of a recorded episode as one of their own; the same pairs give the same id. Needs a pair."""
    last = max(pair.turn for pair in pairs)
    end = last + 1 + len(answers_to(episode.turns, last))
    told = "\n".join(f"{pair.turn} {pair.chosen_text}" for pair in pairs)
    digest = blake2b(told.encode("utf-8", "surrogatepass"), digest_size=6).hexdigest()
    name = f"{episode.episode_id}{_MARK}{digest}"
    return replace(
        episode,
        episode_id=name,
        group_id=name,
        source=SOURCE,
        turns=episode.turns[:end],
        outcome=Outcome.UNGRADED,
        reward=None,
        reward_parts={},
        hint_sites=(),
        pairs=tuple(pairs),
    )


def is_supplement(episode: Episode) -> bool:
    """Whether an episode repeats a conversation for the sake of its pairs."""
    return episode.source == SOURCE


def state_keys(turns: Sequence[Turn]) -> dict[int, str]:
    """For each assistant turn a digest of all that is before it and of what it does, but not of what came of it.

    Two recordings that share their beginning share these keys.
    """
    running, keys = blake2b(digest_size=16), {}
    for number, turn in enumerate(turns):
        if turn.role == "assistant":
            own = running.copy()
            own.update(_framed(turn.role, turn.text))
            for call in answers_to(turns, number):
                own.update(_framed(call.tool_name or "", call.tool_arguments or ""))
            keys[number] = own.hexdigest()
        running.update(_framed(turn.role, turn.text, turn.tool_name or "", turn.tool_arguments or ""))
    return keys


def _framed(*texts: str) -> bytes:
    parts = [text.encode("utf-8", "surrogatepass") for text in texts]
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)
