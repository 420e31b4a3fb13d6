"""Settings of the rollout side. Times are in seconds, lengths in tokens."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class RolloutConfig(_Settings):
    """How episodes are made."""

    split: str = "train"
    """Split of the task set that training tasks come from."""
    group_size: int = Field(default=8, ge=1)
    """Episodes of one task; their rewards are compared with each other."""
    groups_per_step: int = Field(default=8, ge=1)
    """Groups that the learner takes for one version; must be what the learner is told."""
    max_staleness: int = Field(default=1, ge=0)
    """How many versions behind the learner an episode's first weights may be; 0 is synchronous."""
    episodes_in_flight: int = Field(default=64, ge=1)
    """Episodes played at the same time at most."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature of training episodes."""
    max_new_tokens: int = Field(default=96, ge=1)
    """Tokens of one assistant turn at most."""
    max_tokens: int = Field(default=512, ge=2)
    """Tokens of one episode at most, prompt and tool results included."""
    hint_role: Literal["system", "user"] = "system"
    """Role of the hint message; the model's chat template must take it in mid-conversation."""
    tries_per_episode: int = Field(default=3, ge=1)
    """Attempts at an episode that the infrastructure loses, before its group is dropped."""
    max_groups_lost: int = Field(default=8, ge=1)
    """Groups dropped one after the other before the run gives up."""
    poll_s: float = Field(default=0.2, gt=0)
    """How often to look for new weights."""
    idle_timeout_s: float = Field(default=600.0, gt=0)
    """How long to wait for the learner's next version before the run gives up."""
    engine_slots: int = Field(default=64, ge=1)
    """Sequences that the local engine decodes together."""
    engine_threads: int | None = Field(default=None, ge=1)
    """Threads of the local engine; None: as many as torch takes."""


class EvaluationConfig(_Settings):
    """The fixed held-out evaluation. Its tasks are drawn once from the seed and stay the same."""

    splits: tuple[str, ...] = ("heldmut", "heldfn")
    """Splits to evaluate on."""
    num_tasks: int = Field(default=500, ge=1)
    """Tasks per split before and after the run; one episode each."""
    num_tasks_during: int = Field(default=100, ge=1)
    """Tasks per split for the evaluations on the way."""
    during: tuple[int, ...] = ()
    """Versions at which to evaluate on the way; the first one loaded at or after each is taken."""
    temperatures: tuple[float, ...] = (1.0, 0.0)
    """Sampling temperatures, each evaluated; 0 is greedy."""
    in_flight: int = Field(default=64, ge=1)
    """Episodes played at the same time at most."""
    examples: int = Field(default=2, ge=0)
    """Whole episodes kept of each evaluation, for the report."""


class TeacherSpec(_Settings):
    """One teacher."""

    name: str
    """How it is named in pairs and reports."""
    base_url: str
    """Root of its API, ``/v1`` included."""
    model: str
    """Name of the model there."""
    api_key_env: str | None = None
    """Environment variable that holds the key; None: no key is sent."""
    usd_per_mtok_in: float = Field(default=0.0, ge=0)
    """Price of a million prompt tokens, US dollars."""
    usd_per_mtok_out: float = Field(default=0.0, ge=0)
    """Price of a million answer tokens, US dollars."""


class TeachersConfig(_Settings):
    """Who is asked for better actions, when, and what counts as agreement."""

    teachers: tuple[TeacherSpec, ...] = ()
    """The teachers; none: no pairs."""
    agree: int = Field(default=1, ge=1)
    """Teachers that must give the same action."""
    ask_probability: float = Field(default=0.1, ge=0, le=1)
    """Chance that a turn is asked about all the same when the agent made no tool error in it."""
    max_asks_per_episode: int = Field(default=3, ge=0)
    """Turns asked about per episode at most."""
    timeout_s: float = Field(default=30.0, gt=0)
    """Time for one question, retries included."""
    attempts: int = Field(default=3, ge=1)
    """Tries per question."""
    in_flight: int = Field(default=16, ge=1)
    """Questions to one teacher at the same time at most."""
    deadline_s: float = Field(default=5.0, ge=0)
    """How long the answers may keep a finished episode from the journal."""

    @model_validator(mode="after")
    def _can_agree(self) -> TeachersConfig:
        if self.teachers and self.agree > len(self.teachers):
            raise ValueError(f"agree is {self.agree}, but there are {len(self.teachers)} teachers")
        if len({spec.name for spec in self.teachers}) < len(self.teachers):
            raise ValueError("two teachers have the same name")
        return self
