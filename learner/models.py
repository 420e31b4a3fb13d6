"""The models of a run, apart from what trains them: loading, side models, optimizer, probe."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from hintloop.learner.config import LearnerConfig
from hintloop.learner.losses.head import Head

ADAM_BETAS = (0.9, 0.95)
PROBE_TOKENS = 16


@dataclass(frozen=True, slots=True)
class SideModels:
    """Models that only read: the hinted teacher and the DPO reference. None where nothing needs one."""

    teacher: Any | None = None
    reference: Any | None = None

    @staticmethod
    def of(start: Any, config: LearnerConfig) -> SideModels:
        """Frozen copies of the start model, as few as needed; ``live`` needs no teacher of its own."""
        hints, pairs = config.alpha_sdpo > 0 and config.teacher != "live", config.beta_replay > 0
        reference = _frozen_copy(start) if pairs or (hints and config.teacher == "frozen") else None
        teacher = reference if config.teacher == "frozen" else _frozen_copy(start)
        return SideModels(teacher if hints else None, reference if pairs else None)


def load_model(folder: Path) -> Any:
    """A causal language model in fp32 from a local folder of safetensors."""
    with no_progress_bar():
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, use_safetensors=True
        )


def make_optimizer(model: Any, config: LearnerConfig) -> tuple[torch.optim.Optimizer, Any]:
    """AdamW without weight decay; its step size rises linearly over the warm-up and stays."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=config.learning_rate, betas=ADAM_BETAS, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / max(config.warmup_steps, 1))
    )
    return optimizer, scheduler


def probe(model: Any) -> dict[str, list[float]]:
    """Fixed token ids, and the log-probability of each but the first given those before it, in nats.

    An engine that was given the weights must find the same numbers.
    """
    ids = [7 * i % min(256, model.config.get_text_config().vocab_size) for i in range(PROBE_TOKENS)]
    tokens = torch.tensor([ids], device=model.device)
    with reading(model):
        hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state[0, :-1]
        logprobs, _ = Head.of(model).logprobs(hidden, tokens[0, 1:])
    return {"token_ids": [float(i) for i in ids], "logprobs": logprobs.tolist()}


@contextmanager
def reading(model: Any) -> Iterator[None]:
    """Run a model without gradient or dropout."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """A bar per published version would flood the terminal."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _frozen_copy(model: Any) -> Any:
    frozen = copy.deepcopy(model).eval()
    frozen.requires_grad_(False)
    return frozen
