"""What TRL's trainer asks for and has no use of here: a loader, a reward function, generation settings."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from trl.trainer.grpo_config import GRPOConfig

from hintloop.learner.config import LearnerConfig


class Once:
    """An iterator in the shape of a data loader of unknown length."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator

    def __iter__(self) -> Iterator[Any]:
        return self._iterator


def recorded_reward(*_: Any, **__: Any) -> list[float | None]:
    """TRL asks for a reward function; the rewards are in the journal."""
    raise AssertionError("the learner generates nothing, so it grades nothing")


def trl_arguments(config: LearnerConfig, output_dir: Path) -> GRPOConfig:
    """No generation, no logging, no saving, no evaluation: these belong to others here.

    ``ValueError`` when several processes cannot share the micro-batches evenly.
    """
    processes = int(os.environ.get("WORLD_SIZE", "1"))  # as every launcher sets it
    if config.micro_batches % processes:
        raise ValueError(f"{processes} processes cannot share {config.micro_batches} micro-batches evenly")
    return GRPOConfig(
        output_dir=str(output_dir),
        max_steps=max(config.steps, 1),
        per_device_train_batch_size=2,  # with the next line the least that TRL accepts; the batches are ready
        num_generations=2,
        gradient_accumulation_steps=config.micro_batches // processes,
        max_grad_norm=config.max_grad_norm,
        loss_type=config.loss_type,
        epsilon=config.epsilon,
        epsilon_high=config.epsilon_high,
        temperature=config.sampling_temperature,
        beta=0.0,
        router_aux_loss_coef=0.0,
        disable_dropout=False,
        activation_checkpointing=config.activation_checkpointing,
        bf16=torch.cuda.is_available(),
        seed=config.seed,
        report_to=[],
        logging_strategy="no",
        save_strategy="no",
        eval_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
