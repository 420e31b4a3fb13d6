"""One optimizer step of the student's warm start: Muon and AdamW, clipped, with an average of the weights."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy, kl_div, logsigmoid
from transformers import Qwen3ForCausalLM

from hintloop.agent.student.encode import Encoded
from hintloop.agent.student.muon import Muon

MAX_GRAD_NORM = 1.0
AVERAGE_RATE = 0.02


Ids = list[int]


@dataclass(frozen=True, slots=True)
class SameTurn:
    """A turn behind two contexts that must make no difference to it."""

    context: Ids
    other: Ids
    said: Ids


@dataclass(frozen=True, slots=True)
class BetterTurn:
    """A context with a hint, which must make ``right`` likelier and ``failing`` less likely than without it."""

    context: Ids
    hinted: Ids
    right: Ids
    failing: Ids


class Fit:
    """A model in training, and the moving average of its weights, which is the result."""

    def __init__(self, model: Qwen3ForCausalLM, *, muon_learning_rate: float, adam_learning_rate: float):
        self.model, self.averaged = model, copy.deepcopy(model)
        self._optimizers = _optimizers(model, muon_learning_rate, adam_learning_rate)
        self._peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in self._optimizers]
        self._steps = 0

    def step(
        self,
        batch: Sequence[Encoded],
        rate: float,
        same: Sequence[SameTurn] = (),
        better: Sequence[BetterTurn] = (),
    ) -> dict[str, float]:
        """Train on a batch at ``rate`` times the peak step sizes; the losses, in nats."""
        loss, said = weighted_loss(self.model, batch)
        losses = {"loss": loss}
        if same:
            losses["same"] = difference(self.model, same)
        if better:
            losses["better"] = preference(self.model, better)
        loss = torch.stack(list(losses.values())).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        for optimizer, peaks in zip(self._optimizers, self._peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self._steps += 1
        self._average(max(AVERAGE_RATE, 1 / self._steps))
        return {name: float(value.detach()) for name, value in losses.items()} | {"said": said}

    @torch.no_grad()
    def _average(self, rate: float) -> None:
        for mean, current in zip(self.averaged.parameters(), self.model.parameters(), strict=True):
            mean.lerp_(current, rate)


def difference(model: Qwen3ForCausalLM, turns: Sequence[SameTurn]) -> torch.Tensor:
    """Mean over the tokens of the turns of KL(behind ``context`` || behind ``other``), nats; trains the latter."""
    with torch.no_grad():
        wanted, _, _ = _logprobs(model, [(turn.context, turn.said) for turn in turns])
    found, _, _ = _logprobs(model, [(turn.other, turn.said) for turn in turns])
    return kl_div(found, wanted, reduction="batchmean", log_target=True)


def preference(model: Qwen3ForCausalLM, turns: Sequence[BetterTurn]) -> torch.Tensor:
    """DPO with the student without the hint as the reference, and the likelihood of the right call on top.

    Lowering an unlikely call takes a loss of its own: the likelihood of the right one hardly notices it.
    """
    with torch.no_grad():
        before = _sums(model, [(t.context, said) for t in turns for said in (t.right, t.failing)])
    after = _sums(model, [(t.hinted, said) for t in turns for said in (t.right, t.failing)])
    margin = (after - before).view(-1, 2) @ torch.tensor([1.0, -1.0])
    lengths = torch.tensor([float(len(turn.right)) for turn in turns])
    return -logsigmoid(margin).mean() - (after.view(-1, 2)[:, 0] / lengths).mean()


def _sums(model: Qwen3ForCausalLM, rows: Sequence[tuple[Ids, Ids]]) -> torch.Tensor:
    """Log-probability of each second part, nats."""
    logprobs, tokens, numbers = _logprobs(model, rows)
    said = logprobs.gather(1, tokens[:, None])[:, 0]
    return torch.zeros(len(rows)).index_add(0, numbers, said)


def _logprobs(
    model: Qwen3ForCausalLM, rows: Sequence[tuple[Ids, Ids]]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(N, V) log-probabilities at the N tokens of the second parts, these tokens, and their row numbers."""
    ids = torch.zeros(len(rows), max(len(a) + len(b) for a, b in rows), dtype=torch.long)
    used = torch.zeros_like(ids, dtype=torch.bool)
    for index, (context, said) in enumerate(rows):
        end = len(context) + len(said)
        ids[index, :end] = torch.tensor(context + said)
        used[index, len(context) - 1 : end - 1] = True
    logprobs = torch.log_softmax(model.lm_head(model.model(ids).last_hidden_state[used]), -1)
    rows_of, columns = used.nonzero(as_tuple=True)
    return logprobs, ids[rows_of, columns + 1], rows_of


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
