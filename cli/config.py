"""The one config of a run: each part's own section, and the layers that make up its values.

Defaults, then a preset, then a file, then single assignments; later layers win. A few keys of two parts must
say the same (``TWINS``): setting one sets the other.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from hintloop.cli import toml
from hintloop.cli.errors import UserError
from hintloop.learner.config import LearnerConfig
from hintloop.learner.replicas.config import ReplicasConfig
from hintloop.rollout.config import EvaluationConfig, RolloutConfig, TeachersConfig, TeacherSpec

TWINS = (
    ("run.seed", "learner.seed"),
    ("rollout.groups_per_step", "learner.groups_per_step"),
    ("rollout.temperature", "learner.sampling_temperature"),
)
"""Keys that belong to two parts and must be equal."""
DEFAULT_PRESET = "laptop"
EXPERT = "expert"
"""Name of the scripted expert among the teachers, and its model's."""
EXPERT_TASKS = "bugfix"
"""The task set that it knows."""

Layer = dict[str, dict[str, Any]]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RunSection(_Section):
    """What the run is called and where its files go."""

    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run folder; None: the preset and the date."""
    output: Path = Path("runs")
    """Folder of run folders."""
    seed: int = 0
    """Decides tasks, sampling and what the evaluation asks."""


class StudentSection(_Section):
    """The model that is trained."""

    model: str = "student-tiny"
    """``student-tiny`` (bundled), a model folder, or a name on the hub."""
    renderer: str | None = None
    """Family of its chat template, as ``renderers`` calls it; None: what its folder or name says."""
    prompt: Literal["auto", "one_line", "schemas"] = "auto"
    """How it is told of its tools: in one line, by JSON schemas, or as its folder says (else schemas)."""


class EnvSection(_Section):
    """The environment server."""

    tasks: str = "bugfix"
    """Where tasks come from: a set that ``hintloop tasks list`` names, a folder of tasks, or a Python file."""
    sandbox: Literal["local", "docker", "docker+gvisor"] = "local"
    """What the agent's programs run in; ``hintloop doctor`` says what works here."""
    host: str = "127.0.0.1"
    """Address to listen on. There is no authentication: keep to loopback or a private network."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    max_sessions: int = Field(default=64, ge=1)
    """Episodes that the server plays at the same time at most."""
    servers: tuple[str, ...] = ()
    """URLs of environment servers that are there already, such as ``ws://host:8000``; all must have the tasks. An
    episode goes to the least loaded one; one that dies is left out until it is back. None: ``play`` starts one."""

    @field_validator("servers")
    @classmethod
    def _are_urls(cls, servers: tuple[str, ...]) -> tuple[str, ...]:
        for url in servers:
            if not url.startswith(("ws://", "wss://", "http://", "https://")):
                raise ValueError(f"{url!r} is no URL such as ws://127.0.0.1:8000")
        return servers

    @field_validator("tasks")
    @classmethod
    def _absolute(cls, tasks: str) -> str:
        """A path means the same in every process and in a run that goes on from elsewhere."""
        is_path = "/" in tasks or tasks.endswith(".py")
        return str(Path(tasks).expanduser().absolute()) if is_path else tasks


class TeachersSection(TeachersConfig):
    """Teachers, and whether the bundled scripted expert is one of them."""

    scripted: bool = False
    """Serve the scripted expert of the task set on loopback, and ask it like any other teacher."""

    def with_expert(self, url: str | None) -> TeachersConfig:
        """All teachers; ``url`` is the root of the scripted expert's server, if it is one of them."""
        settings = {name: getattr(self, name) for name in TeachersConfig.model_fields}
        if self.scripted:
            expert = TeacherSpec(
                name=EXPERT, base_url=f"{url}/v1", model=EXPERT, usd_per_mtok_in=0, usd_per_mtok_out=0
            )
            settings["teachers"] = (*self.teachers, expert)
        return TeachersConfig(**settings)

    @model_validator(mode="after")
    def _can_agree(self) -> TeachersSection:
        count = len(self.teachers) + self.scripted
        if count and self.agree > count:
            raise ValueError(f"agree is {self.agree}, but there are {count} teachers")
        names = {spec.name for spec in self.teachers} | ({EXPERT} if self.scripted else set())
        if len(names) < count:
            raise ValueError("two teachers have the same name")
        return self


class Config(_Section):
    """Everything that can be set."""

    run: RunSection = RunSection()
    student: StudentSection = StudentSection()
    env: EnvSection = EnvSection()
    rollout: RolloutConfig = RolloutConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    teachers: TeachersSection = TeachersSection()
    learner: LearnerConfig = LearnerConfig()
    replicas: ReplicasConfig = ReplicasConfig()

    @model_validator(mode="after")
    def _fits_together(self) -> Config:
        for left, right in TWINS:
            if self.value(left) != self.value(right):
                raise ValueError(f"{left} is {self.value(left)}, but {right} is {self.value(right)}")
        if self.teachers.scripted and self.env.tasks != EXPERT_TASKS:
            raise ValueError(
                f"teachers.scripted is for the {EXPERT_TASKS} tasks only, which the scripted expert knows; "
                "set teachers.scripted=false"
            )
        if self.rollout.weight_transfer == "adapter" and not self.learner.lora_rank:
            raise ValueError("rollout.weight_transfer=adapter needs adapters: set learner.lora_rank")
        oldest = self.learner.max_staleness
        if oldest is not None and oldest < self.rollout.max_staleness:
            raise ValueError(
                f"learner.max_staleness is {oldest}: tokens that rollout.max_staleness={self.rollout.max_staleness} "
                "lets be sampled would be left out of training; set both"
            )
        if self.learner.publish_every > self.rollout.max_staleness + 1:
            raise ValueError(
                "rollout.max_staleness must be at least learner.publish_every - 1, or both sides would wait "
                "for each other"
            )
        return self

    def value(self, key: str) -> Any:
        """The value of ``section.key``."""
        section, _, name = key.partition(".")
        return getattr(getattr(self, section), name)

    def to_toml(self) -> str:
        """All values; ``load_config`` gives an equal config for it."""
        return toml.dumps(self.model_dump(mode="json"))


def known_keys() -> list[str]:
    """Every ``section.key``."""
    return [f"{section}.{key}" for section in Config.model_fields for key in _section(section).model_fields]


def preset_names() -> list[str]:
    """The bundled presets."""
    folder = resources.files("hintloop.cli") / "presets"
    return sorted(
        entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")
    )


def load_config(
    *,
    preset: str | None = None,
    file: Path | None = None,
    assignments: Sequence[str] = (),
    values: Mapping[str, Any] | None = None,
) -> Config:
    """The config made of these layers; ``assignments`` are ``section.key=value``, ``values`` come last.

    ``UserError`` for an unknown preset or key, a file that cannot be read, or a value that does not fit.
    """
    layers = [_preset(preset)] if preset else []
    layers += [_file(file)] if file else []
    layers += [_assignment(text) for text in assignments]
    layers += [_nested(key, value) for key, value in (values or {}).items()]
    merged: Layer = {}
    for layer in layers:
        for section, entries in _with_twins(_checked(layer)).items():
            merged.setdefault(section, {}).update(entries)
    try:
        return Config.model_validate(merged)
    except ValidationError as error:
        raise UserError(_first_problem(error)) from error


def nearest_key(key: str) -> str:
    """The valid key most like ``key``."""
    wanted = key.partition(".")[2] or key

    def likeness(known: str) -> float:
        whole = difflib.SequenceMatcher(None, key, known).ratio()
        last = difflib.SequenceMatcher(None, wanted, known.partition(".")[2]).ratio()
        return max(whole, last) + 0.1 * whole

    return max(known_keys(), key=likeness)


def _section(name: str) -> type[BaseModel]:
    kind = Config.model_fields[name].annotation
    assert isinstance(kind, type)
    assert issubclass(kind, BaseModel)
    return kind


def _preset(name: str) -> Layer:
    path = resources.files("hintloop.cli") / "presets" / f"{name}.toml"
    if name not in preset_names():
        raise UserError(f"no preset {name!r}; there are {', '.join(preset_names())}")
    return tomllib.loads(path.read_text(encoding="utf-8"))


def _file(path: Path) -> Layer:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # TOML and Unicode errors
        raise UserError(f"{path} is not TOML: {error}") from error


def _assignment(text: str) -> Layer:
    key, equals, value = text.partition("=")
    if not equals or "." not in key:
        raise UserError(f"--set takes section.key=value, not {text!r}")
    try:
        parsed = tomllib.loads(f"value = {value.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()  # a bare word is a string
    return _nested(key.strip(), parsed)


def _nested(key: str, value: Any) -> Layer:
    section, _, name = key.partition(".")
    return {section: {name: value}}


def _checked(layer: Layer) -> Layer:
    """The layer, with ``"none"`` as None where a key may be None. ``UserError`` for an unknown key."""
    checked: Layer = {}
    for section, entries in layer.items():
        if not isinstance(entries, dict):
            raise _unknown(section)
        for name, value in entries.items():
            if section not in Config.model_fields or name not in _section(section).model_fields:
                raise _unknown(f"{section}.{name}")
            optional = NoneType in get_args(_section(section).model_fields[name].annotation)
            value = None if optional and value == "none" else _plain(value)
            checked.setdefault(section, {})[name] = value
    return checked


def _plain(value: Any) -> Any:
    """The value, with ``"none"`` as None in the tables of a list."""
    if not isinstance(value, list):
        return value
    return [
        {name: None if one == "none" else one for name, one in table.items()}
        if isinstance(table, dict)
        else table
        for table in value
    ]


def _unknown(key: str) -> UserError:
    return UserError(f"unknown key {key!r}; the nearest valid key is {nearest_key(key)!r}")


def _with_twins(layer: Layer) -> Layer:
    """Set each key's twin, unless the layer sets both."""
    given = {
        f"{section}.{name}": value for section, entries in layer.items() for name, value in entries.items()
    }
    for pair in TWINS:
        for key, twin in (pair, pair[::-1]):
            if key in given:
                given.setdefault(twin, given[key])
    complete: Layer = {}
    for key, value in given.items():
        section, _, name = key.partition(".")
        complete.setdefault(section, {})[name] = value
    return complete


def _first_problem(error: ValidationError) -> str:
    first, *more = error.errors()
    where = ".".join(str(part) for part in first["loc"])
    said = first["msg"].removeprefix("Value error, ")
    rest = f" (and {len(more)} more)" if more else ""
    return f"{where}: {said}{rest}" if where else f"{said}{rest}"
