"""One optimizer step of the student's warm start: Muon and AdamW, clipped, with an average of the weights."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch.nn.functional import cross_entropy
from transformers import Qwen3ForCausalLM

from hintloop.agent.student.encode import Encoded
from hintloop.agent.student.muon import Muon

MAX_GRAD_NORM = 1.0
AVERAGE_RATE = 0.02


class Fit:
    """A model in training, and the moving average of its weights, which is the result."""

    def __init__(self, model: Qwen3ForCausalLM, *, muon_learning_rate: float, adam_learning_rate: float):
        self.model, self.averaged = model, copy.deepcopy(model)
        self._optimizers = _optimizers(model, muon_learning_rate, adam_learning_rate)
        self._peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in self._optimizers]
        self._steps = 0

    def step(self, loss: torch.Tensor, rate: float) -> None:
        """Take one step down ``loss``, at ``rate`` times the peak step sizes."""
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        for optimizer, peaks in zip(self._optimizers, self._peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self._steps += 1
        self._average(max(AVERAGE_RATE, 1 / self._steps))

    @torch.no_grad()
    def _average(self, rate: float) -> None:
        for mean, current in zip(self.averaged.parameters(), self.model.parameters(), strict=True):
            mean.lerp_(current, rate)


def weighted_loss(model: Qwen3ForCausalLM, batch: Sequence[Encoded]) -> tuple[torch.Tensor, float]:
    """Weighted mean cross-entropy of a batch, and the plain mean over what the agent says (nats)."""
    length = max(len(row.token_ids) for row in batch)
    ids = torch.zeros(len(batch), length, dtype=torch.long)
    weights = torch.zeros(len(batch), length)
    for index, row in enumerate(batch):
        ids[index, : len(row.token_ids)] = torch.tensor(row.token_ids)
        weights[index, : len(row.weights)] = torch.tensor(row.weights)
    hidden = model.model(ids).last_hidden_state[:, :-1]
    weights, targets = weights[:, 1:], ids[:, 1:]
    used = weights > 0
    losses = cross_entropy(model.lm_head(hidden[used]), targets[used], reduction="none")
    said = losses[weights[used] >= 1].detach().mean()
    return (losses * weights[used]).sum() / weights[used].sum(), float(said)


def _optimizers(model: Qwen3ForCausalLM, muon: float, adam: float) -> list[torch.optim.Optimizer]:
    named = dict(model.named_parameters())
    hidden = [p for name, p in named.items() if p.ndim == 2 and "embed" not in name and "lm_head" not in name]
    chosen = {id(p) for p in hidden}
    others = [p for p in named.values() if id(p) not in chosen]
    return [
        Muon(hidden, lr=muon),
        torch.optim.AdamW(others, lr=adam, betas=(0.9, 0.98), weight_decay=0.01),
    ]
