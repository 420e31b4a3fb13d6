"""The engine protocol: token ids in, token ids out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

NEUTRAL = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""Settings of inference servers that would cut off or shift probabilities, all switched off."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample. Temperature 0 is greedy; the recorded log-probs are then of the untempered model.

    There is no top-p, top-k or penalty (``NEUTRAL``): each would bias the ratio between the policy and what it sampled.
    """

    temperature: float = 1.0
    max_new_tokens: int = 96


@dataclass(frozen=True, slots=True)
class Sample:
    """What an engine produced: three sequences of equal length, and why it stopped."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Log-probability of each token under the tempered distribution that it was drawn from, nats."""
    policy_versions: tuple[int, ...]
    """Weight version that produced each token; a request that spans an update carries two."""
    finish_reason: str
    """``stop`` (ended with a stop token, which is included) or ``length``."""


class EngineError(Exception):
    """The engine failed or is gone: an infrastructure failure."""


class Engine(Protocol):
    """Anything that samples from the policy."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str) -> Sample:
        """Sample one continuation. Calls with the same ``session`` share a growing prefix (KV cache reuse).

        Raises ``EngineError``; ``ValueError`` when the prompt leaves no room for a token.
        """
        ...

    async def end_session(self, session: str) -> None:
        """Forget what was cached for ``session``."""
        ...
