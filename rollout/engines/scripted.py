"""An engine that answers from a script: for tests, demos and measurements without a model.

It has the whole surface of the local engine (weights included), so that a run with it differs from a real one
only in where the text comes from.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hintloop.agent.engine import EngineError, Sample, Sampling

Script = Callable[[str, int], str]
"""(session, turn number from 0) -> the text of the assistant turn. May raise ``EngineError``."""

LOGPROB = -0.25
"""Recorded for every token, so that a learner sees a plausible value."""


class ScriptedEngine:
    """An ``Engine`` whose samples come from ``script``."""

    def __init__(
        self, tokenizer: Any, script: Script, *, stop_id: int, version: int = 0, seconds_per_turn: float = 0.0
    ) -> None:
        """``stop_id`` ends each turn; ``seconds_per_turn`` is how long one takes."""
        self.version = version
        self.loaded: list[tuple[Path, int]] = []
        self._tokenizer = tokenizer
        self._script = script
        self._stop_id = stop_id
        self._seconds = seconds_per_turn
        self._turns: Counter[str] = Counter()
        self._sampled = 0
        self._closed = False

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str) -> Sample:
        """The script's next turn of ``session``, cut to ``sampling.max_new_tokens``."""
        if self._closed:
            raise EngineError("the engine is closed")
        await asyncio.sleep(self._seconds)
        turn = self._turns[session]
        self._turns[session] += 1
        text = self._script(session, turn)
        ids = (*self._tokenizer.encode(text, add_special_tokens=False), self._stop_id)
        cut = ids[: sampling.max_new_tokens]
        self._sampled += len(cut)
        return Sample(
            token_ids=cut,
            logprobs=(LOGPROB,) * len(cut),
            policy_versions=(self.version,) * len(cut),
            finish_reason="stop" if cut[-1] == self._stop_id else "length",
        )

    async def end_session(self, session: str) -> None:
        """Forget the turn count of ``session``."""
        self._turns.pop(session, None)

    async def load_weights(self, folder: Path, version: int) -> None:
        """Take note of ``folder`` and say ``version`` from now on."""
        if self._closed:
            raise EngineError("the engine is closed")
        self.loaded.append((folder, version))
        self.version = version

    def stats(self) -> dict[str, float]:
        """Tokens sampled since the start."""
        return {"sampled_tokens": self._sampled}

    async def close(self) -> None:
        """Refuse everything from now on."""
        self._closed = True
