"""What a simulated server does wrong, and how fast it is: a plan in TOML or JSON, or sent while it runs.

prompt_ms = 5
token_ms = 1
load_ms = 100

[[fault]]
kind = "drop"
skip = 10
times = 2
tokens = 5

[[fault]]
kind = "hang"
place = "resume"
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

Kind = Literal[
    "slow",
    "error",
    "drop",
    "hang",
    "mislabel",
    "restart",
    "corrupt",
    "refuse_load",
    "break_load",
    "stale_load",
]
WHERE: dict[Kind, str] = {
    "slow": "generate",
    "error": "generate",
    "drop": "generate",
    "hang": "generate",
    "mislabel": "generate",
    "restart": "generate",
    "corrupt": "fetch",
    "refuse_load": "load",
    "break_load": "load",
    "stale_load": "load",
}
"""What a fault strikes that names no place: a call, or in the worker the fetch or the load."""
Place = Literal[
    "generate",
    "abort_requests",
    "pause",
    "resume",
    "is_paused",
    "update_weight_version",
    "weight_info",
    "hintloop_fetch",
    "hintloop_status",
    "hintloop_load",
    "hintloop_suits",
    "hintloop_end_in",
    "hintloop_quit",
    "load_lora_adapter",
    "unload_lora_adapter",
    "get_world_size",
    "init_weight_transfer_engine",
    "shutdown_weight_transfer_engine",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
    "health",
    "models",
    "server_info",
]
"""A call: the last part of its route, or for ``/collective_rpc`` the method of the worker."""
ANYWHERE: tuple[Kind, ...] = ("slow", "error", "drop", "hang", "restart")
"""Kinds that may strike any call."""
NAMING: tuple[Place, ...] = (
    "generate",
    "weight_info",
    "models",
    "hintloop_fetch",
    "hintloop_status",
    "update_weight_version",
    "finish_weight_update",
)
"""Calls that ``mislabel`` may strike: they tell a version, or name the weights."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Fault(_Model):
    """One thing that goes wrong."""

    kind: Kind
    """``slow``: ``seconds`` late. ``error``: HTTP ``status``. ``drop``: the connection ends after ``tokens``.
    ``hang``: nothing more comes after ``tokens``. ``mislabel``: the answer names another version, or the weights get
    another name than was asked for. ``restart``: after ``tokens`` the process starts anew, with no weights, ``seconds``
    later. ``corrupt``: what was fetched is not what was published. ``refuse_load``: the load, of an adapter too, or the
    transfer fails before the model is touched. ``break_load``: it fails half-way. ``stale_load``: it claims success and
    keeps the old weights."""
    place: Place | None = None
    """The call that ``slow``, ``error``, ``drop``, ``hang``, ``restart`` or ``mislabel`` strikes, if it is another one
    than ``generate``. What is asked for is then done for ``slow``, ``mislabel``, and ``drop``, which loses the answer
    alone; for the others it is not."""
    skip: int = Field(default=0, ge=0)
    """Calls that pass before it strikes."""
    times: int = Field(default=1, ge=0)
    """Calls that it strikes; 0: all that follow."""
    seconds: float = Field(default=1.0, ge=0)
    status: int = Field(default=500, ge=400, le=599)
    tokens: int = Field(default=0, ge=0)

    @property
    def where(self) -> str:
        """What it strikes."""
        return self.place or WHERE[self.kind]

    @model_validator(mode="after")
    def _check_place(self) -> Self:
        places = NAMING if self.kind == "mislabel" else (WHERE[self.kind],)
        if self.kind not in ANYWHERE and self.where not in places:
            raise ValueError(f"{self.kind} strikes {', '.join(places)} alone, not {self.place}")
        if self.tokens and self.where != "generate":
            raise ValueError(f"{self.where} has no tokens after which {self.kind} could strike")
        return self


class Plan(_Model):
    """Speed and faults of a simulated server."""

    prompt_ms: float = Field(default=0.0, ge=0)
    """Until the first token."""
    token_ms: float = Field(default=0.0, ge=0)
    """For each further token."""
    fetch_ms: float = Field(default=0.0, ge=0)
    """Added to each fetch of weights."""
    load_ms: float = Field(default=0.0, ge=0)
    """For taking over fetched weights."""
    stop_after: int = Field(default=24, ge=1)
    """An answer ends by itself after about so many tokens."""
    stream_interval: int = Field(default=8, ge=1)
    """Tokens per piece of a streamed answer."""
    vocabulary: int = Field(default=1000, ge=1)
    """Token ids that there are, unless a version says it; an adapter does not."""
    max_requests: int = Field(default=256, ge=1)
    """Answered at the same time; more have to wait."""
    max_model_len: int = Field(default=32768, ge=2)
    """Tokens of prompt and answer together."""
    fault: tuple[Fault, ...] = ()


class Faults:
    """Which fault strikes which call: of those whose turn has come, the first one."""

    def __init__(self, faults: Sequence[Fault] = ()) -> None:
        self._left: list[list[Any]] = []
        self.add(faults)

    def add(self, faults: Sequence[Fault]) -> None:
        """Plan more; their ``skip`` counts from now on."""
        self._left += [[fault, fault.skip, fault.times or -1] for fault in faults]

    def strike(self, where: str) -> Fault | None:
        """The fault of a call that happens now, if there is one."""
        struck: Fault | None = None
        for entry in list(self._left):
            fault, skip, times = entry
            if fault.where != where:
                continue
            if skip > 0:
                entry[1] -= 1
            elif struck is None:
                struck = fault
                entry[2] -= 1
                if times == 1:  # in place: another thread may be planning more
                    self._left.remove(entry)
        return struck

    def left(self) -> list[dict[str, Any]]:
        """What is still to come, as JSON data."""
        return [
            {**fault.model_dump(), "skip": skip, "times": max(0, times)} for fault, skip, times in self._left
        ]


def load_plan(path: Path) -> Plan:
    """Read a ``.toml`` or ``.json`` file. ``ValueError`` when it is no plan, ``OSError``."""
    text = path.read_text(encoding="utf-8")
    try:
        return Plan.model_validate(json.loads(text) if path.suffix == ".json" else tomllib.loads(text))
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not a plan: {error}") from error
