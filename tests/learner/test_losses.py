"""The learning maths against hand-computed values, limits, and TRL's own formulas."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from trl import DPOTrainer

from hintloop.learner.losses import divergence
from hintloop.learner.losses.divergence import generalized_jsd, hint_divergence
from hintloop.learner.losses.head import Head
from hintloop.learner.losses.preference import dpo

BETAS = (0.0, 0.1, 0.5, 0.9, 1.0)


def logits(seed: int, rows: int = 7, vocabulary: int = 11) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3.0 * torch.randn(rows, vocabulary, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("temperature", [1.0, 1.3])
def test_jsd_equals_trl(beta: float, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.gkd import GKDTrainer

    student, teacher = logits(0), logits(1)
    labels = torch.zeros(1, len(student), dtype=torch.long)
    theirs = GKDTrainer.generalized_jsd_loss(
        student[None], teacher[None], labels=labels, beta=beta, temperature=temperature
    )
    ours = generalized_jsd(student, teacher, beta=beta, temperature=temperature).mean()
    assert abs(float(theirs - ours)) < 1e-9


def test_jsd_endpoints_are_the_two_directions_of_kl() -> None:
    student, teacher = (torch.tensor([p, 1 - p], dtype=torch.float64).log()[None] for p in (0.5, 0.9))
    forward = 0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5)
    reverse = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    assert generalized_jsd(student, teacher, beta=0.0).item() == pytest.approx(forward)
    assert generalized_jsd(student, teacher, beta=1.0).item() == pytest.approx(reverse)


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_jsd_is_bounded_by_the_entropy_of_beta(beta: float) -> None:
    apart = torch.tensor([[60.0, -60.0], [-60.0, 60.0]], dtype=torch.float64)
    bound = -beta * math.log(beta) - (1 - beta) * math.log(1 - beta)
    assert generalized_jsd(apart, apart.flip(0), beta=beta).max().item() == pytest.approx(bound)


@pytest.mark.parametrize("beta", BETAS)
def test_identical_logits_give_no_loss_and_no_gradient(beta: float) -> None:
    student = logits(3).requires_grad_()
    loss = generalized_jsd(student, student.detach().clone(), beta=beta).sum()
    loss.backward()
    assert loss.item() == pytest.approx(0.0, abs=1e-12)
    assert student.grad is not None
    assert student.grad.abs().max() < 1e-12


def test_the_teacher_gets_no_gradient() -> None:
    student, teacher = logits(0).requires_grad_(), logits(1).requires_grad_()
    generalized_jsd(student, teacher, beta=0.5).sum().backward()
    assert student.grad is not None
    assert teacher.grad is None


def test_half_precision_is_raised_to_fp32() -> None:
    assert generalized_jsd(logits(0).bfloat16(), logits(1).bfloat16(), beta=0.5).dtype is torch.float32


def test_no_positions_give_an_attached_zero() -> None:
    hidden = torch.randn(4, 6, requires_grad=True)
    head = Head(torch.randn(11, 6))
    none = torch.zeros(0, dtype=torch.long)
    loss = hint_divergence(hidden[none], hidden.detach()[none], head, head, beta=0.5).sum()
    loss.backward()
    assert loss.item() == 0.0
    assert hidden.grad is not None
    assert not hidden.grad.any()


def test_wrong_shapes_and_betas_are_refused() -> None:
    with pytest.raises(ValueError, match="matrices"):
        generalized_jsd(logits(0), logits(0, rows=3), beta=0.5)
    with pytest.raises(ValueError, match="beta"):
        generalized_jsd(logits(0), logits(1), beta=1.5)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.5, 4.0)])
def test_tiles_give_the_dense_divergence(
    beta: float, scale: float, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    hidden, hinted = torch.randn(9, 8, requires_grad=True), torch.randn(9, 8)
    heads = [Head(torch.randn(50, 8), torch.randn(50), scale, softcap) for _ in range(2)]
    results = []
    for limit in (1 << 24, 0):
        monkeypatch.setattr(divergence, "DENSE_ELEMENTS", limit)
        hidden.grad = None
        value = hint_divergence(hidden, hinted, *heads, beta=beta, temperature=1.2)
        value.sum().backward()
        results.append((value.detach(), hidden.grad))
    torch.testing.assert_close(results[0], results[1], atol=1e-5, rtol=1e-5)


def test_head_logprobs_and_entropy_are_those_of_its_logits() -> None:
    torch.manual_seed(0)
    head, hidden = Head(torch.randn(50, 8), torch.randn(50), 0.5, 4.0), torch.randn(9, 8)
    targets = torch.randint(0, 50, (9,))
    logps, entropy = head.logprobs(hidden, targets, temperature=0.7, entropy=True)
    expected = torch.log_softmax(head.logits(hidden) / 0.7, -1)
    torch.testing.assert_close(logps, expected[torch.arange(9), targets])
    torch.testing.assert_close(entropy, -(expected.exp() * expected).sum(-1))


def trl_dpo(logps: torch.Tensor, reference: torch.Tensor, beta: float, chosen_nll: float = 0.0) -> float:
    """TRL's own loss for (2, P) log-probabilities of one-token responses, chosen first."""
    flat = logps.reshape(-1, 1)
    outputs = SimpleNamespace(
        log_probs=flat,
        entropy=flat,
        mean_logits=flat,
        is_top1=torch.ones_like(flat, dtype=torch.bool),
    )
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=False),
        accelerator=Accelerator(cpu=True),
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=["sigmoid", "sft"],
        loss_weights=[1.0, chosen_nll],
        beta=beta,
        use_weighting=False,
        _metrics={"eval": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    ids = torch.zeros(len(flat), 2, dtype=torch.long)
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "completion_mask": torch.tensor([[0, 1]]).expand_as(ids),
        "ref_chosen_logps": reference[0],
        "ref_rejected_logps": reference[1],
    }
    return float(DPOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, False))


def test_dpo_equals_trl() -> None:
    torch.manual_seed(0)
    logps, reference = -5 * torch.rand(2, 6, dtype=torch.float64), -5 * torch.rand(2, 6, dtype=torch.float64)
    ours = dpo(*logps, *reference, beta=0.3).losses.mean().item()
    assert ours == pytest.approx(trl_dpo(logps, reference, 0.3), abs=1e-9)
    lengths = torch.ones(6)
    kept_up = dpo(*logps, *reference, beta=0.3, chosen_nll=0.7, chosen_lengths=lengths).losses.mean().item()
    assert kept_up == pytest.approx(trl_dpo(logps, reference, 0.3, 0.7), abs=1e-9)


def test_the_nll_of_the_chosen_response_is_a_mean_over_its_tokens() -> None:
    one, lengths = torch.tensor([-6.0, -6.0]), torch.tensor([2, 3])
    plain = dpo(one, one, one, one, beta=0.1).losses
    kept_up = dpo(one, one, one, one, beta=0.1, chosen_nll=0.5, chosen_lengths=lengths).losses
    assert (kept_up - plain).tolist() == pytest.approx([1.5, 1.0])
    with pytest.raises(ValueError, match="length"):
        dpo(one, one, one, one, beta=0.1, chosen_nll=0.5)


def test_dpo_at_the_reference_is_log_two_with_gradient_half_beta() -> None:
    logps = torch.tensor([-3.0, -4.0], requires_grad=True)
    other = torch.tensor([-1.0, -2.0], requires_grad=True)
    result = dpo(logps, other, logps.detach(), other.detach(), beta=0.2)
    result.losses.sum().backward()
    assert result.losses.tolist() == pytest.approx([math.log(2)] * 2)
    assert logps.grad is not None
    assert logps.grad.tolist() == pytest.approx([-0.1] * 2)
    assert other.grad is not None
    assert other.grad.tolist() == pytest.approx([0.1] * 2)


def test_dpo_margins_flip_with_the_pair_and_ignore_a_common_shift() -> None:
    a, b, ra, rb = -4 * torch.rand(4, 5, generator=torch.Generator().manual_seed(1))
    result, flipped = dpo(a, b, ra, rb, beta=0.5), dpo(b, a, rb, ra, beta=0.5)
    torch.testing.assert_close(result.margins, -flipped.margins)
    torch.testing.assert_close(result.margins, dpo(a, b, ra + 7, rb + 7, beta=0.5).margins)
    assert result.accuracies.tolist() == [float(m > 0) for m in result.margins]


def test_no_pairs_give_an_attached_zero() -> None:
    logps = torch.zeros(3, requires_grad=True)
    none = logps[torch.zeros(0, dtype=torch.long)]
    loss = dpo(none, none, none, none, beta=0.1).losses.sum()
    loss.backward()
    assert loss.item() == 0.0
    assert logps.grad is not None
    assert not logps.grad.any()
    with pytest.raises(ValueError, match="vectors"):
        dpo(logps, none, logps, logps, beta=0.1)
