"""Runs the trainer on given groups and keeps what it did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from hintloop.learner.batch import BatchRules, build_step
from hintloop.learner.config import LearnerConfig
from hintloop.learner.models import SideWeights, make_optimizer
from hintloop.learner.sharding import whole
from hintloop.learner.trainer import ThreeChannelTrainer
from hintloop.replay.episode import Episode

from .factory import VOCABULARY, tiny_tokenizer

LOSS_TYPES = ("dapo", "grpo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo")


class Record(TrainerCallback):
    """Keeps each step's gradient and metrics."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.gradients: list[torch.Tensor] = []
        self.metrics: list[dict[str, float]] = []

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        parameters = self.trainer.model.parameters()
        self.gradients.append(
            torch.cat(
                [
                    whole(torch.zeros_like(p) if p.grad is None else p.grad).flatten().double()
                    for p in parameters
                ]
            )
        )

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.metrics.append(self.trainer.step_metrics())


def train(
    model: Any,
    steps: Sequence[list[list[Episode]]],
    folder: Path,
    *,
    teacher_model: Any = None,
    reference_model: Any = None,
    **settings: Any,
) -> Record:
    """Train on the given groups, one list of groups per step."""
    settings = {"warmup_steps": 0, "max_grad_norm": 1e9, "micro_batches": 1, **settings}
    config = LearnerConfig(steps=len(steps), **settings)
    rules = BatchRules(
        vocabulary=VOCABULARY,
        micro_batches=config.micro_batches,
        max_sites=64 if config.alpha_sdpo else 0,
        max_pairs=64 if config.beta_replay else 0,
    )
    record = Record()
    given = {"teacher": teacher_model, "reference": reference_model}
    others = {name: dict(other.named_parameters()) for name, other in given.items() if other}
    record.trainer = ThreeChannelTrainer(
        model,
        tiny_tokenizer(),
        config,
        (build_step(groups, rules, version=0, seed=(0, i)) for i, groups in enumerate(steps)),
        side=replace(SideWeights.of(model, config), **others),
        optimizer=make_optimizer(model, config),
        output_dir=folder,
        callbacks=[record],
    )
    record.trainer.train()
    return record


def logps(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """Log-probability of each token but the first."""
    tokens = torch.tensor([list(ids)])
    every = torch.log_softmax(model(input_ids=tokens).logits[0, :-1].double(), -1)
    return every.gather(1, tokens[0, 1:, None])[:, 0]
