"""The two losses that look at the teacher's entropy: hand-made values and their limits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from hintloop.learner.losses.divergence import generalized_jsd
from hintloop.learner.losses.entropy import entropy_aware_opd, entropy_gated_mixture, teacher_entropy

ROWS, VOCABULARY = 9, 8
ALL = torch.ones(ROWS, dtype=torch.bool)
TOKENS = torch.arange(ROWS) % VOCABULARY


def logits(seed: int, scale: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(ROWS, VOCABULARY, generator=generator, dtype=torch.float64)


def sampled(values: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(values, -1).gather(-1, TOKENS[:, None])[:, 0]


def plain_opd(
    student: torch.Tensor, teacher: torch.Tensor, old: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """The clipped term of each token, restated."""
    ratio, advantage = (sampled(student) - old).exp(), sampled(teacher) - old
    return -torch.min(ratio * advantage, ratio.clamp(1 - epsilon, 1 + epsilon) * advantage)


def test_entropy_of_uniform_and_of_certain_teachers() -> None:
    assert teacher_entropy(torch.zeros(2, VOCABULARY)).tolist() == pytest.approx([math.log(VOCABULARY)] * 2)
    certain = torch.full((1, VOCABULARY), -torch.inf)
    certain[0, 3] = 0.0
    assert teacher_entropy(certain).tolist() == [0.0]
    half = torch.tensor([[0.0, 0.0, -torch.inf]], dtype=torch.bfloat16)
    assert teacher_entropy(half).item() == pytest.approx(math.log(2))
    assert teacher_entropy(half).dtype is torch.float32
    assert not teacher_entropy(torch.zeros(1, 2, requires_grad=True)).requires_grad


def test_the_loss_is_the_clipped_term_plus_the_gated_truncated_divergence() -> None:
    student, teacher, old = logits(0), logits(1), sampled(logits(0) + 0.4 * logits(2))
    mask = torch.arange(ROWS) != 4
    total, gated, negative = float(plain_opd(student, teacher, old, 0.2)[mask].sum()), 0, 0
    for s, t, trained in zip(student.softmax(-1).tolist(), teacher.softmax(-1).tolist(), mask, strict=True):
        if trained and -sum(p * math.log(p) for p in t) >= 1.1:
            best = sorted(range(VOCABULARY), key=lambda v: -t[v])[:3]
            divergence = sum(t[v] * math.log(t[v] / s[v]) for v in best)
            total, gated, negative = total + 0.7 * divergence, gated + 1, negative + (divergence < 0)
    result = entropy_aware_opd(student, teacher, TOKENS, old, mask=mask, tau=1.1, alpha=0.7, k=3)
    assert result.loss.item() == pytest.approx(total / 8, abs=1e-12)
    assert (result.tokens, result.gated, result.negative) == (8, gated, negative)
    assert 0 < gated < 8
    assert (result.gated_share, result.negative_share) == (gated / 8, negative / gated)
    part = entropy_aware_opd(
        student, teacher, TOKENS, old, mask=mask, tau=1.1, alpha=0.7, k=3, denominator=16
    )
    assert part.loss.item() == pytest.approx(total / 16, abs=1e-12)


def test_an_infinite_threshold_leaves_plain_distillation() -> None:
    student, teacher, old = logits(0), logits(1), sampled(logits(0) + 0.4 * logits(2))
    result = entropy_aware_opd(student, teacher, TOKENS, old, mask=ALL, tau=math.inf, k=3)
    assert result.loss.item() == pytest.approx(plain_opd(student, teacher, old, 0.2).mean().item())
    assert result.gated_share == result.negative_share == 0.0


def test_a_threshold_of_zero_adds_the_forward_divergence_everywhere() -> None:
    student, teacher, old = logits(0), logits(1), sampled(logits(0))
    result = entropy_aware_opd(student, teacher, TOKENS, old, mask=ALL, tau=0.0, k=VOCABULARY)
    forward = generalized_jsd(student, teacher, beta=0.0)
    expected = (plain_opd(student, teacher, old, 0.2) + forward).mean()
    assert result.loss.item() == pytest.approx(expected.item())
    assert result.gated_share == 1.0


def test_a_certain_teacher_closes_the_gate_and_a_uniform_one_opens_it() -> None:
    certain, uniform = torch.full((ROWS, VOCABULARY), -torch.inf), torch.zeros(ROWS, VOCABULARY)
    certain[torch.arange(ROWS), TOKENS] = 0.0
    student = logits(0).float().requires_grad_()
    old = sampled(student.detach())
    closed = entropy_aware_opd(student, certain, TOKENS, old, mask=ALL, k=4)
    assert closed.gated == 0
    assert closed.loss.item() == pytest.approx(plain_opd(student, certain, old, 0.2).mean().item())
    everywhere = entropy_aware_opd(student, certain, TOKENS, old, mask=ALL, k=4, tau=0.0)
    everywhere.loss.backward()
    assert math.isfinite(everywhere.loss.item())
    assert student.grad is not None
    assert student.grad.isfinite().all()
    just_open = math.log(VOCABULARY) - 1e-6
    assert entropy_aware_opd(student, uniform, TOKENS, old, mask=ALL, k=4, tau=just_open).gated == ROWS


def test_a_teacher_equal_to_the_student_teaches_nothing() -> None:
    student = logits(0).requires_grad_()
    old = sampled(student.detach())
    result = entropy_aware_opd(student, logits(0), TOKENS, old, mask=ALL, tau=0.0, k=VOCABULARY)
    result.loss.backward()
    assert result.loss.item() == pytest.approx(0.0, abs=1e-12)
    assert student.grad is not None
    assert student.grad.abs().max() < 1e-12


def test_a_truncated_divergence_can_be_negative_and_is_counted() -> None:
    student = torch.zeros(1, 3, dtype=torch.float64)
    student[0, 0] = 5.0
    old, teacher = torch.zeros(1, dtype=torch.float64), torch.zeros(1, 3, dtype=torch.float64)
    teacher[0, 0] = 0.1
    result = entropy_aware_opd(
        student, teacher, torch.tensor([0]), old, mask=torch.tensor([True]), tau=0.0, k=1
    )
    assert result.negative_share == 1.0


def test_clipped_tokens_get_no_gradient_from_the_first_term() -> None:
    student, teacher = logits(0).requires_grad_(), logits(1)
    low = sampled(student.detach()) - 1.0
    favoured = (sampled(teacher) > low)[:, None]
    entropy_aware_opd(student, teacher, TOKENS, low, mask=ALL, tau=math.inf, k=1).loss.backward()
    assert favoured.any()
    assert student.grad is not None
    assert not (student.grad * favoured).any()
    assert (student.grad * ~favoured).any()


def mixture(student: torch.Tensor, teacher: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return entropy_gated_mixture(student, teacher, mask=mask)


def opd(student: torch.Tensor, teacher: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return entropy_aware_opd(student, teacher, TOKENS, torch.zeros(ROWS), mask=mask, k=3, tau=0.0).loss


@pytest.mark.parametrize("loss_of", [mixture, opd])
def test_masks_hide_what_they_cover_and_are_required(loss_of: Any) -> None:
    student, teacher, mask = logits(0), logits(1).requires_grad_(), ALL.clone()
    mask[2] = False
    expected = loss_of(student, teacher, mask).item()
    student[2] = torch.nan
    student.requires_grad_()
    loss = loss_of(student, teacher, mask)
    loss.backward()
    assert loss.item() == expected
    assert teacher.grad is None
    assert student.grad is not None
    assert student.grad.isfinite().all()
    student.grad = None
    nothing = loss_of(student, teacher, ~ALL)
    nothing.backward()
    assert nothing.item() == 0.0
    assert student.grad is not None
    assert not student.grad.any()
    with pytest.raises(ValueError, match=r"boolean.*float32"):
        loss_of(student, teacher, ALL.float())
    with pytest.raises(ValueError, match="mask"):
        loss_of(student, teacher, None)
    with pytest.raises(ValueError, match="one shape"):
        loss_of(student, teacher[:, :3], ALL)


def test_the_mixture_runs_from_the_reverse_to_the_forward_divergence() -> None:
    student, teacher = logits(0), logits(1)
    forward, reverse = (generalized_jsd(student, teacher, beta=beta) for beta in (0.0, 1.0))
    weight = teacher_entropy(teacher) / math.log(VOCABULARY)
    expected = (weight * forward + (1 - weight) * reverse).mean()
    assert mixture(student, teacher, ALL).item() == pytest.approx(expected.item())
    uniform = torch.zeros_like(student)
    only_forward = generalized_jsd(student, uniform, beta=0.0).mean()
    assert mixture(student, uniform, ALL).item() == pytest.approx(only_forward.item())
    certain = uniform.clone()
    certain[:, 1] = 60.0
    only_reverse = generalized_jsd(student, certain, beta=1.0).mean()
    assert mixture(student, certain, ALL).item() == pytest.approx(only_reverse.item())
    assert mixture(student, student.clone(), ALL).item() == pytest.approx(0.0, abs=1e-12)
    with pytest.raises(ValueError, match="at least 2"):
        mixture(student[:, :1], teacher[:, :1], ALL)


@pytest.mark.parametrize(
    "settings",
    [{"tau": -0.1}, {"tau": math.nan}, {"alpha": -1.0}, {"k": 0}, {"k": VOCABULARY + 1}, {"epsilon": 0.0}],
)
def test_settings_without_a_meaning_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        entropy_aware_opd(logits(0), logits(1), TOKENS, torch.zeros(ROWS), mask=ALL, **{"k": 3, **settings})


def test_tokens_and_probabilities_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="tokens"):
        entropy_aware_opd(logits(0), logits(1), TOKENS[:2], torch.zeros(ROWS), mask=ALL, k=3)
    with pytest.raises(ValueError, match="old_logprobs"):
        entropy_aware_opd(logits(0), logits(1), TOKENS, torch.zeros(2), mask=ALL, k=3)
