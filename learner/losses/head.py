"""The vocabulary projection as plain data, applied to chosen positions only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from trl.kernels import ChunkedLogProbFunction

VOCABULARY_TILE = 32768
"""Vocabulary entries that are projected at once."""


@dataclass(frozen=True, slots=True)
class Head:
    """``logits = softcap(scale * (hidden @ weight.T + bias))``."""

    weight: Tensor
    """(V, H)"""
    bias: Tensor | None = None
    """(V,)"""
    scale: float = 1.0
    softcap: float | None = None

    @staticmethod
    def of(model: Any, weights: Mapping[str, Tensor] | None = None) -> Head:
        """The head of a Hugging Face causal language model, with its family's logit scale and soft cap.

        ``weights`` take the place of the parameters of these names.
        """
        config = model.config.get_text_config()
        layer = model.get_output_embeddings()
        names = {id(p): name for name, p in model.named_parameters()} if weights else {}
        weight, bias = (
            None if p is None else (weights or {}).get(names.get(id(p), ""), p)
            for p in (layer.weight, layer.bias)
        )
        assert weight is not None, "a head has a weight"
        return Head(weight, bias, _scale(config), getattr(config, "final_logit_softcapping", None))

    def logits(self, hidden: Tensor) -> Tensor:
        """``(N, H)`` hidden states to ``(N, V)`` logits."""
        logits = F.linear(hidden, self.weight, self.bias)
        logits = logits if self.scale == 1.0 else logits * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def logprobs(
        self, hidden: Tensor, targets: Tensor, *, temperature: float = 1.0, entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """fp32 log-probability ``(N,)`` of each of ``targets`` ``(N,)`` in nats, and entropies if asked for.

        The logits exist in tiles only, which the backward pass computes again.
        """
        tile = min(VOCABULARY_TILE, self.weight.shape[0])
        outputs = ("entropy",) if entropy else ()
        logps, entropies, *_ = ChunkedLogProbFunction.apply(  # type: ignore[no-untyped-call]
            hidden, self.weight, self.bias, targets, temperature, tile, self.softcap, self.scale, outputs
        )
        return logps, entropies


def _scale(config: Any) -> float:
    """Some families multiply their logits, some divide them; each under a name of its own."""
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        if (value := getattr(config, name, None)) is not None:
            return float(value)
    if (value := getattr(config, "logits_scaling", None)) is not None:
        return float(value) if config.model_type == "hyperclovax" else 1.0 / float(value)
    return 1.0
