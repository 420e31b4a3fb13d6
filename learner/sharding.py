"""Where the parameters of the trained model are: all in every process, or each process with its part of all (FSDP2).

A decoder layer is gathered whenever it runs, which PyTorch does. What lies outside of the layers (embedding, last
norm, head) is gathered once for each step, because the head is used outside of every module's forward pass, and on
some micro-batches by some processes only. Teacher and reference are parts like the student's, which take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any, Protocol

import torch
from accelerate import PartialState
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from hintloop.learner.models import Weights, holding
from hintloop.learner.packing import Packed
from hintloop.learner.tensors import MicroBatch

TIMEOUT = timedelta(minutes=30)
"""How long processes wait for each other, as Hugging Face's trainer has it."""


class Placement(Protocol):
    """What a trainer needs to know of where parameters are."""

    measures_channels: bool
    """Whether ``torch.autograd.grad`` gives the gradient of one loss."""

    def student(self) -> Weights | None:
        """Values to run the student with in place of its own parameters."""
        ...

    def side(self, weights: Weights | None) -> AbstractContextManager[Weights | None]:
        """Let the student run with ``weights``, None for its own, given the values that this yields; no gradient."""
        ...

    def add_up(self) -> None:
        """Complete the gradients of a step: the sum of those of all processes."""
        ...

    def parts(self, micro_batches: Sequence[MicroBatch], rank: int, ranks: int) -> Iterable[MicroBatch]:
        """The micro-batches of one of the processes."""
        ...


class Replicated:
    """Every process has the whole model."""

    measures_channels = True

    def __init__(self, model: Any) -> None:
        self._model = model

    def student(self) -> Weights | None:
        return None

    def side(self, weights: Weights | None) -> AbstractContextManager[Weights | None]:
        return nullcontext(weights)

    def add_up(self) -> None:
        for parameter in self._model.parameters():
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                torch.distributed.all_reduce(parameter.grad)

    def parts(self, micro_batches: Sequence[MicroBatch], rank: int, ranks: int) -> Iterable[MicroBatch]:
        return micro_batches[rank::ranks]


class Sharded:
    """Every process has its part of each parameter, and all run the same passes, for each needs the others' parts."""

    measures_channels = False

    def __init__(self, model: Any) -> None:
        """``model``: after ``shard``."""
        self._model = model
        inside = {id(p) for layer in _layers(model) for p in layer.parameters()}
        self._outside = [name for name, p in model.named_parameters() if id(p) not in inside]
        self._gathered: Weights = {}

    def student(self) -> Weights:
        if not self._gathered:
            self._gathered = {
                name: tensor.requires_grad_(self._model.get_parameter(name).requires_grad)
                for name, tensor in self._whole_outside().items()
            }
        return self._gathered

    @contextmanager
    def side(self, weights: Weights | None) -> Iterator[Weights]:
        if weights is None:
            yield self.student()
            return
        with holding(self._model, weights):
            yield self._whole_outside()

    def add_up(self) -> None:
        """Of what is outside of the layers; those have theirs from the backward passes."""
        for name, tensor in self._gathered.items():
            if tensor.requires_grad:
                parameter = self._model.get_parameter(name)
                gradient = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
                whole = DTensor.from_local(gradient, parameter.device_mesh, [Partial()], run_check=False)
                parameter.grad = whole.redistribute(placements=parameter.placements)
        self._gathered = {}

    def parts(self, micro_batches: Sequence[MicroBatch], rank: int, ranks: int) -> Iterable[MicroBatch]:
        for start in range(rank, len(micro_batches), ranks):
            yield _in_step(micro_batches[start], micro_batches[start - rank : start - rank + ranks])

    def _whole_outside(self) -> Weights:
        return {name: whole(self._model.get_parameter(name).detach()) for name in self._outside}


def placement(model: Any) -> Placement:
    """Where the parameters of a model are."""
    return Sharded(model) if is_sharded(model) else Replicated(model)


def shard(model: Any) -> None:
    """Leave each process its part of each parameter; to be called by all of them, which takes the first one's values.

    The other processes are those of the launcher, over the network that ``accelerate`` takes for them.
    ``ValueError`` for a model that does not tell its layers.
    """
    layers = _layers(model)
    if not layers:
        raise ValueError(f"{type(model).__name__} does not say what its layers are: it cannot be sharded")
    device = PartialState(timeout=TIMEOUT).device
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    outside = _shard_outside(model, {p for layer in layers for p in layer.parameters()}, mesh)
    for module in (*layers, model.base_model):
        fully_shard(module, mesh=mesh, reshard_after_forward=True, ignored_params=outside)
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)  # the losses are shares of the step's, so gradients add up
    model._is_distributed_loading_by_transformers = (
        True  # keeps Hugging Face's trainer from wrapping it again
    )


def is_sharded(model: Any) -> bool:
    """Whether ``shard`` has been here."""
    return any(isinstance(p, DTensor) for p in model.parameters())


def whole(tensor: Tensor) -> Tensor:
    """All of a sharded tensor, which all processes must ask for; any other as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gathered(state: Any, *, keep: bool) -> Any:
    """Tensors of nested dicts, whole and on the CPU; to be called by all processes, of which one may ``keep`` them."""

    def gather(tensor: Tensor) -> Tensor | None:
        found = whole(tensor)
        return found.cpu() if keep else None

    return map_tensors(gather, state)


def scattered(state: Any, model: Any) -> Any:
    """This process's parts of the tensors of nested dicts, as the first process has them; all must call this.

    The others give the ``outline`` of that. ``model`` is sharded in the same way.
    """
    mesh = next(model.parameters()).device_mesh

    def scatter(tensor: Tensor) -> Tensor:
        if not tensor.ndim:
            return tensor  # an optimizer's count of steps
        mine = torch.empty_like(tensor, device="cpu") if tensor.is_meta else tensor
        return distribute_tensor(mine.to(mesh.device_type), mesh, [Shard(0)])

    return map_tensors(scatter, state)


def outline(state: Any) -> Any:
    """Nested dicts without the values of their tensors but scalars."""
    return map_tensors(lambda tensor: tensor.to("meta") if tensor.ndim else tensor.cpu(), state)


def map_tensors(function: Callable[[Tensor], Any], state: Any) -> Any:
    """Nested dicts with another tensor in place of each."""
    if isinstance(state, Tensor):
        return function(state)
    if isinstance(state, dict):
        return {key: map_tensors(function, value) for key, value in state.items()}
    return state


def _layers(model: Any) -> list[Any]:
    kinds = set(model._no_split_modules or ())
    return [m for m in model.modules() if {base.__name__ for base in type(m).__mro__} & kinds]


def _shard_outside(model: Any, inside: set[Tensor], mesh: DeviceMesh) -> set[nn.Parameter]:
    """Shard the parameters that no layer has; a tied one stays tied."""
    sharded: dict[Tensor, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None or parameter in inside:
                continue
            if parameter not in sharded:
                part = distribute_tensor(parameter.detach().to(mesh.device_type), mesh, [Shard(0)])
                sharded[parameter] = nn.Parameter(part, requires_grad=parameter.requires_grad)
            setattr(module, name, sharded[parameter])
    return set(sharded.values())


def _in_step(own: MicroBatch, beside: Sequence[MicroBatch]) -> MicroBatch:
    """A micro-batch with a row of one token in each pass that only others have rows in."""
    passes: dict[str, Any] = {
        name: _ONE_TOKEN
        for name in ("student", "teacher", "reference")
        if not len(getattr(own, name)) and any(len(getattr(other, name)) for other in beside)
    }
    if "student" not in passes:
        return replace(own, **passes)
    nothing = torch.zeros(1, 1)
    return replace(own, **passes, trained=nothing.bool(), logprobs=nothing, advantages=torch.zeros(1))


_ONE_TOKEN = Packed(
    *(torch.zeros(1, 1, dtype=kind) for kind in (torch.int64, torch.int64, torch.int32, torch.int32))
)
