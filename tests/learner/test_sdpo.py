"""Self-distillation policy optimisation: TRL's values, and what its detached weights do."""

from __future__ import annotations

import math
import os
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hintloop.learner.losses.divergence import generalized_jsd
from hintloop.learner.losses.sdpo import (
    gap_gate,
    importance_weights,
    sampled_token_divergence,
    sdpo,
    token_logprobs,
    trust_region_logits,
)

VOCABULARY = 11
SHAPE = (2, 4)
VARIANTS = [{"variant": "full"}, {"variant": "topk", "k": 3}, {"variant": "sampled"}]


def logits(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2.0 * torch.randn(*SHAPE, VOCABULARY, generator=generator, dtype=torch.float64)


def sampled() -> Tensor:
    return torch.randint(VOCABULARY, SHAPE, generator=torch.Generator().manual_seed(9))


def gradient(loss: Tensor, leaf: Tensor) -> Tensor:
    (result,) = torch.autograd.grad(loss.sum(), leaf)
    return result


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("tail", [True, False])
def test_topk_equals_trl(beta: float, tail: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.sdpo.loss_utils import compute_topk_self_distillation_loss

    student, teacher = logits(0).requires_grad_(), logits(1)
    theirs = compute_topk_self_distillation_loss(
        student, teacher, distillation_topk=3, distillation_alpha=beta, distillation_add_tail=tail
    )
    ours = sdpo(student, teacher, variant="topk", k=3, tail=tail, beta=beta)
    torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=0)
    torch.testing.assert_close(gradient(ours, student), gradient(theirs, student), atol=1e-9, rtol=0)


def test_sampled_and_its_clipped_ratio_equal_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.sdpo import loss_utils

    student, teacher, tokens = logits(0).requires_grad_(), logits(1), sampled()
    old = token_logprobs(logits(2), tokens)
    theirs = loss_utils.apply_importance_sampling_clipping(
        loss_utils.compute_sampled_token_self_distillation_loss(
            student, teacher, tokens, distillation_alpha=1.0
        ),
        token_logprobs(student, tokens),
        old,
        2.0,
    )
    ours = sdpo(student, teacher, tokens, variant="sampled", old_logprobs=old, ratio_clip=2.0)
    torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=0)
    torch.testing.assert_close(gradient(ours, student), gradient(theirs, student), atol=1e-9, rtol=0)


def test_full_is_the_divergence_over_the_vocabulary() -> None:
    for beta in (0.0, 0.5, 1.0):
        ours = sdpo(logits(0), logits(1), variant="full", beta=beta, temperature=1.1)
        torch.testing.assert_close(ours, generalized_jsd(logits(0), logits(1), beta=beta, temperature=1.1))


def test_sampled_has_the_gradient_of_the_reverse_kl_in_expectation() -> None:
    student, teacher = logits(0).requires_grad_(), logits(1)
    expected = torch.zeros_like(student)
    for token in range(VOCABULARY):
        tokens = torch.full(SHAPE, token)
        probability = token_logprobs(student.detach(), tokens).exp()
        loss = sdpo(student, teacher, tokens, variant="sampled", weights=probability)
        expected += gradient(loss, student)
    exact = gradient(generalized_jsd(student, teacher, beta=1.0), student)
    torch.testing.assert_close(expected, exact, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_stop_at_the_teacher_and_at_every_weight(variant: dict[str, object]) -> None:
    student = logits(0).requires_grad_()
    others = [
        x.requires_grad_() for x in (logits(1), -torch.rand(SHAPE), torch.rand(SHAPE, dtype=torch.float64))
    ]
    teacher, old, weights = others
    loss = sdpo(student, teacher, sampled(), old_logprobs=old, weights=weights, gate_sharpness=5.0, **variant)
    loss.sum().backward()
    assert student.grad is not None
    assert student.grad.any()
    assert [x.grad for x in others] == [None] * 3


@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_ratio_and_gate_multiply(variant: dict[str, object]) -> None:
    student, teacher, tokens = logits(0).requires_grad_(), logits(1), sampled()
    old, weights = token_logprobs(logits(2), tokens), torch.rand(SHAPE, dtype=torch.float64)
    log_s, log_t = (token_logprobs(x, tokens, temperature=1.3) for x in (student, teacher))
    factor = weights * importance_weights(log_s, old, clip=1.5) * gap_gate(log_s, log_t, sharpness=2.0)
    plain = partial(sdpo, student, teacher, tokens, temperature=1.3, **variant)
    ours = plain(old_logprobs=old, ratio_clip=1.5, weights=weights, gate_sharpness=2.0)
    torch.testing.assert_close(ours, plain() * factor)
    torch.testing.assert_close(gradient(ours, student), gradient(plain() * factor.detach(), student))


@pytest.mark.parametrize("variant", VARIANTS)
def test_without_a_hint_there_is_no_loss_and_no_gradient(variant: dict[str, object]) -> None:
    student = logits(0).requires_grad_()
    loss = sdpo(student, student.detach(), sampled(), gate_sharpness=5.0, **variant)
    assert loss.abs().max() < 1e-12
    assert gradient(loss, student).abs().max() < 1e-12


@pytest.mark.parametrize("variant", VARIANTS)
def test_padding_may_hold_anything(variant: dict[str, object]) -> None:
    student, teacher, tokens = logits(0).requires_grad_(), logits(1), sampled()
    old = token_logprobs(logits(2), tokens)
    mask = torch.tensor([[True, True, False, False], [True, False, True, False]])
    clean = sdpo(student[mask], teacher[mask], tokens[mask], old_logprobs=old[mask], **variant).sum()
    junk = ~mask
    student_padded = student.masked_fill(junk[..., None], math.nan)
    loss = sdpo(
        student_padded,
        teacher.masked_fill(junk[..., None], math.nan),
        tokens.masked_fill(junk, -100),
        old_logprobs=old.masked_fill(junk, math.nan),
        mask=mask,
        reduction="mean",
        denominator=8,
        **variant,
    )
    torch.testing.assert_close(loss, clean / 8)
    torch.testing.assert_close(gradient(loss, student), gradient(clean / 8, student))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_nothing_trained_gives_an_attached_zero(variant: dict[str, object], reduction: str) -> None:
    student = logits(0).requires_grad_()
    nothing = torch.zeros(SHAPE, dtype=torch.bool)
    loss = sdpo(
        student, logits(1), sampled(), mask=nothing, reduction=reduction, gate_sharpness=1.0, **variant
    )
    assert not loss.any()
    assert not gradient(loss, student).any()


@given(
    pair=st.tuples(st.floats(-1e4, 0), st.floats(-1e4, 0)),
    clip=st.floats(0.01, 100),
)
def test_importance_weights_are_between_the_smallest_ratio_and_the_clip(
    pair: tuple[float, float], clip: float
) -> None:
    new, old = torch.tensor(pair, dtype=torch.float64)
    weight = importance_weights(new, old, clip=clip).item()
    assert math.exp(-20) * (1 - 1e-9) <= weight <= clip
    if abs(pair[0] - pair[1]) < 20:
        assert weight == pytest.approx(min(math.exp(pair[0] - pair[1]), clip))


def test_the_gate_opens_where_the_teacher_endorses_the_token() -> None:
    student, teacher = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-0.5, -1.0, -3.0])
    expected = [1 / (1 + math.exp(-5 * gap)) for gap in (0.5, 0.0, -2.0)]
    assert gap_gate(student, teacher).tolist() == pytest.approx(expected)
    assert gap_gate(student, teacher, sharpness=0.0).tolist() == [0.5] * 3


def test_one_step_raises_what_the_teacher_prefers() -> None:
    for variant in ({"variant": "full"}, {"variant": "topk", "k": 3}):
        student = torch.zeros(1, 1, VOCABULARY, dtype=torch.float64)
        student[..., :3] = 0.5  # the support of the top 3
        student.requires_grad_()
        teacher = student.detach().clone()
        teacher[..., 0], teacher[..., 1] = 3.0, -3.0
        step = gradient(sdpo(student, teacher, **variant), student).flatten()
        assert step.argmin() == 0
        assert step[0] < 0 < step[1]


@pytest.mark.parametrize("u", [0.0, 0.05, 0.5, 1.0])
def test_a_trust_region_teacher_is_a_geometric_mean(u: float) -> None:
    reference, student = logits(0), logits(1).requires_grad_()
    teacher = trust_region_logits(reference, student, u)
    mixed = (1 - u) * reference.log_softmax(-1) + u * student.detach().log_softmax(-1)
    torch.testing.assert_close(teacher.log_softmax(-1), mixed.log_softmax(-1))
    assert not teacher.requires_grad
    if u in (0.0, 1.0):
        assert torch.equal(teacher, student if u else reference)


def test_half_precision_is_raised_to_fp32() -> None:
    student, teacher = logits(0).bfloat16(), logits(1).bfloat16()
    assert trust_region_logits(student, teacher, 0.5).dtype is torch.float32
    for variant in VARIANTS:
        ours = sdpo(student, teacher, sampled(), **variant)
        assert ours.dtype is torch.float32
        torch.testing.assert_close(ours, sdpo(student.float(), teacher.float(), sampled(), **variant))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"variant": "none"}, "variant"),
        ({"variant": "topk"}, "needs it"),
        ({"k": 3}, "k = 3"),
        ({"variant": "topk", "k": 0}, "at least 1"),
        ({"variant": "topk", "k": 12}, "11 entries"),
        ({"variant": "sampled"}, "sampled tokens"),
        ({"variant": "sampled", "beta": 0.5, "tokens": sampled()}, "beta = 1"),
        ({"old_logprobs": torch.zeros(SHAPE)}, "sampled tokens"),
        ({"gate_sharpness": 1.0}, "sampled tokens"),
        ({"gate_sharpness": -1.0, "tokens": sampled()}, "sharpness"),
        ({"gate_sharpness": math.inf, "tokens": sampled()}, "sharpness"),
        ({"tokens": sampled(), "old_logprobs": torch.zeros(SHAPE), "ratio_clip": 0.0}, "clip"),
        ({"tokens": sampled()[:1], "gate_sharpness": 1.0}, r"tokens must be of shape \(2, 4\)"),
        ({"weights": torch.ones(3)}, r"weights must be of shape \(2, 4\), not \(3,\)"),
        ({"temperature": -1.0}, "temperature"),
        ({"beta": 2.0}, "beta"),
        ({"teacher_logits": logits(1)[:1]}, "one shape"),
        ({"reduction": "mean"}, "needs a boolean mask"),
    ],
)
def test_what_has_no_meaning_is_refused(change: dict[str, object], message: str) -> None:
    arguments = {"student_logits": logits(0), "teacher_logits": logits(1), "variant": "full"}
    with pytest.raises(ValueError, match=message):
        sdpo(**{**arguments, **change})


def test_the_parts_refuse_shapes_that_differ() -> None:
    one, two = torch.zeros(3), torch.zeros(2)
    for part in (sampled_token_divergence, importance_weights, gap_gate):
        with pytest.raises(ValueError, match="one shape"):
            part(one, two)
    with pytest.raises(ValueError, match="one shape"):
        trust_region_logits(one, two, 0.5)
    with pytest.raises(ValueError, match="u must be"):
        trust_region_logits(one, one, 1.1)
