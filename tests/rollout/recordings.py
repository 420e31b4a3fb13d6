"""Recorded episodes: text, calls with their results, and no tokens."""

from __future__ import annotations

import json
from typing import Any

from hintloop.replay.episode import Episode, HintSite, Outcome, Turn
from hintloop.replay.ingest.episodes import NO_RESULT


def recorded(*turns: Turn, name: str = "a", sites: tuple[int, ...] = ()) -> Episode:
    return Episode(
        episode_id=f"codex/{name}/main/1",
        group_id=f"codex/{name}/main/1",
        task_id=f"codex/{name}",
        env="recorded",
        source="codex",
        created_at=0.0,
        model="gpt",
        tokenizer_fingerprint="",
        token_ids=(),
        loss_mask=(),
        logprobs=(),
        policy_versions=(),
        turns=turns,
        outcome=Outcome.UNGRADED,
        reward=None,
        hint_sites=tuple(HintSite(turn, turns[turn].error_kind or "", "", 0, 0, 0, ()) for turn in sites),
    )


def user(text: str) -> Turn:
    return Turn("user", 0, 0, text)


def agent(text: str = "", *, failed: bool = False) -> Turn:
    if not failed:
        return Turn("assistant", 0, 0, text)
    return Turn(
        "assistant", 0, 0, text, error_kind="command_not_found", error_message="no", error_cause="model"
    )


def call(name: str, given: Any, text: str | None = "ok") -> Turn:
    """The tool turn of a call; without a text it got no result."""
    lost = NO_RESULT if text is None else None
    return Turn("tool", 0, 0, text or "", name, json.dumps(given), error_message=lost)


def episode(name: str = "a", task: str = "list the files") -> Episode:
    """A failed command, a good one, two calls at once, and a last word."""
    return recorded(
        user(task),
        agent("I look", failed=True),
        call("shell", {"command": "lss"}, "lss: command not found"),
        agent(),
        call("shell", {"command": "ls"}, "a.py"),
        agent(),
        call("read.file", {"path": "a.py", "lines": [1, 2]}, "x = 1"),
        call("shell", {"command": "pwd"}, None),
        agent("There is a.py"),
        name=name,
        sites=(1,),
    )
