"""Direct preference optimisation on summed log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from hintloop.learner.losses.head import Head


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
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    *,
    beta: float,
    chosen_nll: float = 0.0,
    chosen_lengths: Tensor | None = None,
) -> Preference:
    """``-log sigmoid(beta [(l_c - l_c_ref) - (l_r - l_r_ref)]) - chosen_nll * l_c / length`` per pair.

    Each argument is ``(P,)``: the sum of the log-probabilities of a response's tokens, its end-of-turn token
    included, and ``chosen_lengths`` the number of those tokens, needed when ``chosen_nll`` is not 0. The first
    term may lower the chosen response as long as it lowers the rejected one more; the second keeps it up.
    Sources: Rafailov et al., arXiv:2305.18290, eq. 7; Pang et al., arXiv:2404.19733, eq. 1 (with their alpha).
    ``ValueError`` when the shapes differ.
    """
    shapes = {t.shape for t in (chosen, rejected, reference_chosen, reference_rejected)}
    if len(shapes) != 1 or chosen.ndim != 1:
        raise ValueError(f"need four (P,) vectors, not {sorted(tuple(s) for s in shapes)}")
    reference = (reference_chosen - reference_rejected).detach()
    logits = beta * ((chosen - rejected) - reference)
    losses = -F.logsigmoid(logits)
    if chosen_nll:
        if chosen_lengths is None or chosen_lengths.shape != chosen.shape:
            raise ValueError("chosen_nll needs the length of each chosen response")
        losses = losses - chosen_nll * chosen / chosen_lengths
    return Preference(losses, logits.detach())


def response_logps(
    head: Head, states: Tensor, targets: Tensor, response: Tensor, pairs: int
) -> tuple[Tensor, Tensor]:
    """Summed log-probabilities ``(P,)`` of the chosen and of the rejected responses.

    ``states`` (N, H) predict ``targets`` (N,), which belong to the responses with the numbers ``response``
    (N,): below P the chosen ones, from P on the rejected ones in the same order.
    """
    logps, _ = head.logprobs(states, targets)
    sums = logps.new_zeros(2 * pairs).index_add(0, response, logps)
    return sums[:pairs], sums[pairs:]
