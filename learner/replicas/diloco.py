"""DiLoCo with torchft: inner steps of each replica alone, and an outer step on the average of what they moved."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

MISSING = "replicas need torchft; pip install 'hintloop[replicas]'"


class Fragment(Protocol):
    """Parameters that are averaged together; any ``nn.Module`` is one."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Names and parameters."""
        ...


class ParameterGroup:
    """Some of a model's parameters, under the names that they have there."""

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        self._parameters = parameters

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Names and parameters."""
        return iter(self._parameters.items())


def split_parameters(model: nn.Module, count: int) -> list[ParameterGroup]:
    """The trained parameters in ``count`` groups of neighbours, as equal in size as neighbours allow.

    ``ValueError`` when there are fewer parameters than groups.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not 1 <= count <= len(named):
        raise ValueError(f"{len(named)} parameters cannot make {count} fragments")
    total, done = sum(p.numel() for _, p in named), 0
    groups: list[dict[str, nn.Parameter]] = [{}]
    for left, (name, parameter) in zip(range(len(named), 0, -1), named, strict=True):
        wanted = count - len(groups)
        full = done * count >= len(groups) * total
        if groups[-1] and wanted and (full or left == wanted):
            groups.append({})
        groups[-1][name] = parameter
        done += parameter.numel()
    return [ParameterGroup(group) for group in groups]


def make_diloco_outer_loop(
    manager: Any,
    model_fragments: Sequence[Fragment],
    inner_optimizer: torch.optim.Optimizer,
    *,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    nesterov: bool = True,
    sync_every: int = 100,
    fragment_sync_delay: int = 0,
    fragment_update_alpha: float = 0.0,
) -> Any:
    """torchft's ``DiLoCo``, a context manager that averages while ``inner_optimizer`` steps within it.

    ``manager`` is a ``torchft.Manager`` with ``use_async_quorum=False``, such as ``live.ReplicaManager``, or a
    ``StoreManager``. Each fragment is averaged every ``sync_every`` inner steps, one after another, each
    ``sync_every / fragments`` steps after the one before. The average is sent ``fragment_sync_delay`` steps before
    it is waited for, and ``fragment_update_alpha`` of the local parameters is mixed into the result.
    Tensors travel one by one: torchft's buckets can lose some of them without a word. ``ValueError`` when they are
    switched on in the environment, when fragments share a parameter, and for schedules that torchft refuses.
    """
    try:
        from torchft.local_sgd import USE_BUCKETIZATION_ENV, DiLoCo
    except ImportError as error:
        raise ValueError(MISSING) from error
    if os.environ.get(USE_BUCKETIZATION_ENV) == "True":
        raise ValueError(f"unset {USE_BUCKETIZATION_ENV}: torchft's buckets lose tensors without a word")
    parameters = [[p for _, p in fragment.named_parameters()] for fragment in model_fragments]
    _require_disjoint(parameters)
    outer = [
        torch.optim.SGD(each, lr=outer_lr, momentum=outer_momentum, nesterov=nesterov) for each in parameters
    ]
    return DiLoCo(
        manager,
        list(model_fragments),
        inner_optimizer,
        outer,
        sync_every=sync_every,
        use_bucketization=False,
        fragment_sync_delay=fragment_sync_delay,
        fragment_update_alpha=fragment_update_alpha,
    )


def _require_disjoint(fragments: Sequence[Sequence[Tensor]]) -> None:
    every = [id(parameter) for fragment in fragments for parameter in fragment]
    if len(set(every)) < len(every):
        raise ValueError("a parameter is in two fragments and would be averaged twice; see split_parameters")


class OuterLoop:
    """What the learner needs to know of a running ``DiLoCo``, and of its state."""

    def __init__(self, loop: Any) -> None:
        self._loop = loop

    @property
    def local_step(self) -> int:
        """Inner steps since the newest average was settled."""
        return int(self._loop._local_step)

    def global_parameters(self) -> dict[str, Tensor]:
        """What all replicas have in common."""
        return {
            name: value
            for fragment in self._loop._fragments
            for name, value in fragment.original_parameters.items()
        }

    def state(self) -> list[dict[str, Any]]:
        """Of each fragment: the common parameters, and the outer optimizer."""
        return [
            {"parameters": dict(f.original_parameters), "optimizer": f._outer_optimizer.state_dict()}
            for f in self._loop._fragments
        ]

    def load(self, state: list[dict[str, Any]]) -> None:
        """The inverse of ``state``."""
        for fragment, saved in zip(self._loop._fragments, state, strict=True):
            for name, value in saved["parameters"].items():
                fragment.original_parameters[name].copy_(value)
            fragment._outer_optimizer.load_state_dict(saved["optimizer"])

    def __enter__(self) -> OuterLoop:
        self._loop.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._loop.__exit__(*error)
