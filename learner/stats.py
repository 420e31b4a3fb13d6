"""What one optimizer step measured."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from hintloop.learner.tensors import MicroBatch

DIVERGENCE_PERCENTILES = (50, 90, 99)
"""Of the divergences of the compared tokens; a few tokens hold most of them."""


class StepStats:
    """Sums over the micro-batches of one step."""

    def __init__(self, measure_channels: bool = False) -> None:
        """``measure_channels``: give each channel a backward pass of its own, for its gradient norm."""
        self._measure = measure_channels
        self._losses: defaultdict[str, float] = defaultdict(float)
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._weights: defaultdict[str, float] = defaultdict(float)
        self._divergences: list[Tensor] = []
        self._gradients: dict[str, list[Tensor]] = {}
        self._norm: float | None = None
        self.nothing_to_learn = False

    @staticmethod
    def merged(parts: Sequence[StepStats]) -> StepStats:
        """What several processes measured, as one."""
        whole = StepStats()
        for part in parts:
            for mine, theirs in (
                (whole._losses, part._losses),
                (whole._sums, part._sums),
                (whole._weights, part._weights),
            ):
                for name, value in theirs.items():
                    mine[name] += value
            whole._divergences += part._divergences
            for channel, gradients in part._gradients.items():
                before = whole._gradients.setdefault(channel, [torch.zeros_like(g) for g in gradients])
                for total, gradient in zip(before, gradients, strict=True):
                    total += gradient
        return whole

    def add(self, name: str, total: float, weight: int) -> None:
        """Add to a mean."""
        self._sums[name] += total
        self._weights[name] += weight

    def add_losses(self, losses: dict[str, Tensor]) -> None:
        """Add a micro-batch's parts of the losses of the step."""
        for channel, loss in losses.items():
            self._losses[channel] += float(loss.detach())

    def add_gradients(self, weighted: dict[str, Tensor], parameters: list[Tensor]) -> None:
        """Add each weighted loss's own gradient, if these are measured; the graph stays."""
        for channel, loss in weighted.items() if self._measure else ():
            found = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
            before = self._gradients.setdefault(channel, [torch.zeros_like(p) for p in parameters])
            for total, gradient in zip(before, found, strict=True):
                if gradient is not None:
                    total += gradient

    def add_policy(
        self, batch: MicroBatch, logps: Tensor, entropies: Tensor | None, epsilons: tuple[float, float]
    ) -> None:
        """Add what the trained tokens' log-probabilities (N,) say about the policy."""
        gap = logps - batch.logprobs[batch.trained]
        advantages = batch.advantages[:, None].expand_as(batch.trained)[batch.trained]
        ratio, (low, high) = gap.exp(), epsilons
        self.add("clip_fraction_low", float(((ratio < 1 - low) & (advantages < 0)).sum()), len(gap))
        self.add("clip_fraction_high", float(((ratio > 1 + high) & (advantages > 0)).sum()), len(gap))
        self.add("logprob_gap_mean", float(gap.abs().sum()), len(gap))
        if entropies is not None:
            self.add("entropy_mean", float(entropies.detach().sum()), len(gap))

    def add_divergences(self, divergences: Tensor) -> None:
        """Add how far student and hinted teacher are apart at each compared token (K,), nats."""
        self._divergences.append(divergences.detach().float().cpu())

    def end(self, norm: float) -> None:
        """The gradient is complete."""
        self._norm = norm
        self.nothing_to_learn = not self._losses or not math.isfinite(norm)

    def metrics(self) -> dict[str, float]:
        """Losses, means and norms; ``skipped`` counts a step whose gradient was not finite."""
        result: dict[str, float] = {f"loss_{name}": value for name, value in self._losses.items()}
        result |= {
            name: total / self._weights[name] for name, total in self._sums.items() if self._weights[name]
        }
        if self._divergences and len(every := torch.cat(self._divergences)):
            result["divergence_mean"] = float(every.mean())
            result |= {f"divergence_p{p}": float(every.quantile(p / 100)) for p in DIVERGENCE_PERCENTILES}
        for name, gradients in self._gradients.items():
            result[f"grad_norm_{name}"] = float(torch.nn.utils.get_total_norm(gradients))
        if self._norm is not None and self._losses:
            result["grad_norm"] = self._norm
            result["skipped"] = float(self.nothing_to_learn)
        return {name: value for name, value in result.items() if math.isfinite(value)}
