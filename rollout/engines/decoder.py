"""A causal language model on a slot cache: tokens in, logits out, and drawing from them.

Works for every transformers model with plain full attention (Qwen2, Qwen3, Llama, …): the model's own
forward runs, only its attention function and its cache are ours. That this gives the model's own logits is
checked once, at construction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from hintloop.rollout.engines.cache import ATTENTION, Chunk, Geometry, SlotCache

Tensors = Mapping[str, torch.Tensor]


class Decoder:
    """Owns ``model`` (evaluation mode, no gradients, slot attention) and its cache."""

    def __init__(self, model: Any, *, slots: int, max_length: int) -> None:
        """Raises ``ValueError`` for a model that does not give its own logits on slots."""
        config = model.config.get_text_config()
        limit = getattr(config, "max_position_embeddings", None)
        if limit and max_length > limit:
            raise ValueError(f"max_length {max_length} is above the model's {limit} positions")
        self.model = model.eval().requires_grad_(False)
        weight = next(model.parameters())
        self.device = weight.device
        self.vocabulary = config.vocab_size
        self._dtype = weight.dtype
        self._geometry = Geometry.of(config)
        self.cache = self._new_cache(slots, max_length)
        self._check(min(max_length, 12))

    def _new_cache(self, slots: int, max_length: int) -> SlotCache:
        return SlotCache(
            self._geometry, slots=slots, max_length=max_length, dtype=self._dtype, device=self.device
        )

    @torch.inference_mode()
    def _check(self, length: int) -> None:
        """Compare a plain forward with the same tokens as a chunk and then one by one."""
        ids = [1 + 7 * i % (self.vocabulary - 1) for i in range(length)]
        plain = self.model(input_ids=torch.tensor([ids], device=self.device), use_cache=False).logits[0, -1]
        self.model.set_attn_implementation(ATTENTION)
        ours = plain.new_zeros(())
        if length > 2:
            self.forward([], [], [Chunk(0, 0, ids[: length // 2])], [0])
        for position in range(length // 2 if length > 2 else 0, length):
            ours = self.forward([ids[position]], [position], [], [0])[0]
        allowed = (1e-3 if plain.dtype is torch.float32 else 5e-2) * max(1.0, plain.abs().max().item())
        if not (plain - ours).abs().max().item() <= allowed:
            raise ValueError(f"{type(self.model).__name__} gives other logits in slots than by itself")

    def forward(
        self, tokens: Sequence[int], positions: Sequence[int], chunks: Sequence[Chunk], keep: Sequence[int]
    ) -> torch.Tensor:
        """Logits [len(keep), vocabulary] at the indices ``keep`` of the flat row: decode tokens, then chunks.

        Row ``i`` decodes ``tokens[i]`` at ``positions[i]``; all keys and values are stored.
        """
        step = self.cache.plan(positions, chunks)
        flat = [*tokens, *(token for chunk in chunks for token in chunk.tokens)]
        output = self.model(
            input_ids=torch.tensor([flat], device=self.device),
            position_ids=step.positions[None],
            cache=self.cache,
            use_cache=True,
            logits_to_keep=torch.tensor(list(keep), dtype=torch.long, device=self.device),
            step=step,
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    def score(self, ids: Sequence[int]) -> list[float]:
        """Log-probability of each of ``ids`` after the first, at temperature 1, nats; touches no slot."""
        kept, self.cache = self.cache, self._new_cache(1, len(ids))
        try:
            logits = self.forward([], [], [Chunk(0, 0, ids[:-1])], range(len(ids) - 1))
        finally:
            self.cache = kept
        following = torch.tensor(ids[1:], device=self.device)[:, None]
        scores: list[float] = torch.log_softmax(logits.float(), -1).gather(1, following)[:, 0].tolist()
        return scores

    def read_weights(self, folder: Path) -> Tensors:
        """All ``*.safetensors`` of ``folder``; changes nothing.

        Raises ``ValueError`` when they are not exactly this model's weights (a tied weight may be left out).
        """
        tensors: dict[str, torch.Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            tensors |= load_file(file)
        own = self.model.state_dict()
        held = {own[name].data_ptr() for name in tensors.keys() & own.keys()}
        missing = [name for name in own.keys() - tensors.keys() if own[name].data_ptr() not in held]
        wrong = [name for name in tensors if name not in own or own[name].shape != tensors[name].shape]
        if missing or wrong:
            named = ", ".join(sorted(missing + wrong)[:3])
            raise ValueError(f"{folder}: {len(missing)} weights missing, {len(wrong)} do not fit: {named}")
        return tensors

    @torch.no_grad()
    def load(self, tensors: Tensors) -> None:
        """Take over weights that ``read_weights`` returned."""
        own = self.model.state_dict()
        for name, tensor in tensors.items():
            own[name].copy_(tensor)


def draw(
    logits: torch.Tensor, temperatures: Sequence[float], generator: torch.Generator
) -> tuple[list[int], list[float]]:
    """One token for each row of ``logits`` [rows, vocabulary], and its log-probability in nats.

    The log-probability is that of the tempered distribution the token was drawn from. Temperature 0 takes the
    likeliest token, with its log-probability at temperature 1. Always uses one random number a row.
    Raises ``FloatingPointError`` when the logits are not finite.
    """
    scale = torch.tensor([temperature or 1.0 for temperature in temperatures])
    logprobs = torch.log_softmax(logits.float().cpu() / scale[:, None], dim=-1)
    # Inverse transform: far cheaper than torch.multinomial, and exact enough in double precision.
    mass = logprobs.double().exp_().cumsum(-1)
    place = torch.rand((len(temperatures), 1), dtype=torch.float64, generator=generator) * mass[:, -1:]
    drawn = torch.searchsorted(mass, place, right=True).clamp_(max=logits.shape[-1] - 1)
    if 0.0 in temperatures:
        greedy = torch.tensor([temperature == 0.0 for temperature in temperatures])
        drawn = torch.where(greedy[:, None], logprobs.argmax(-1, keepdim=True), drawn)
    chosen: list[float] = logprobs.gather(1, drawn)[:, 0].tolist()
    if any(value != value for value in chosen):
        raise FloatingPointError("the model's logits are not finite")
    tokens: list[int] = drawn[:, 0].tolist()
    return tokens, chosen
