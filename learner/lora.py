"""Low-rank adapters: what is trained instead of the weights, and the plain model that both make together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from hintloop.learner.config import LearnerConfig

ADAPTER = "default"


def add_lora(model: Any, config: LearnerConfig) -> Any:
    """Put adapters of rank ``config.lora_rank`` into all linear layers but the head; only they are trained.

    The new adapters change nothing yet: one factor is zero, the other is drawn from ``config.seed``. The model stays
    of its own class. ``ModuleNotFoundError`` without the package ``peft``. Source: Hu et al., arXiv:2106.09685.
    """
    from peft import LoraConfig, inject_adapter_in_model

    settings = LoraConfig(
        r=config.lora_rank, lora_alpha=config.lora_alpha, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    with torch.random.fork_rng():
        torch.manual_seed(config.seed)
        return inject_adapter_in_model(settings, model, adapter_name=ADAPTER)


def plain_tensors(model: Any) -> dict[str, Tensor]:
    """The tensors of the model as if it had been trained without adapters, by the names it has without them.

    A weight that is tied to another appears once.
    """
    named = {**dict(model.named_parameters()), **_persistent_buffers(model)}
    adapted = {name for name, module in model.named_modules() if hasattr(module, "get_delta_weight")}
    plain: dict[str, Tensor] = {}
    for name, tensor in named.items():
        if ".base_layer." in name:
            layer, _, rest = name.rpartition(".base_layer.")
            delta = model.get_submodule(layer).get_delta_weight(ADAPTER) if rest == "weight" else 0.0
            plain[f"{layer}.{rest}"] = tensor.detach() + delta
        elif not any(name.startswith(f"{layer}.") for layer in adapted):
            plain[name] = tensor.detach()
    return plain


def save_adapter(model: Any, folder: Path) -> None:
    """Write the adapters alone, as PEFT does: ``adapter_config.json`` and ``adapter_model.safetensors``."""
    layers = {name: layer for name, layer in model.named_modules() if hasattr(layer, "get_delta_weight")}
    any_layer: Any = next(iter(layers.values()))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": any_layer.r[ADAPTER],
        "lora_alpha": any_layer.lora_alpha[ADAPTER],
        "target_modules": sorted({name.rpartition(".")[2] for name in layers}),
    }
    tensors = {
        f"base_model.model.{name}.{factor}.weight": getattr(layer, factor)[ADAPTER]
        .weight.detach()
        .contiguous()
        for name, layer in layers.items()
        for factor in ("lora_A", "lora_B")
    }
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1))
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def _persistent_buffers(model: Any) -> dict[str, Tensor]:
    saved = model.state_dict()
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}
