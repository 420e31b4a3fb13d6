"""Preference losses on the log-probabilities of whole responses: DPO on sums, SimPO on means."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from hintloop.learner.losses.head import Head
from hintloop.learner.losses.reduction import TokenReduction, full_precision


@dataclass(frozen=True, slots=True)
class Preference:
    """Result of ``dpo`` or ``simpo`` for P pairs."""

    losses: Tensor
    """(P,), with gradient; the sum over no pairs is 0 and still attached."""
    margins: Tensor
    """(P,), detached: beta times how much the policy prefers the chosen action, in DPO beyond the reference."""

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


def simpo(chosen: Tensor, rejected: Tensor, *, beta: float, gamma: float) -> Preference:
    """``-log sigmoid(beta (l_c - l_r) - gamma)`` per pair, without a reference model.

    Both arguments are ``(P,)``: the *mean* log-probability of a response's tokens in nats, as of
    ``avg_sequence_logprob``, so a longer response counts no more. ``gamma`` is the margin (not divided by beta)
    that the preference has to exceed; the margins of the result do not contain it. At equal log-probabilities the
    loss is softplus(gamma), so it is comparable with no other preference loss.

    Source: Meng et al., arXiv:2405.14734, eq. 6. Their public code has gamma as ``gamma_beta_ratio`` times beta,
    with 2 and 0.25 as defaults and up to 10 and 0.5 in its configurations. ``ValueError`` when the shapes
    differ, beta is not positive or gamma is negative.
    """
    if chosen.ndim != 1 or chosen.shape != rejected.shape:
        raise ValueError(f"need two (P,) vectors, not {tuple(chosen.shape)} and {tuple(rejected.shape)}")
    if not 0.0 < beta < math.inf or not 0.0 <= gamma < math.inf:
        raise ValueError(f"need a beta above 0 and a gamma of at least 0, not {beta} and {gamma}")
    margins = beta * (chosen - rejected)
    return Preference(-F.logsigmoid(margins - gamma), margins.detach())


def avg_sequence_logprob(logits: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """Mean log-probability (B,) in nats of the response tokens of B sequences.

    ``logits`` (B, T, V) are a model's outputs for the token ``ids`` (B, T), unshifted: the token at p is
    predicted by the logits at p - 1. ``mask`` (B, T) is boolean, True at the tokens (not: predictions) of the
    response, its end-of-turn token included; what is elsewhere may be anything, also in ``ids``. A sequence
    without response tokens gives exactly 0, attached to the graph. Half precision is raised to fp32.

    Source: Meng et al., arXiv:2405.14734, the reward before its beta. ``ValueError`` for shapes that do not match,
    a mask that is missing or not boolean or has the first token, which nothing predicts, and trained ids outside
    [0, V).
    """
    if logits.ndim != 3 or ids.shape != logits.shape[:2]:
        raise ValueError(f"need (B, T, V) and (B, T), not {tuple(logits.shape)} and {tuple(ids.shape)}")
    TokenReduction(ids.shape, mask, "sum")
    if bool(mask[:, :1].any()):
        raise ValueError("nothing predicts the first token of a sequence, so it cannot be in the mask")
    predicted = mask[:, 1:]
    rows, targets = full_precision(logits[:, :-1][predicted]), ids[:, 1:][predicted]
    if bool(((targets < 0) | (targets >= logits.shape[-1])).any()):
        raise ValueError(f"the ids in the mask must be in [0, {logits.shape[-1]})")
    logps = -F.cross_entropy(rows, targets, reduction="none")
    sums = logps.new_zeros(len(ids)).index_add(0, predicted.nonzero()[:, 0], logps)
    return sums / predicted.sum(-1).clamp(min=1)


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
