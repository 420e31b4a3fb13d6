"""Each policy loss on offer, in packed rows and several micro-batches, is TRL's own on plain padded sequences."""

from __future__ import annotations

import statistics
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from accelerate import Accelerator
from trl import GRPOConfig, GRPOTrainer

from hintloop.learner.config import LearnerConfig
from hintloop.replay.episode import Episode

from .factory import make_groups, tiny_model
from .training import LOSS_TYPES, train


def trl_loss(model: Any, groups: list[list[Episode]], arguments: GRPOConfig) -> torch.Tensor:
    """TRL's loss of whole episodes, one row each, with log-probabilities from full logits."""
    episodes = [episode for group in groups for episode in group]
    width = max(len(e.token_ids) for e in episodes)

    def padded(rows: list[tuple[Any, ...]], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], dtype=dtype)

    ids, mask = (
        padded([e.token_ids for e in episodes], torch.long),
        padded([e.loss_mask for e in episodes], torch.long),
    )
    attention = padded([(1,) * len(e.token_ids) for e in episodes], torch.long)
    every = model(input_ids=ids, attention_mask=attention).logits[:, :-1].double() / arguments.temperature
    every = every.log_softmax(-1)
    logps = every.gather(-1, ids[:, 1:, None])[..., 0]
    trainer = SimpleNamespace(
        args=arguments,
        loss_type=arguments.loss_type,
        epsilon_low=arguments.epsilon,
        epsilon_high=arguments.epsilon_high,
        beta=0.0,
        importance_sampling_level=arguments.importance_sampling_level,
        max_completion_length=arguments.max_completion_length,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        aux_loss_enabled=False,
        current_gradient_accumulation_steps=1,
        model=SimpleNamespace(training=True),
        accelerator=Accelerator(cpu=True),
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        _entropy_bonus_enabled=False,
        _get_per_token_logps_and_entropies=lambda *_, **__: (logps, -(every.exp() * every).sum(-1), None),
        _metrics={"train": defaultdict(list)},
    )
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": attention[:, :1],
        "completion_ids": ids[:, 1:],
        "completion_mask": mask[:, 1:],
        "advantages": torch.tensor([a for group in groups for a in advantages(group)], dtype=torch.float64),
        "old_per_token_logps": padded([e.logprobs for e in episodes], torch.float64)[:, 1:],
        "num_items_in_batch": mask[:, 1:].sum(),
    }
    loss: torch.Tensor = GRPOTrainer._compute_loss(trainer, None, inputs)
    return loss


def advantages(group: list[Episode]) -> list[float]:
    """Of a group whose members are all graded."""
    rewards = [float(e.reward or 0.0) for e in group]
    return [(r - statistics.mean(rewards)) / (statistics.stdev(rewards) + 1e-4) for r in rewards]


def test_every_policy_loss_on_offer_is_compared() -> None:
    assert set(LOSS_TYPES) == set(get_args(LearnerConfig.model_fields["loss_type"].annotation))


@pytest.mark.parametrize(("loss_type", "temperature"), [*((name, 1.0) for name in LOSS_TYPES), ("dapo", 0.8)])
def test_value_and_gradient_are_those_of_trl(loss_type: str, temperature: float, tmp_path: Path) -> None:
    groups = [
        *make_groups(2, 3, rewards=(1.0, 0.0, 0.5), logprob=-3.7),
        *make_groups(1, 2, seed=1, rewards=(1.0,), logprob=-3.7),  # its advantages are 0, but it counts
    ]
    settings: dict[str, Any] = {"loss_type": loss_type, "epsilon": 0.15, "epsilon_high": 0.3}
    if loss_type == "cispo":
        settings["epsilon_high"] = 1.2
    record = train(
        tiny_model(),
        [groups],
        tmp_path,
        alpha_sdpo=0,
        beta_replay=0,
        micro_batches=3,
        sampling_temperature=temperature,
        **settings,
    )
    arguments = GRPOConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=2,
        num_generations=2,
        activation_checkpointing=False,
        bf16=False,
        report_to=[],
        temperature=temperature,
        **settings,
    )
    model = tiny_model()
    loss = trl_loss(model, groups, arguments)
    loss.backward()
    expected = torch.cat([p.grad.flatten().double() for p in model.parameters()])
    assert 0.0 < record.metrics[0]["clip_fraction_low"] + record.metrics[0]["clip_fraction_high"] < 1.0
    tolerance = 1e-5 if loss_type == "vespo" else 1e-6  # vespo exponentiates sums of fp32 log-ratios
    assert record.metrics[0]["loss_grpo"] == pytest.approx(loss.item(), rel=tolerance, abs=tolerance)
    assert expected.norm() > 1e-3
    assert (record.gradients[0] - expected).norm() < 1e-5 * expected.norm()
