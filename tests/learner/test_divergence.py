"""The generalised divergence of logits: TRL's values, limits, masks and supports."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hintloop.learner.losses.divergence import generalized_jsd
from hintloop.learner.losses.topk import TopK, with_tail

from .values import BETAS, SUPPORTS, logits, value_and_gradient


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("temperature", [1.0, 1.1])
def test_value_and_gradient_equal_trl(
    beta: float, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.gkd import GKDTrainer

    student, teacher = logits(0), logits(1)
    labels = torch.tensor([[0, 0, -100, 0, 0, 0, -100]])
    settings = {"beta": beta, "temperature": temperature}
    theirs = value_and_gradient(
        lambda s: GKDTrainer.generalized_jsd_loss(s[None], teacher[None], labels=labels, **settings), student
    )
    ours = value_and_gradient(
        lambda s: generalized_jsd(s, teacher, mask=labels[0] != -100, reduction="mean", **settings), student
    )
    torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=0)


def test_endpoints_are_the_two_directions_of_kl() -> None:
    student, teacher = (torch.tensor([p, 1 - p], dtype=torch.float64).log()[None] for p in (0.5, 0.9))
    forward = 0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5)
    reverse = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    assert generalized_jsd(student, teacher, beta=0.0).item() == pytest.approx(forward)
    assert generalized_jsd(student, teacher, beta=1.0).item() == pytest.approx(reverse)


@pytest.mark.parametrize(("end", "near"), [(0.0, 1e-6), (1.0, 1.0 - 1e-6)])
def test_the_middle_form_over_beta_tends_to_the_end_points(end: float, near: float) -> None:
    at_end = generalized_jsd(logits(0), logits(1), beta=end)
    torch.testing.assert_close(
        generalized_jsd(logits(0), logits(1), beta=near) / 1e-6, at_end, atol=1e-3, rtol=1e-3
    )


def test_near_agreement_one_half_is_a_quarter_of_either_end() -> None:
    close = logits(0) + 1e-4 * logits(1)
    half = generalized_jsd(close, logits(0), beta=0.5)
    for end in (0.0, 1.0):
        torch.testing.assert_close(4 * half, generalized_jsd(close, logits(0), beta=end), atol=0, rtol=2e-3)


@given(beta=st.floats(0.01, 0.99), seed=st.integers(0, 99), sharpness=st.floats(0.0, 40.0))
def test_the_middle_form_is_between_zero_and_the_entropy_of_beta(
    beta: float, seed: int, sharpness: float
) -> None:
    value = generalized_jsd(sharpness * logits(seed), sharpness * logits(seed + 1), beta=beta)
    assert value.min() >= -1e-12
    assert value.max() <= -beta * math.log(beta) - (1 - beta) * math.log(1 - beta) + 1e-12


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_the_entropy_of_beta_is_reached_by_disjoint_distributions(beta: float) -> None:
    apart = torch.tensor([[60.0, -60.0], [-60.0, 60.0]], dtype=torch.float64)
    bound = -beta * math.log(beta) - (1 - beta) * math.log(1 - beta)
    assert generalized_jsd(apart, apart.flip(0), beta=beta).max().item() == pytest.approx(bound)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("top_k", SUPPORTS)
def test_identical_logits_give_no_loss_and_no_gradient(beta: float, top_k: TopK | None) -> None:
    same = logits(3)
    value, gradient = value_and_gradient(
        lambda s: generalized_jsd(s, same, beta=beta, top_k=top_k, clip=0.05), same
    )
    torch.testing.assert_close(value, torch.zeros_like(value), atol=1e-12, rtol=0)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), atol=1e-12, rtol=0)


def test_the_teacher_gets_no_gradient() -> None:
    student, teacher = logits(0).requires_grad_(), logits(1).requires_grad_()
    for top_k in SUPPORTS:
        generalized_jsd(student, teacher, beta=0.5, top_k=top_k).sum().backward()
    assert student.grad is not None
    assert teacher.grad is None


def test_half_precision_is_raised_to_fp32() -> None:
    student, teacher = logits(0).bfloat16(), logits(1).bfloat16()
    value = generalized_jsd(student, teacher, beta=0.5)
    assert value.dtype is torch.float32
    torch.testing.assert_close(value, generalized_jsd(student.float(), teacher.float(), beta=0.5))


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("top_k", SUPPORTS)
def test_gradients_equal_finite_differences(beta: float, top_k: TopK | None) -> None:
    student = logits(0, rows=3).requires_grad_()
    loss = partial(generalized_jsd, teacher_logits=logits(1, rows=3), beta=beta, temperature=1.1, top_k=top_k)
    assert torch.autograd.gradcheck(loss, (student,))


# Masks and reductions


def test_padding_changes_nothing() -> None:
    student, teacher = logits(0, rows=6).reshape(2, 3, -1), logits(1, rows=6).reshape(2, 3, -1)
    padding = torch.full((2, 2, 11), math.nan, dtype=torch.float64)
    mask = torch.tensor([[True, True, False], [True, False, True]])
    padded_mask = torch.cat([mask, torch.zeros(2, 2, dtype=torch.bool)], 1)
    teacher = torch.cat([teacher, padding], 1)

    def padded(s: Tensor) -> Tensor:
        return generalized_jsd(
            torch.cat([s, padding], 1), teacher, beta=0.5, mask=padded_mask, reduction="mean"
        )

    def bare(s: Tensor) -> Tensor:
        return generalized_jsd(s, teacher[:, :3], beta=0.5, mask=mask, reduction="mean")

    torch.testing.assert_close(value_and_gradient(padded, student), value_and_gradient(bare, student))


def test_only_trained_positions_have_a_value_and_a_gradient() -> None:
    mask = torch.tensor([True, False, True, True, False, False, True])
    value, gradient = value_and_gradient(
        lambda s: generalized_jsd(s, logits(1), beta=0.5, mask=mask), logits(0)
    )
    assert (value != 0).tolist() == mask.tolist()
    assert gradient.any(-1).tolist() == mask.tolist()


def test_the_mean_of_parts_over_a_common_denominator_is_the_mean_of_the_whole() -> None:
    student, teacher = logits(0), logits(1)
    mask = torch.tensor([True, False, True, True, False, False, True])
    settings = {"beta": 0.5, "reduction": "mean"}
    whole = generalized_jsd(student, teacher, mask=mask, **settings)
    parts = sum(
        generalized_jsd(student[part], teacher[part], mask=mask[part], denominator=4, **settings)
        for part in (slice(0, 2), slice(2, 7))
    )
    total = generalized_jsd(student, teacher, beta=0.5, mask=mask, reduction="sum")
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(total, 4 * whole)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("top_k", [None, TopK(3)])
def test_nothing_trained_gives_an_attached_zero(reduction: str, top_k: TopK | None) -> None:
    value, gradient = value_and_gradient(
        lambda s: generalized_jsd(
            s, logits(1), beta=0.5, top_k=top_k, mask=torch.zeros(7, dtype=torch.bool), reduction=reduction
        ),
        logits(0),
    )
    assert not value.any()
    assert not gradient.any()


def test_clip_rescales_a_position_and_keeps_its_direction() -> None:
    def function(clip: float | None) -> Callable[[Tensor], Tensor]:
        return lambda s: generalized_jsd(s, logits(1), beta=0.0, clip=clip)

    value, gradient = value_and_gradient(function(None), logits(0))
    clip = value.median().item()  # some positions are above it and some below
    clipped = value_and_gradient(function(clip), logits(0))
    torch.testing.assert_close(clipped[0], value.clamp(max=clip))
    torch.testing.assert_close(clipped[1], gradient * (clip / value.clamp(min=clip))[:, None])


def test_weights_multiply_without_gradient() -> None:
    weights = torch.rand(7, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([True, False, True, True, False, False, True])
    generalized = partial(generalized_jsd, logits(0).requires_grad_(), logits(1), beta=0.5, mask=mask)
    weighted = generalized(weights=weights)
    weighted.sum().backward()
    assert weights.grad is None
    torch.testing.assert_close(weighted, generalized() * weights.detach())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"beta": 1.5}, "beta"),
        ({"beta": math.nan}, "beta"),
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"clip": 0.0}, "clip"),
        ({"clip": math.inf}, "clip"),
        ({"top_k": TopK(12)}, "11 entries"),
        ({"reduction": "mean"}, "needs a boolean mask"),
        ({"reduction": "batchmean"}, "reduction must be"),
        ({"mask": torch.ones(7)}, "boolean"),
        ({"mask": torch.ones(6, dtype=torch.bool)}, r"\(7,\), not \(6,\)"),
        ({"weights": torch.ones(6)}, "weights"),
        ({"denominator": 3.0}, "needs reduction 'mean'"),
        ({"mask": torch.ones(7, dtype=torch.bool), "reduction": "mean", "denominator": 0.0}, "positive"),
        ({"teacher_logits": logits(1, rows=3)}, r"\(7, 11\) and \(3, 11\)"),
    ],
)
def test_what_has_no_meaning_is_refused(change: dict[str, object], message: str) -> None:
    arguments = {"student_logits": logits(0), "teacher_logits": logits(1), "beta": 0.5}
    with pytest.raises(ValueError, match=message):
        generalized_jsd(**{**arguments, **change})


def test_supports_without_a_meaning_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        TopK(0)
    with pytest.raises(ValueError, match="'both'"):
        TopK(1, "both")


# Top-k supports


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("of", ["student", "teacher"])
@pytest.mark.parametrize("tail", [True, False])
def test_the_whole_vocabulary_as_support_is_the_full_divergence(beta: float, of: str, tail: bool) -> None:
    ours = value_and_gradient(
        lambda s: generalized_jsd(s, logits(1), beta=beta, top_k=TopK(11, of, tail)), logits(0)
    )
    full = value_and_gradient(lambda s: generalized_jsd(s, logits(1), beta=beta), logits(0))
    torch.testing.assert_close(ours, full, atol=1e-6, rtol=0)


@given(beta=st.sampled_from(BETAS), seed=st.integers(0, 99), of=st.sampled_from(["student", "teacher"]))
def test_with_a_tail_the_divergence_grows_with_k(beta: float, seed: int, of: str) -> None:
    # flat enough for a missing mass above the floor of the tail
    pair = (logits(seed) / 3, logits(seed + 1) / 3)
    values = [generalized_jsd(*pair, beta=beta, top_k=TopK(k, of)) for k in range(1, 11)]
    values.append(generalized_jsd(*pair, beta=beta))
    steps = torch.stack(values).diff(dim=0)
    assert steps.min() >= -1e-6


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_support_of_all_the_mass_stays_finite(beta: float, dtype: torch.dtype) -> None:
    certain, other = torch.zeros(2, 3, 11, dtype=dtype)
    certain[:, 0], other[:, 1] = 200.0, 200.0
    for teacher in (certain, other):
        value, gradient = value_and_gradient(
            lambda s, t=teacher: generalized_jsd(s, t, beta=beta, top_k=TopK(2)), certain
        )
        assert value.isfinite().all()
        assert gradient.isfinite().all()


def test_the_tail_is_the_missing_mass() -> None:
    log_probs = torch.tensor([0.5, 0.2], dtype=torch.float64).log()
    torch.testing.assert_close(with_tail(log_probs).exp().tolist(), [0.5, 0.2, 0.3])
