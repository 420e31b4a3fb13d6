"""DPO and SimPO against hand-computed values, limits, and the formulas of TRL and Liger."""

from __future__ import annotations

import importlib
import math
import os
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from hypothesis import given
from hypothesis import strategies as st
from trl import DPOTrainer

from hintloop.learner.losses.head import Head
from hintloop.learner.losses.preference import avg_sequence_logprob, dpo, response_logps, simpo


def logps(seed: int, count: int, pairs: int = 6) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return -5 * torch.rand(count, pairs, generator=generator, dtype=torch.float64)


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


def cpo_trainer(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(os.environ, "TRL_EXPERIMENTAL_SILENCE", "1")
    return importlib.import_module("trl.experimental.cpo").CPOTrainer


def liger(name: str, function: str) -> Any:
    """The loss of a pair as Liger has it."""
    module = pytest.importorskip(
        f"liger_kernel.chunked_loss.{name}", reason="Liger, the other public implementation, is not installed"
    )
    return getattr(module, function).preference_loss_fn


def test_dpo_equals_trl() -> None:
    policy, reference = logps(0, 2), logps(1, 2)
    ours = dpo(*policy, *reference, beta=0.3).losses.mean().item()
    assert ours == pytest.approx(trl_dpo(policy, reference, 0.3), abs=1e-9)
    lengths = torch.ones(6)
    kept_up = dpo(*policy, *reference, beta=0.3, chosen_nll=0.7, chosen_lengths=lengths).losses.mean().item()
    assert kept_up == pytest.approx(trl_dpo(policy, reference, 0.3, 0.7), abs=1e-9)


def test_dpo_equals_liger() -> None:
    loss_of = liger("dpo_loss", "LigerFusedLinearDPOFunction")
    policy, reference = logps(0, 2), logps(1, 2)
    theirs, *_ = loss_of(*policy, torch.zeros(12, 1), *reference, beta=0.3)
    ours = dpo(*policy, *reference, beta=0.3).losses.mean()
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-9)


def test_the_nll_of_the_chosen_response_is_a_mean_over_its_tokens() -> None:
    one, lengths = torch.tensor([-6.0, -6.0]), torch.tensor([2, 3])
    plain = dpo(one, one, one, one, beta=0.1).losses
    kept_up = dpo(one, one, one, one, beta=0.1, chosen_nll=0.5, chosen_lengths=lengths).losses
    assert (kept_up - plain).tolist() == pytest.approx([1.5, 1.0])
    with pytest.raises(ValueError, match="length"):
        dpo(one, one, one, one, beta=0.1, chosen_nll=0.5)


def test_dpo_at_the_reference_is_log_two_with_gradient_half_beta() -> None:
    chosen = torch.tensor([-3.0, -4.0], requires_grad=True)
    other = torch.tensor([-1.0, -2.0], requires_grad=True)
    result = dpo(chosen, other, chosen.detach(), other.detach(), beta=0.2)
    result.losses.sum().backward()
    assert result.losses.tolist() == pytest.approx([math.log(2)] * 2)
    assert chosen.grad is not None
    assert chosen.grad.tolist() == pytest.approx([-0.1] * 2)
    assert other.grad is not None
    assert other.grad.tolist() == pytest.approx([0.1] * 2)


def test_dpo_margins_flip_with_the_pair_and_ignore_a_common_shift() -> None:
    a, b, ra, rb = logps(1, 4)
    result, flipped = dpo(a, b, ra, rb, beta=0.5), dpo(b, a, rb, ra, beta=0.5)
    torch.testing.assert_close(result.margins, -flipped.margins)
    torch.testing.assert_close(result.margins, dpo(a, b, ra + 7, rb + 7, beta=0.5).margins)
    assert result.accuracies.tolist() == [float(m > 0) for m in result.margins]


def test_no_pairs_give_an_attached_zero() -> None:
    some = torch.zeros(3, requires_grad=True)
    none = some[torch.zeros(0, dtype=torch.long)]
    losses = dpo(none, none, none, none, beta=0.1).losses, simpo(none, none, beta=2.0, gamma=0.5).losses
    total = torch.cat(losses).sum()
    total.backward()
    assert all(loss.requires_grad for loss in losses)
    assert total.item() == 0.0
    assert some.grad is not None
    assert not some.grad.any()
    with pytest.raises(ValueError, match="vectors"):
        dpo(some, none, some, some, beta=0.1)


@pytest.mark.parametrize(("beta", "gamma"), [(2.0, 0.5), (0.1, 0.5), (10.0, 3.0), (2.5, 0.0)])
def test_simpo_equals_liger(beta: float, gamma: float) -> None:
    loss_of = liger("simpo_loss", "LigerFusedLinearSimPOFunction")
    chosen, rejected = logps(0, 2)
    theirs, *_ = loss_of(chosen, rejected, torch.zeros(12, 1), beta=beta, gamma=gamma)
    ours = simpo(chosen, rejected, beta=beta, gamma=gamma).losses.mean()
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-9)


@pytest.mark.parametrize(("beta", "gamma"), [(2.0, 0.5), (0.1, 0.5), (10.0, 3.0), (2.5, 0.0)])
def test_simpo_equals_cpo_without_its_likelihood_term(
    beta: float, gamma: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = SimpleNamespace(
        alpha=0.0,
        beta=beta,
        simpo_gamma=gamma,
        loss_type="simpo",
        label_smoothing=0.0,
        accelerator=SimpleNamespace(device=torch.device("cpu")),
    )
    chosen, rejected = logps(0, 2)
    theirs, chosen_rewards, rejected_rewards = cpo_trainer(monkeypatch).cpo_loss(trainer, chosen, rejected)
    ours = simpo(chosen, rejected, beta=beta, gamma=gamma)
    torch.testing.assert_close(ours.losses, theirs, atol=1e-9, rtol=0)
    torch.testing.assert_close(ours.margins, chosen_rewards - rejected_rewards, atol=1e-9, rtol=0)


@given(st.floats(0.0, 5.0), st.floats(0.1, 10.0), st.floats(-20.0, 0.0))
def test_simpo_of_equally_likely_responses_is_the_softplus_of_gamma(
    gamma: float, beta: float, both: float
) -> None:
    same = torch.tensor([both], dtype=torch.float64)
    result = simpo(same, same, beta=beta, gamma=gamma)
    assert result.losses.item() == pytest.approx(math.log1p(math.exp(gamma)))
    assert result.margins.item() == 0.0


def test_simpo_flips_with_the_pair_and_pulls_the_two_apart() -> None:
    chosen, rejected = (x.clone().requires_grad_() for x in logps(3, 2))
    result = simpo(chosen, rejected, beta=2.0, gamma=0.5)
    result.losses.sum().backward()
    torch.testing.assert_close(result.margins, -simpo(rejected, chosen, beta=2.0, gamma=0.5).margins)
    assert chosen.grad is not None
    assert rejected.grad is not None
    assert (chosen.grad < 0).all()
    assert chosen.grad.equal(-rejected.grad)


def test_simpo_refuses_what_has_no_meaning() -> None:
    one = torch.zeros(3)
    for beta, gamma in ((0.0, 0.5), (-1.0, 0.5), (2.0, -0.1), (math.nan, 0.5), (2.0, math.inf)):
        with pytest.raises(ValueError, match="beta"):
            simpo(one, one, beta=beta, gamma=gamma)
    with pytest.raises(ValueError, match="vectors"):
        simpo(one, one[:2], beta=2.0, gamma=0.5)
    with pytest.raises(ValueError, match="vectors"):
        simpo(one[None], one[None], beta=2.0, gamma=0.5)


def sequences(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, ids and response masks of three sequences of seven tokens."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(3, 7, 11, generator=generator, dtype=torch.float64)
    ids = torch.randint(0, 11, (3, 7), generator=generator)
    columns = torch.arange(7)
    return logits, ids, torch.stack([columns >= 2, (columns >= 4) & (columns < 6), columns == 1])


def test_the_mean_logprob_takes_each_token_from_the_position_before_it() -> None:
    logits, ids, mask = sequences()
    every = logits.log_softmax(-1)
    expected = [
        sum(every[b, p - 1, ids[b, p]].item() for p in range(7) if mask[b, p]) / int(mask[b].sum())
        for b in range(3)
    ]
    assert avg_sequence_logprob(logits, ids, mask).tolist() == pytest.approx(expected)


def test_the_mean_logprob_equals_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, ids, mask = sequences()
    labels = ids.masked_fill(~mask, -100)
    theirs = cpo_trainer(monkeypatch).get_batch_logps(logits, labels, average_log_prob=True)
    torch.testing.assert_close(avg_sequence_logprob(logits, ids, mask), theirs, atol=1e-9, rtol=0)


def test_the_shift_is_by_one_and_only_the_predicting_positions_get_a_gradient() -> None:
    ids = torch.tensor([[4, 2, 0, 3, 1]])
    logits = torch.full((1, 5, 5), -40.0)
    logits[0, torch.arange(4), ids[0, 1:]] = 40.0  # each position is sure of the token after it
    logits.requires_grad_()
    mask = torch.tensor([[False, False, True, True, False]])
    mean = avg_sequence_logprob(logits, ids, mask)
    assert mean.item() == pytest.approx(0.0, abs=1e-12)
    flat = torch.zeros(1, 5, 5, requires_grad=True)
    avg_sequence_logprob(flat, ids, mask).sum().backward()
    assert flat.grad is not None
    assert flat.grad.any(-1)[0].tolist() == [False, True, True, False, False]


@given(st.integers(0, 1000), st.integers(1, 4))
def test_a_response_repeated_token_by_token_changes_neither_mean_nor_loss(seed: int, times: int) -> None:
    logits, ids, _ = sequences(seed)
    mask = (torch.arange(7) >= 2).expand(3, 7)
    predicting = torch.arange(1, 6).repeat_interleave(times)
    repeated_logits = torch.cat([logits[:, :1], logits[:, predicting], logits[:, 6:]], 1)
    repeated_ids = torch.cat([ids[:, :2], ids[:, predicting + 1]], 1)
    repeated_mask = (torch.arange(repeated_ids.shape[1]) >= 2).expand_as(repeated_ids)
    once = avg_sequence_logprob(logits, ids, mask)
    many = avg_sequence_logprob(repeated_logits, repeated_ids, repeated_mask)
    torch.testing.assert_close(many, once)
    losses = [simpo(x, once.flip(0), beta=2.0, gamma=0.5).losses for x in (once, many)]
    torch.testing.assert_close(losses[0], losses[1])


def test_what_is_outside_of_the_response_is_never_read() -> None:
    logits, ids, mask = sequences()
    expected = avg_sequence_logprob(logits, ids, mask)
    predicting = torch.cat([mask[:, 1:], torch.zeros(3, 1, dtype=torch.bool)], 1)
    logits[~predicting] = torch.nan
    padded = torch.cat([logits, torch.full((3, 2, 11), torch.nan)], 1).requires_grad_()
    ids = torch.cat([ids.masked_fill(~mask, -100), torch.full((3, 2), -1)], 1)
    mean = avg_sequence_logprob(padded, ids, torch.cat([mask, torch.zeros(3, 2, dtype=torch.bool)], 1))
    mean.sum().backward()
    assert mean.equal(expected)
    assert padded.grad is not None
    assert padded.grad.isfinite().all()


def test_an_empty_response_is_an_attached_zero() -> None:
    logits, ids, mask = sequences()
    logits.requires_grad_()
    mask[1] = False
    mean = avg_sequence_logprob(logits, ids, mask)
    assert mean[1].item() == 0.0
    mean[1].backward()
    assert logits.grad is not None
    assert not logits.grad.any()
    assert avg_sequence_logprob(logits, ids, torch.zeros_like(mask)).tolist() == [0.0] * 3
    assert avg_sequence_logprob(logits, ids, torch.zeros_like(mask)).requires_grad


def test_the_mean_logprob_of_half_precision_is_fp32() -> None:
    logits, ids, mask = sequences()
    mean = avg_sequence_logprob(logits.bfloat16(), ids, mask)
    assert mean.dtype is torch.float32
    torch.testing.assert_close(mean.double(), avg_sequence_logprob(logits, ids, mask), atol=0.05, rtol=0)


def test_the_mean_logprob_refuses_what_does_not_fit() -> None:
    logits, ids, mask = sequences()
    with pytest.raises(ValueError, match=r"boolean.*int64"):
        avg_sequence_logprob(logits, ids, mask.long())
    with pytest.raises(ValueError, match="mask"):
        avg_sequence_logprob(logits, ids, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="shape"):
        avg_sequence_logprob(logits, ids, mask[:, 1:])
    with pytest.raises(ValueError, match=r"\(B, T, V\)"):
        avg_sequence_logprob(logits[:, 1:], ids, mask)
    with pytest.raises(ValueError, match="first token"):
        avg_sequence_logprob(logits, ids, torch.ones_like(mask))
    for token in (-100, 11):
        with pytest.raises(ValueError, match="ids"):
            avg_sequence_logprob(logits, ids.masked_fill(mask, token), mask)


def test_response_logps_are_the_sums_of_each_response() -> None:
    torch.manual_seed(0)
    head, states, targets = Head(torch.randn(11, 4)), torch.randn(6, 4), torch.randint(0, 11, (6,))
    each = head.logits(states).log_softmax(-1)[torch.arange(6), targets]
    response = torch.tensor([0, 0, 2, 3, 3, 3])  # of two pairs; the second chosen response is empty
    chosen, rejected = response_logps(head, states, targets, response, 2)
    torch.testing.assert_close(chosen, torch.stack([each[:2].sum(), torch.zeros(())]))
    torch.testing.assert_close(rejected, torch.stack([each[2], each[3:].sum()]))
