"""Settings of the rollout side. Times are in seconds, lengths in tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class RolloutConfig(_Settings):
    """How episodes are made."""

    split: str = "train"
    """Split of the task set that training tasks come from."""
    task_sampling: Literal["uniform", "weighted", "curriculum"] = "uniform"
    """How the task of a group is drawn: all alike; by ``task_weights``; or by these times the chance that the agent,
    as far as is known of the task, now solves it and now does not. A restart reads back what is known."""
    task_weights: dict[str, float] = {}
    """Weights by pattern of the task id, such as ``{"bugfix/mut*" = 3.0}``; the first that matches counts, and what
    matches none has the weight 1."""
    resample_equal: int = Field(default=0, ge=0)
    """Times that a group whose rewards are all equal is played anew, with another task, before it is taken as it is.
    Such a group teaches nothing by its rewards; by its hints and pairs it does, and those are then lost."""
    group_size: int = Field(default=8, ge=1)
    """Episodes of one task; their rewards are compared with each other."""
    groups_per_step: int = Field(default=8, ge=1)
    """Groups that the learner takes for one version; must be what the learner is told."""
    max_staleness: int = Field(default=2, ge=0)
    """How many versions behind the learner an episode's first weights may be; 0 is synchronous. With 1, the learner
    waits whenever the slowest episode takes longer than a step."""
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
    hint_writer: str | None = None
    """Teacher that writes the hints of at most ``teachers.max_asks_per_episode`` errors per episode; where it has no
    answer in time, and for None, the hint is the template's of that kind of error."""
    agent: str | None = None
    """Command line of a program that is the agent, run by a shell for each episode; None: the built-in agent."""
    agent_timeout_s: float = Field(default=120.0, gt=0)
    """Time that such a program may take in one episode beside waiting for the model and the sandbox."""
    agent_sampling: Literal["override", "refuse"] = "override"
    """What becomes of a program's questions with sampling settings of their own (temperature, top-p, top-k, penalties),
    which would bias the learner's ratio: answered with the run's and counted, or refused with a message."""
    tries_per_episode: int = Field(default=3, ge=1)
    """Attempts at an episode that the infrastructure loses, before its group is dropped."""
    max_groups_lost: int = Field(default=8, ge=1)
    """Groups dropped one after the other before the run gives up."""
    poll_s: float = Field(default=0.2, gt=0)
    """How often to look for new weights."""
    idle_timeout_s: float = Field(default=600.0, gt=0)
    """How long to wait for the learner's next version before the run gives up."""
    storage_timeout_s: float = Field(default=300.0, gt=0)
    """How long the storage of the journal may fail before the run gives up; it is tried again meanwhile."""
    notice_s: float = Field(default=45.0, gt=0)
    """A part that has waited for so long is named in the log and by ``hintloop status``."""
    engines: tuple[str, ...] = ()
    """Root URLs of inference servers (vLLM, or ``hintloop sim-engine``); none: the local engine.

    While the run's folder has a file ``engines.txt``, the URLs in it, one a line, are taken instead."""
    weight_transfer: Literal["fetch", "adapter", "direct"] = "fetch"
    """How versions get to the servers: each fetches them from the weights; each fetches the adapters alone (for
    ``learner.lora_rank``; they need ``--lora-rank``); or this process sends them, through vLLM's weight transfer."""
    engine_timeout_s: float = Field(default=300.0, gt=0)
    """Time for one turn from the engine, with all its retries."""
    probe_tolerance: float = Field(default=1e-3, gt=0)
    """Largest difference, in nats, between an engine's and the learner's log-probabilities of the same weights;
    servers that compute in bfloat16 need more."""
    engine_slots: int = Field(default=64, ge=1)
    """Sequences that the local engine decodes together."""
    engine_threads: int | None = Field(default=None, ge=1)
    """Threads of the local engine; None: as many as torch takes."""

    @field_validator("engines")
    @classmethod
    def _are_urls(cls, engines: tuple[str, ...]) -> tuple[str, ...]:
        from hintloop.rollout.engines.wire import check_url

        for url in engines:
            check_url(url)
        return engines

    @field_validator("task_weights")
    @classmethod
    def _are_weights(cls, weights: dict[str, float]) -> dict[str, float]:
        for pattern, weight in weights.items():
            if not (math.isfinite(weight) and weight >= 0):
                raise ValueError(f"the weight of {pattern!r} is {weight}; it must be a number from 0 on")
        return weights

    @model_validator(mode="after")
    def _uses_weights(self) -> RolloutConfig:
        if self.task_weights and self.task_sampling == "uniform":
            raise ValueError("task_weights are for task_sampling weighted or curriculum, and it is uniform")
        return self


class EvaluationConfig(_Settings):
    """The fixed held-out evaluation. Its tasks are drawn once from the seed and stay the same."""

    splits: tuple[str, ...] = ()
    """Splits to evaluate on; none named: all but the one that is trained on."""
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


OPENROUTER, OPENROUTER_KEY = "https://openrouter.ai/api/v1", "OPENROUTER_API_KEY"


class TeacherSpec(_Settings):
    """One teacher, by default on OpenRouter."""

    model_config = ConfigDict(hide_input_in_errors=True)

    name: str
    """How it is named in pairs and reports."""
    base_url: str = OPENROUTER
    """Root of its API, ``/v1`` included."""
    model: str
    """Name of the model there."""
    api_key_env: str | None = None
    """Environment variable that holds the key, by default OPENROUTER_API_KEY for one on OpenRouter; None: no key is
    sent."""
    usd_per_mtok_in: float | None = Field(default=None, ge=0)
    """Price of a million prompt tokens, US dollars; 0 for a teacher that is free. None, not known, counts as 0, and
    is refused where there is a budget."""
    usd_per_mtok_out: float | None = Field(default=None, ge=0)
    """Price of a million answer tokens, the same way."""
    max_answer_tokens: int = Field(default=2048, ge=1)
    """Tokens of one answer at most, its reasoning included; the worst case of a question is priced with it."""
    requests_per_minute: float | None = Field(default=None, gt=0)
    """Requests that the teacher takes per minute, retries included; None: no limit."""
    in_flight: int | None = Field(default=None, ge=1)
    """Requests to the teacher at the same time at most; None: as many as ``teachers.in_flight`` says."""

    @model_validator(mode="before")
    @classmethod
    def _on_openrouter(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and values.get("base_url", OPENROUTER) == OPENROUTER:
            return {"api_key_env": OPENROUTER_KEY, **values}
        return values

    @property
    def is_priced(self) -> bool:
        """Whether its prices are known."""
        return self.usd_per_mtok_in is not None and self.usd_per_mtok_out is not None

    @property
    def is_free(self) -> bool:
        """Whether it costs nothing, as far as is known."""
        return not self.usd_per_mtok_in and not self.usd_per_mtok_out

    @field_validator("base_url")
    @classmethod
    def _is_url(cls, url: str) -> str:
        if not url.startswith(("http://", "https://")):
            raise ValueError("a teacher's URL is one such as http://127.0.0.1:8000/v1")
        if "@" in url.split("/")[2]:
            raise ValueError("a teacher's URL holds no password: name an environment variable by api_key_env")
        return url


class TeachersConfig(_Settings):
    """Who is asked for better actions, when, and what counts as agreement."""

    teachers: tuple[TeacherSpec, ...] = ()
    """The teachers; none: no pairs."""
    agree: int = Field(default=1, ge=1)
    """Teachers that must give the same action."""
    ask: Literal["errors", "uncertain", "all"] = "errors"
    """Turns that are asked about: those with a tool error of the agent; also those that the agent sampled with
    high uncertainty; or every turn."""
    uncertain_quantile: float = Field(default=0.9, ge=0, lt=1)
    """Share of turns that are less uncertain than one to ask about: mean negative log-probability per token,
    among the turns of late."""
    uncertain_nats: float | None = Field(default=None, ge=0)
    """Nats per token above which a turn is uncertain, instead of the quantile; None: the quantile."""
    ask_probability: float = Field(default=0.1, ge=0, le=1)
    """Chance that any other turn is asked about all the same."""
    verify: Literal["none", "no_error", "better_tests"] = "none"
    """What an agreed action must do, in a copy of the sandbox as it was before the turn, to become a pair:
    nothing; make no tool error; or also let more of the visible tests pass than the agent's own action.
    A finished episode then keeps its environment until its pairs are made."""
    max_asks_per_episode: int = Field(default=3, ge=0)
    """Turns asked about per episode at most."""
    timeout_s: float = Field(default=30.0, gt=0)
    """Time for one question, retries included."""
    attempts: int = Field(default=3, ge=1)
    """Tries per question."""
    in_flight: int = Field(default=16, ge=1)
    """Requests to one teacher at the same time at most, where it has no limit of its own."""
    deadline_s: float = Field(default=5.0, ge=0)
    """How long the answers may keep a finished episode from the journal."""
    budget_usd: float | None = Field(default=None, ge=0)
    """What the teachers may cost in the whole run, US dollars, restarts included; None: no cap."""
    episode_budget_usd: float | None = Field(default=None, ge=0)
    """What they may cost in one episode, US dollars, with the tries of it that were lost; None: no cap."""
    cache_mb: float = Field(default=64.0, ge=0)
    """Answers kept on disk in the run's folder, megabytes; 0: every question is asked."""

    @model_validator(mode="after")
    def _can_agree(self) -> TeachersConfig:
        if self.teachers and self.agree > len(self.teachers):
            raise ValueError(f"agree is {self.agree}, but there are {len(self.teachers)} teachers")
        if len({spec.name for spec in self.teachers}) < len(self.teachers):
            raise ValueError("two teachers have the same name")
        return self

    @model_validator(mode="after")
    def _can_be_billed(self) -> TeachersConfig:
        if self.budget_usd is not None or self.episode_budget_usd is not None:
            check_prices(self.teachers)
        return self


def check_prices(specs: Iterable[TeacherSpec]) -> None:
    """``ValueError`` when a teacher's prices are not known, so that no budget can hold for it."""
    for spec in specs:
        if not spec.is_priced:
            raise ValueError(
                f"teacher {spec.name} has no price, and there is a budget: set usd_per_mtok_in and usd_per_mtok_out, "
                "both 0 if it is free"
            )
