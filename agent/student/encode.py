"""Traces as token ids with loss weights, rendered turn by turn exactly as the live loop does it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hintloop.agent.student.traces import Trace

MAX_LENGTH = 512
CONTEXT_WEIGHT = 0.1
EDIT_WEIGHT = 3.0


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids and one loss weight per token."""

    token_ids: list[int]
    weights: list[float]


class TraceEncoder:
    """Encodes traces with one renderer and tokenizer."""

    def __init__(self, renderer: Any, tokenizer: Any):
        self.renderer, self.tokenizer = renderer, tokenizer
        self._edit_from = self._single('", "line": ')
        self._edit_to = self._single('"}}')

    def encode(self, trace: Trace, max_length: int = MAX_LENGTH) -> Encoded:
        """Weights: 1 on what the agent says, 3 on the arguments of its edits, 0.1 on everything else."""
        messages: list[dict[str, str]] = [*trace.messages]
        ids: list[int] = []
        weights: list[float] = []
        prompt: list[int] = []
        for turn in trace.turns:
            if turn.hint is not None:
                messages.append({"role": "system", "content": turn.hint})
            if not ids:
                prompt = list(self.renderer.render_ids(messages, add_generation_prompt=True))
            else:
                rendered = self.renderer.bridge_to_next_turn(prompt, ids[len(prompt) :], messages)
                prompt = list(rendered.token_ids)
            weights += [CONTEXT_WEIGHT] * (len(prompt) - len(ids))
            said = self._encode(turn.text + "<|im_end|>")
            ids = prompt + said
            weights += self._turn_weights(said)
            messages = [{"role": "tool", "content": turn.output}]
        return Encoded(ids[:max_length], weights[:max_length])

    def _turn_weights(self, said: list[int]) -> list[float]:
        weights = [1.0] * len(said)
        if self._edit_from in said:
            index = said.index(self._edit_from) + 1
            while index < len(said) and said[index - 1] != self._edit_to:
                weights[index] = EDIT_WEIGHT
                index += 1
        return weights

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _single(self, text: str) -> int:
        ids = self._encode(text)
        if len(ids) != 1:
            raise ValueError(f"the tokenizer splits {text!r}")
        return ids[0]
