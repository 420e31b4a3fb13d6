"""Muon in single precision.

``torch.optim.Muon`` orthogonalises in bfloat16; a CPU without bfloat16 units emulates that at a sixteenth of the
speed of single precision (measured), and the student would depend on the processor that it was built on.
Source: Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks".
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5


def orthogonalise(matrix: torch.Tensor) -> torch.Tensor:
    """The (R, C) matrix with its singular values pushed towards 1, by Newton-Schulz iteration."""
    a, b, c = _COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / (torch.linalg.matrix_norm(x) + 1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: torch.Tensor = x.T.contiguous() if tall else x
    return result


class Muon(torch.optim.Optimizer):
    """Nesterov momentum whose update is orthogonalised, for two-dimensional parameters only."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], lr: float, momentum: float = 0.95):
        super().__init__(parameters, {"lr": lr, "momentum": momentum})
        if any(p.ndim != 2 for group in self.param_groups for p in group["params"]):
            raise ValueError("Muon takes matrices only")

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group["lr"], group["momentum"])

    def _update(self, parameter: torch.nn.Parameter, rate: float, momentum: float) -> None:
        gradient = parameter.grad
        assert gradient is not None
        buffer = self.state[parameter].setdefault("momentum", torch.zeros_like(gradient))
        buffer.lerp_(gradient, 1 - momentum)
        update = orthogonalise(gradient.lerp(buffer, momentum))
        scale = max(1.0, parameter.shape[0] / parameter.shape[1]) ** 0.5
        parameter.add_(update, alpha=-rate * scale)
