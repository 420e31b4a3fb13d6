"""What can be chosen about the three channels: teachers, off-policy corrections, adapters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from hintloop.learner import checkpoint as checkpoints
from hintloop.learner.config import LearnerConfig
from hintloop.learner.lora import plain_tensors
from hintloop.learner.losses.corrections import Correction
from hintloop.learner.losses.divergence import generalized_jsd
from hintloop.learner.losses.sdpo import trust_region_logits
from hintloop.learner.models import load_model
from hintloop.learner.run import run_learner
from hintloop.replay.episode import Episode
from hintloop.replay.journal import Journal
from hintloop.replay.weights import WeightStore

from .factory import make_groups, save_student, tiny_model
from .training import logps, train


def test_a_trust_region_teacher_has_a_share_of_the_student_in_its_logits(tmp_path: Path) -> None:
    (group,) = make_groups(1, 2, rewards=(0.0,), sites=2)
    start, model = tiny_model(seed=5), tiny_model()
    settings: dict[str, Any] = {"teacher": "trust_region", "teacher_rate": 0.3, "jsd_beta": 0.0}
    record = train(model, [[group]], tmp_path, teacher_model=start, alpha_sdpo=1.0, **settings)
    student, total, count = tiny_model(), torch.zeros(()), 0
    for ids, site in [(episode.token_ids, site) for episode in group for site in episode.hint_sites]:
        hinted = torch.tensor([ids[: site.insert_at] + site.hint_ids + ids[site.insert_at : site.end]])
        size = site.end - site.start
        plain = student(input_ids=torch.tensor([ids])).logits[0, site.start - 1 : site.end - 1]
        both = [m(input_ids=hinted).logits[0, -size - 1 : -1] for m in (start, student)]
        total = total + generalized_jsd(plain, trust_region_logits(*both, 0.3), beta=0.0).sum()
        count += size
    (total / count).backward()
    expected = torch.cat([p.grad.flatten().double() for p in student.parameters()])
    assert record.metrics[0]["loss_sdpo"] == pytest.approx(float(total.detach() / count), rel=1e-4)
    assert (record.gradients[0] - expected).norm() < 1e-4 * expected.norm()


def test_the_corrections_on_offer_are_those_that_exist() -> None:
    assert set(get_args(LearnerConfig.model_fields["correction"].annotation)) == set(get_args(Correction))


def corrected_gradient(groups: list[list[Episode]], weight_of: Any, keep_ratio: bool) -> torch.Tensor:
    """Of the mean over all tokens of ``-weight * ratio * advantage``, by hand, for rewards 1 and 0."""
    model, total, tokens = tiny_model(), torch.zeros((), dtype=torch.float64), 0
    for group in groups:
        for episode, sign in zip(group, (1.0, -1.0), strict=True):
            advantage = sign * 0.5 / (np.sqrt(0.5) + 1e-4)
            mask = torch.tensor(episode.loss_mask[1:], dtype=torch.bool)
            ours = logps(model, episode.token_ids)[mask]
            theirs = torch.tensor(episode.logprobs[1:]).double()[mask]
            weights = weight_of((ours - theirs).detach(), advantage)
            old = theirs if keep_ratio else ours.detach()
            total = total - (weights * (ours - old).exp() * advantage).sum()
            tokens += int(mask.sum())
    (total / tokens).backward()
    return torch.cat([p.grad.flatten().double() for p in model.parameters()])


@pytest.mark.parametrize(
    ("kind", "keep_ratio", "weight_of"),
    [
        ("tis", False, lambda gap, _: gap.exp().clamp(max=2.0)),
        ("icepop", False, lambda gap, _: gap.exp().where((gap.exp() >= 0.5) & (gap.exp() <= 5.0), 0.0)),
        (
            "sequence_mask",
            True,
            lambda gap, a: torch.zeros_like(gap) if a < 0 and -gap.mean() > 0.05 else 1.0,
        ),
    ],
)
def test_a_correction_weighs_each_token_of_the_policy_loss(
    kind: str, keep_ratio: bool, weight_of: Any, tmp_path: Path
) -> None:
    groups = make_groups(3, 2, logprob=-3.7)
    settings: dict[str, Any] = {"alpha_sdpo": 0, "beta_replay": 0, "epsilon": 1e9, "epsilon_high": 1e9}
    settings |= {"correction": kind, "correction_delta": 0.05, "micro_batches": 2}
    record = train(tiny_model(), [groups], tmp_path, **settings)
    expected = corrected_gradient(groups, weight_of, keep_ratio)
    plain = train(tiny_model(), [groups], tmp_path, **(settings | {"correction": "none"})).gradients[0]
    assert (record.gradients[0] - expected).norm() < 1e-5 * expected.norm()
    assert (record.gradients[0] - plain).norm() > 1e-3 * expected.norm()
    assert 0.0 <= record.metrics[0]["correction_dropped"] < 1.0


def test_a_correction_weighs_each_token_of_a_hint_site_whose_sampler_is_known(tmp_path: Path) -> None:
    (group,) = make_groups(1, 2, rewards=(0.0,), sites=2, logprob=-3.7)
    foreign = replace(group[1], policy_versions=(-1,) * len(group[1].token_ids))
    settings: dict[str, Any] = {"alpha_sdpo": 1.0, "teacher": "frozen", "beta_replay": 0, "jsd_beta": 1.0}
    record = train(
        tiny_model(), [[[group[0], foreign]]], tmp_path, correction="tis", correction_cap=1.1, **settings
    )
    model, total, count, ratios = tiny_model(), torch.zeros(()), 0, []
    for episode in (group[0], foreign):
        for site in episode.hint_sites:
            ids, size = episode.token_ids, site.end - site.start
            hinted = torch.tensor([ids[: site.insert_at] + site.hint_ids + ids[site.insert_at : site.end]])
            student = model(input_ids=torch.tensor([ids])).logits[0, site.start - 1 : site.end - 1]
            teacher = tiny_model()(input_ids=hinted).logits[0, -size - 1 : -1]
            gap = logps(model, ids)[site.start - 1 : site.end - 1].detach()
            ratio = (gap - torch.tensor(episode.logprobs[site.start : site.end])).exp().clamp(max=1.1)
            ratios += ratio.tolist()
            weights = ratio.float() if episode is not foreign else torch.ones(size)
            total, count = total + (weights * generalized_jsd(student, teacher, beta=1.0)).sum(), count + size
    (total / count).backward()
    expected = torch.cat([p.grad.flatten().double() for p in model.parameters()])
    assert min(ratios) < 1.0 < max(ratios)
    assert record.metrics[0]["loss_sdpo"] == pytest.approx(float(total.detach() / count), rel=1e-4)
    assert (record.gradients[0] - expected).norm() < 1e-4 * expected.norm()


def test_settings_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(ValidationError, match="vespo"):
        LearnerConfig(correction="tis", loss_type="vespo")
    with pytest.raises(ValidationError, match="correction_low"):
        LearnerConfig(correction_low=2.0, correction_high=1.0)


# Adapters

ADAPTERS: dict[str, Any] = {"lora_rank": 4, "learning_rate": 1e-2, "groups_per_step": 2, "micro_batches": 2}


def learn(folder: Path, steps: int, **changes: Any) -> dict[str, torch.Tensor]:
    """Train adapters on the journal in ``folder``; the last published weights."""
    config = LearnerConfig(steps=steps, max_staleness=None, **(ADAPTERS | changes))
    run_learner(
        folder / "student",
        str(folder / "journal"),
        str(folder / "run-weights"),
        folder / "run",
        config,
        follow=False,
    )
    store = WeightStore(folder / "run-weights")
    latest = store.latest()
    assert latest is not None
    return load_file(store.fetch(latest.version, folder / "cache") / "model.safetensors")


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    save_student(tmp_path / "student")
    writer = Journal(tmp_path / "journal").writer("w")
    for group in make_groups(8, 2, sites=1, pairs=1):
        writer.append(group)
    return tmp_path


def test_only_adapters_are_trained_and_a_whole_model_is_published(recorded: Path) -> None:
    published = learn(recorded, steps=3)
    start = load_file(recorded / "student" / "model.safetensors")
    assert published.keys() == start.keys()
    changed = {name for name in start if not start[name].equal(published[name])}
    assert changed
    assert all("_proj" in name for name in changed)
    newest = checkpoints.newest(recorded / "run" / "checkpoints")
    assert newest is not None
    held = newest.load(recorded / "student", LearnerConfig(**ADAPTERS))
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    torch.testing.assert_close(held(ids).logits, load_model(newest.model)(ids).logits, atol=1e-5, rtol=0)
    assert {name for name, p in held.named_parameters() if p.requires_grad} == {
        name for name, _ in held.named_parameters() if "lora_" in name
    }


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # peft still asks for it
@pytest.mark.parametrize("average_last", [False, True])
def test_a_published_adapter_on_the_start_model_is_the_published_model(
    recorded: Path, average_last: bool
) -> None:
    from peft import PeftModel

    learn(recorded, steps=2, average_last=average_last)
    store, ids = WeightStore(recorded / "run-weights"), torch.tensor([[5, 6, 7, 8, 9]])
    for version in store.versions():  # of the first one, the adapter changes nothing
        folder = store.fetch(version, recorded / "cache")
        with torch.no_grad():
            adapted = PeftModel.from_pretrained(load_model(recorded / "student"), folder / "adapter")
            torch.testing.assert_close(adapted(ids).logits, load_model(folder)(ids).logits, atol=1e-5, rtol=0)
    assert len(store.versions()) >= 2


def test_new_adapters_change_nothing(tmp_path: Path) -> None:
    folder = save_student(tmp_path / "student")
    plain, adapted = load_model(folder), load_model(folder, LearnerConfig(lora_rank=2))
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    assert adapted(ids).logits.equal(plain(ids).logits)
    found, expected = plain_tensors(adapted), plain_tensors(plain)
    assert found.keys() == expected.keys()
    assert all(found[name].equal(tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("average_last", [False, True])
def test_training_of_adapters_resumes_exactly(recorded: Path, average_last: bool, tmp_path: Path) -> None:
    whole = learn(recorded, steps=4, average_last=average_last)
    other = tmp_path / "other"
    save_student(other / "student")
    (other / "journal").symlink_to(recorded / "journal")
    learn(other, steps=2, average_last=False)
    again = learn(other, steps=4, average_last=average_last)
    assert all(again[name].equal(tensor) for name, tensor in whole.items())
