"""Direct preference optimisation on summed log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Preference:
    """Result of ``dpo`` for P pairs."""

    losses: Tensor
    """(P,), with gradient; the sum over no pairs is 0 and still attached."""
    margins: Tensor
    """(P,), detached: beta times how much further than the reference the policy prefers the chosen action."""

    @property
    def accuracies(self) -> Tensor:
        """(P,): 1.0 where the margin is positive."""
        return (self.margins > 0).float()


def dpo(
    chosen: Tensor, rejected: Tensor, reference_chosen: Tensor, reference_rejected: Tensor, *, beta: float
) -> Preference:
    """``-log sigmoid(beta [(l_c - l_c_ref) - (l_r - l_r_ref)])`` per pair.

    Each argument is ``(P,)``: the sum of the log-probabilities of a response's tokens, its end-of-turn token
    included. Source: Rafailov et al., arXiv:2305.18290, eq. 7. ``ValueError`` when the shapes differ.
    """
    shapes = {t.shape for t in (chosen, rejected, reference_chosen, reference_rejected)}
    if len(shapes) != 1 or chosen.ndim != 1:
        raise ValueError(f"need four (P,) vectors, not {sorted(tuple(s) for s in shapes)}")
    reference = (reference_chosen - reference_rejected).detach()
    logits = beta * ((chosen - rejected) - reference)
    return Preference(-F.logsigmoid(logits), logits.detach())
