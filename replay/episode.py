"""The episode: what one attempt at one task left behind.

This is the vocabulary that the rollout side and the learner share; it is also the Parquet schema of the
journal. Everything here is frozen, picklable plain data. Token positions are indices into ``token_ids``;
ranges are half-open.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from hintloop.replay.vector import Vector

SCHEMA_VERSION = 3
NOT_SAMPLED = -1
"""Policy version of a token that no policy sampled (prompt, tool output)."""


PER_TOKEN = {"token_ids": "i", "loss_mask": "B", "logprobs": "f", "policy_versions": "i"}
"""The fields of an episode that have one entry per token, and their machine types (int32, uint8, float32)."""


class Outcome(StrEnum):
    """How an episode ended."""

    SOLVED = "solved"
    FAILED = "failed"
    TRUNCATED = "truncated"
    """The agent ran out of turns or tokens; it is graded, but did not hand in by itself."""
    INFRA_ERROR = "infra_error"
    """Something that is not the agent broke; ``reward`` is None and the episode never votes."""
    UNGRADED = "ungraded"
    """A recording that nobody graded: ``reward`` is None and it has no advantage, but its hint sites count."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of the conversation. ``start:end`` are its tokens.

    An assistant turn covers exactly the tokens that the policy sampled, its end-of-turn token included; the
    ``error_*`` fields of an assistant turn describe the tool error that its own call caused.
    """

    role: str
    start: int
    end: int
    text: str
    tool_name: str | None = None
    tool_arguments: str | None = None
    """JSON text of the arguments, as parsed."""
    error_kind: str | None = None
    error_message: str | None = None
    error_cause: str | None = None
    """``model``, ``infra`` or ``user``."""
    exit_code: int | None = None
    seconds: float = 0.0
    """Wall time of the tool call."""


@dataclass(frozen=True, slots=True)
class HintSite:
    """A turn that went wrong, and the hint that would have helped there.

    The student context is ``token_ids[:start]``. The teacher context is
    ``token_ids[:insert_at] + hint_ids + token_ids[insert_at:start]``, where ``token_ids[insert_at:start]``
    is the generation prompt of the turn. Both are followed by the same tokens ``token_ids[start:end]``.
    """

    turn: int
    """Index into ``Episode.turns``."""
    kind: str
    hint: str
    insert_at: int
    start: int
    end: int
    hint_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """A teacher's action preferred over the agent's own at one turn.

    The prompt is ``token_ids[:prompt_end]`` (generation prompt included); ``chosen_ids`` and
    ``rejected_ids`` both end with the end-of-turn token.
    """

    turn: int
    prompt_end: int
    chosen_ids: tuple[int, ...]
    rejected_ids: tuple[int, ...]
    chosen_text: str
    rejected_text: str
    asked: int
    """Number of teachers that were asked."""
    agreed: int
    """Number of teachers that gave the chosen action."""
    verified: bool
    """The chosen action was executed and made no tool error."""
    teachers: tuple[str, ...]
    """Those that gave the chosen action."""
    cost_usd: float = 0.0
    """Of the answers of all."""
    others: tuple[str, ...] = ()
    """What the others said, each as ``name: action``."""


@dataclass(frozen=True, slots=True)
class Episode:
    """One finished episode; ``logprobs`` and ``policy_versions`` are 0.0 / NOT_SAMPLED off the loss mask.

    What has one entry per token (``PER_TOKEN``) may be given as any sequence and is held as a ``Vector``.
    ``ValueError`` for lengths that differ, numbers out of range, and a reward that does not fit the outcome.
    """

    episode_id: str
    group_id: str
    task_id: str
    env: str
    source: str
    """Who made it: ``rollout``, ``evaluation``, ``replay`` (pairs for a recording), or a trace format."""
    created_at: float
    """Unix time, seconds."""
    model: str
    tokenizer_fingerprint: str
    token_ids: Sequence[int]
    loss_mask: Sequence[int]
    logprobs: Sequence[float]
    policy_versions: Sequence[int]
    turns: tuple[Turn, ...]
    outcome: Outcome
    reward: float | None
    reward_parts: dict[str, float] = field(default_factory=dict)
    hint_sites: tuple[HintSite, ...] = ()
    pairs: tuple[PreferencePair, ...] = ()
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        n = len(self.token_ids)
        for name, code in PER_TOKEN.items():
            try:
                object.__setattr__(self, name, Vector(getattr(self, name), code))
            except ValueError as error:
                raise ValueError(f"{self.episode_id}: {name} has {error}") from None
            if len(getattr(self, name)) != n:
                raise ValueError(
                    f"{self.episode_id}: {name} has {len(getattr(self, name))} entries for {n} tokens"
                )
        if (self.reward is None) != (self.outcome in (Outcome.INFRA_ERROR, Outcome.UNGRADED)):
            raise ValueError(
                f"{self.episode_id}: reward must be None exactly when the outcome is infra_error or ungraded"
            )

    def plain(self) -> dict[str, Any]:
        """The same as dicts, lists and numbers, ready for JSON."""
        return {**asdict(self), **{name: list(getattr(self, name)) for name in PER_TOKEN}}
