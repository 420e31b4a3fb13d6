"""Settings, logits and gradients for the tests of the losses."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hintloop.learner.losses.topk import TopK

BETAS = (0.0, 0.1, 0.5, 0.9, 1.0)
SUPPORTS = [None, TopK(4), TopK(4, "teacher"), TopK(4, "student", False), TopK(4, "teacher", False)]


def logits(seed: int, rows: int = 7, vocabulary: int = 11) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3.0 * torch.randn(rows, vocabulary, generator=generator, dtype=torch.float64)


def value_and_gradient(function: Callable[[Tensor], Tensor], inputs: Tensor) -> tuple[Tensor, Tensor]:
    leaf = inputs.detach().clone().requires_grad_()
    values = function(leaf)
    values.sum().backward()
    assert leaf.grad is not None
    return values.detach(), leaf.grad
