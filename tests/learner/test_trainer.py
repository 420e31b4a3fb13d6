"""The three channels in one step: gradients, denominators, and that each of them teaches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hintloop.learner.losses.divergence import generalized_jsd
from hintloop.learner.models import SideWeights
from hintloop.replay.episode import Episode, HintSite

from .factory import make_episode, make_groups, tiny_model
from .training import LOSS_TYPES, logps, train


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_the_split_into_micro_batches_changes_no_gradient(loss_type: str, tmp_path: Path) -> None:
    groups = make_groups(4, 2, sites=2, pairs=1, logprob=-3.7)
    gradients = [
        train(tiny_model(), [groups], tmp_path, loss_type=loss_type, micro_batches=pieces).gradients[0]
        for pieces in ((1, 2, 8, 11) if loss_type == "dapo" else (1, 5))
    ]
    assert gradients[0].norm() > 1e-3
    for gradient in gradients[1:]:
        assert (gradient - gradients[0]).norm() < 1e-5 * max(1.0, float(gradients[0].norm()))


def test_the_reward_channel_is_the_clipped_loss_with_the_recorded_policy(tmp_path: Path) -> None:
    groups = make_groups(2, 3, rewards=(1.0, 0.0, None), logprob=-3.7)
    record = train(tiny_model(), [groups], tmp_path, alpha_sdpo=0, beta_replay=0, micro_batches=2)
    model = tiny_model()
    total, tokens, clipped = torch.zeros((), dtype=torch.float64), 0, 0
    for group in groups:
        for episode, advantage in zip(group, (0.5, -0.5), strict=False):
            mask = torch.tensor(episode.loss_mask[1:], dtype=torch.bool)
            a = advantage / (np.sqrt(0.5) + 1e-4)
            ratio = (logps(model, episode.token_ids) - torch.tensor(episode.logprobs[1:]).double()).exp()[
                mask
            ]
            total = total - torch.min(ratio * a, ratio.clamp(0.8, 1.28) * a).sum()
            clipped += int((ratio > 1.28).sum() if a > 0 else (ratio < 0.8).sum())
            tokens += int(mask.sum())
    (total / tokens).backward()
    expected = torch.cat([p.grad.flatten().double() for p in model.parameters()])
    assert record.metrics[0]["loss_grpo"] == pytest.approx(float(total.detach() / tokens), rel=1e-5)
    assert record.metrics[0]["clip_fraction_low"] + record.metrics[0]["clip_fraction_high"] == pytest.approx(
        clipped / tokens
    )
    assert 0 < clipped < tokens
    assert (record.gradients[0] - expected).norm() < 1e-5 * expected.norm()


def test_the_hint_channel_is_the_divergence_at_the_failing_turn_only(tmp_path: Path) -> None:
    (group,) = make_groups(1, 2, rewards=(0.0,), sites=3, pairs=1)
    record = train(
        tiny_model(), [[group]], tmp_path, alpha_sdpo=1.0, jsd_beta=1.0, teacher="frozen", beta_replay=0.0
    )
    model, total, count = tiny_model(), torch.zeros(()), 0
    for ids, site in [(episode.token_ids, site) for episode in group for site in episode.hint_sites]:
        hinted = ids[: site.insert_at] + site.hint_ids + ids[site.insert_at : site.end]
        size = site.end - site.start
        student = model(input_ids=torch.tensor([ids])).logits[0, site.start - 1 : site.end - 1]
        teacher = tiny_model()(input_ids=torch.tensor([hinted])).logits[0, -size - 1 : -1]
        total, count = total + generalized_jsd(student, teacher, beta=1.0).sum(), count + size
    (total / count).backward()
    expected = torch.cat([p.grad.flatten().double() for p in model.parameters()])
    assert record.metrics[0]["loss_sdpo"] == pytest.approx(float(total.detach() / count), rel=1e-4)
    assert "loss_grpo" not in record.metrics[0]
    assert (record.gradients[0] - expected).norm() < 1e-4 * expected.norm()


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_preference_channel_is_dpo_on_sequences_of_their_own(micro_batches: int, tmp_path: Path) -> None:
    (group,) = make_groups(1, 2, rewards=(0.0,), pairs=3)
    foreign = replace(group[0].pairs[1], rejected_ids=(7, 9, 1))
    group[0] = replace(group[0], pairs=(*group[0].pairs, foreign))
    reference = tiny_model(seed=5).eval().requires_grad_(False)
    settings: dict[str, Any] = {"beta_replay": 1.0, "chosen_nll": 0.3, "micro_batches": micro_batches}
    record = train(tiny_model(), [[group]], tmp_path, reference_model=reference, alpha_sdpo=0.0, **settings)
    model, losses = tiny_model(), []
    for prompt, pair in [(e.token_ids[: p.prompt_end], p) for e in group for p in e.pairs]:
        (chosen, rejected), (before, after) = (
            [logps(m, prompt + r)[len(prompt) - 1 :].sum() for r in (pair.chosen_ids, pair.rejected_ids)]
            for m in (model, reference)
        )
        margin = 0.1 * ((chosen - rejected) - (before - after))
        losses.append(-torch.nn.functional.logsigmoid(margin) - 0.3 * chosen / len(pair.chosen_ids))
    loss = torch.stack(losses).mean()
    loss.backward()
    expected = torch.cat([p.grad.flatten().double() for p in model.parameters()])
    assert len(losses) == 7
    assert record.metrics[0]["loss_dpo"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert (record.gradients[0] - expected).norm() < 1e-5 * expected.norm()


def test_an_empty_hint_from_the_live_model_teaches_nothing(tmp_path: Path) -> None:
    groups = make_groups(2, 2, rewards=(0.0,), sites=2, hint_tokens=0)
    record = train(tiny_model(), [groups], tmp_path, teacher="live", alpha_sdpo=1.0)
    assert record.metrics[0]["loss_sdpo"] == pytest.approx(0.0, abs=1e-7)
    assert record.gradients[0].norm() < 1e-5


def test_two_steps_of_equal_sites_weigh_a_site_by_its_tokens(tmp_path: Path) -> None:
    one, two = make_groups(2, 1, rewards=(0.0,), sites=1, turn_tokens=(4, 5))
    settings: dict[str, Any] = {"alpha_sdpo": 1.0, "teacher": "frozen"}
    apart = [train(tiny_model(), [[g]], tmp_path, **settings).gradients[0] for g in (one, two)]
    together = train(tiny_model(), [[one, two]], tmp_path, **settings).gradients[0]
    assert (together - (apart[0] + apart[1]) / 2).norm() < 1e-6


def test_channels_without_inputs_or_weight_are_absent(tmp_path: Path) -> None:
    record = train(tiny_model(), [make_groups(2, 2, sites=1, pairs=1)], tmp_path, alpha_sdpo=0, beta_replay=0)
    assert record.trainer.side == SideWeights()
    assert {name for name in record.metrics[0] if name.startswith("loss_")} == {"loss_grpo"}
    assert "divergence_mean" not in record.metrics[0]
    assert "dpo_accuracy" not in record.metrics[0]


def test_a_model_with_windows_in_its_attention_is_refused(tmp_path: Path) -> None:
    model = tiny_model()
    model.config.layer_types = ["full_attention", "sliding_attention"]
    with pytest.raises(ValueError, match="full attention in every layer"):
        train(model, [make_groups(1, 2)], tmp_path)


def test_a_step_without_anything_to_learn_moves_no_weight(tmp_path: Path) -> None:
    model = tiny_model()
    useful, useless = make_groups(2, 2), make_groups(2, 2, rewards=(1.0,))
    train(model, [useful], tmp_path)
    before = [p.detach().clone() for p in model.parameters()]
    record = train(model, [useless, useless], tmp_path)
    assert all(a.equal(b) for a, b in zip(before, model.parameters(), strict=True))
    assert record.metrics[1] == {}


def test_a_gradient_that_is_not_finite_is_skipped_and_said(tmp_path: Path) -> None:
    model = tiny_model()
    groups = make_groups(1, 2, logprob=-1e30)  # the ratio overflows
    before = [p.detach().clone() for p in model.parameters()]
    record = train(model, [groups], tmp_path, loss_type="cispo", epsilon_high=1e38)
    assert record.metrics[0]["skipped"] == 1.0
    assert all(a.equal(b) for a, b in zip(before, model.parameters(), strict=True))


def test_channel_gradient_norms_are_those_of_each_channel_alone(tmp_path: Path) -> None:
    groups = make_groups(2, 2, sites=1, pairs=1)
    both = train(tiny_model(), [groups, groups], tmp_path, grad_norm_every=2, micro_batches=2).metrics
    alone = train(tiny_model(), [groups], tmp_path, alpha_sdpo=0, beta_replay=0).metrics[0]
    assert both[0]["grad_norm_grpo"] == pytest.approx(alone["grad_norm"], rel=1e-5)
    assert both[0]["grad_norm_sdpo"] > 0
    assert both[0]["grad_norm_dpo"] > 0
    assert "grad_norm_grpo" not in both[1]


@pytest.mark.parametrize(
    ("kind", "rate", "share"), [("ema", 0.25, 0.25), ("ema", 1.0, 1.0), ("frozen", 0.25, 0.0)]
)
def test_the_teacher_follows_the_student_as_configured(
    kind: str, rate: float, share: float, tmp_path: Path
) -> None:
    model = tiny_model()
    record = train(
        model, [make_groups(2, 2, sites=1)], tmp_path, teacher=kind, teacher_rate=rate, beta_replay=0
    )
    start = torch.nn.utils.parameters_to_vector(tiny_model().parameters())
    student = torch.nn.utils.parameters_to_vector(model.parameters())
    teacher = torch.nn.utils.parameters_to_vector(record.trainer.side.teacher.values())
    assert not student.equal(start)
    torch.testing.assert_close(teacher, torch.lerp(start, student, share))
    assert all(tensor.grad is None for tensor in record.trainer.side.teacher.values())


def test_reward_raises_the_probability_of_what_was_rewarded(tmp_path: Path) -> None:
    model, random = tiny_model(), np.random.default_rng(0)
    good, bad = (
        make_episode(n, "g", random, reward=r, turns=1, logprob=-3.9) for n, r in (("a", 1.0), ("b", 0.0))
    )

    def total(episode: Episode) -> float:
        return float(logps(model, episode.token_ids).detach() @ torch.tensor(episode.loss_mask[1:]).double())

    before = total(good), total(bad)
    train(model, [[[good, bad]]] * 8, tmp_path, learning_rate=3e-3, alpha_sdpo=0, beta_replay=0)
    assert total(good) > before[0]
    assert total(bad) < before[1]


def test_a_hint_alone_raises_the_token_that_the_teacher_prefers(tmp_path: Path) -> None:
    model, teacher = tiny_model(), tiny_model(seed=5)
    (group,) = make_groups(1, 1, rewards=(0.0,), sites=1)
    site: HintSite = group[0].hint_sites[0]
    hinted = (
        group[0].token_ids[: site.insert_at] + site.hint_ids + group[0].token_ids[site.insert_at : site.start]
    )
    preferred = int(teacher(input_ids=torch.tensor([hinted])).logits[0, -1].argmax())
    context = (*group[0].token_ids[: site.start], preferred)
    before = float(logps(model, context)[-1].detach())
    settings: dict[str, Any] = {
        "teacher": "frozen",
        "alpha_sdpo": 1.0,
        "learning_rate": 3e-3,
        "jsd_beta": 0.5,
    }
    teacher.eval().requires_grad_(False)
    record = train(model, [[group]] * 8, tmp_path, teacher_model=teacher, **settings)
    assert float(logps(model, context)[-1].detach()) > before + 0.05
    assert record.metrics[-1]["divergence_mean"] < record.metrics[0]["divergence_mean"]


def test_a_pair_alone_raises_the_margin_of_the_chosen_action(tmp_path: Path) -> None:
    groups = make_groups(2, 2, rewards=(0.0,), pairs=1)
    record = train(tiny_model(), [groups] * 8, tmp_path, learning_rate=3e-3, beta_replay=1.0)
    first, last = record.metrics[0], record.metrics[-1]
    assert first["dpo_margin_mean"] == pytest.approx(0.0, abs=1e-6)
    assert first["loss_dpo"] == pytest.approx(np.log(2), rel=1e-5)
    assert last["dpo_margin_mean"] > 0.1
    assert last["dpo_accuracy"] == 1.0
