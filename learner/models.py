"""The models of a run, apart from what trains them: loading, the weights that are only read, optimizer, probe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from hintloop.learner.config import LearnerConfig
from hintloop.learner.lora import add_lora
from hintloop.learner.losses.head import Head

ADAM_BETAS = (0.9, 0.95)
PROBE_TOKENS = 16

Weights = dict[str, Tensor]
"""Values for the trained parameters of a model, by name; the others are the model's own."""


@dataclass(frozen=True, slots=True)
class SideWeights:
    """Weights that are only read: the hinted teacher's and the DPO reference's. None where nothing needs any."""

    teacher: Weights | None = None
    """None for the student itself, too."""
    reference: Weights | None = None

    @staticmethod
    def of(start: Any, config: LearnerConfig) -> SideWeights:
        """Copies of the start model's trained parameters, as few as needed."""
        hints, pairs = config.alpha_sdpo > 0 and config.teacher != "live", config.beta_replay > 0
        still = config.teacher in ("frozen", "trust_region")
        reference = trained_weights(start) if pairs or (hints and still) else None
        teacher = reference if still else trained_weights(start)
        return SideWeights(teacher if hints else None, reference if pairs else None)


def load_model(folder: Path, config: LearnerConfig | None = None) -> Any:
    """A causal language model in fp32 from a local folder of safetensors, with adapters if ``config`` wants them."""
    with no_progress_bar():
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, use_safetensors=True
        )
    return add_lora(model, config) if config and config.lora_rank else model


def trained_weights(model: Any) -> Weights:
    """A copy of the parameters that are trained."""
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def make_optimizer(model: Any, config: LearnerConfig) -> tuple[torch.optim.Optimizer, Any]:
    """AdamW without weight decay; its step size rises linearly over the warm-up and stays."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=config.learning_rate, betas=ADAM_BETAS, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / max(config.warmup_steps, 1))
    )
    return optimizer, scheduler


def backbone_states(model: Any, weights: Mapping[str, Tensor] | None = None, **inputs: Any) -> Tensor:
    """(B, W, H) states behind the final norm, of the model or of the same model with other weights."""
    backbone = model.base_model
    if weights is None:
        output = backbone(**inputs, use_cache=False)
    else:
        prefix = model.base_model_prefix + "."
        inner = {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}
        output = functional_call(backbone, inner, (), {**inputs, "use_cache": False})
    states: Tensor = output.last_hidden_state
    return states


def probe(model: Any) -> dict[str, list[float]]:
    """Fixed token ids, and the log-probability of each but the first given those before it, in nats.

    An engine that was given the weights must find the same numbers.
    """
    ids = [7 * i % min(256, model.config.get_text_config().vocab_size) for i in range(PROBE_TOKENS)]
    tokens = torch.tensor([ids], device=model.device)
    with reading(model):
        hidden = backbone_states(model, input_ids=tokens)[0, :-1]
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
def holding(model: Any, weights: Mapping[str, Tensor] | None) -> Iterator[None]:
    """Let a model hold other weights for a while; None leaves it as it is."""
    before = trained_weights(model) if weights is not None else {}
    hold(model, weights or {})
    try:
        yield
    finally:
        hold(model, before)


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


@torch.no_grad()
def hold(model: Any, weights: Mapping[str, Tensor]) -> None:
    """Copy weights into a model."""
    for name, value in weights.items():
        model.get_parameter(name).copy_(value)
