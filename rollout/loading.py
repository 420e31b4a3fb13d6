"""A published version as an agent: the engine that samples from it, and how it talks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from hintloop.agent.engine import Engine
from hintloop.agent.policy import ChatFormat, load_renderer
from hintloop.rollout.config import RolloutConfig
from hintloop.rollout.weights import Fetched, Score

ROSTER = "engines.txt"
"""File of a run's folder that names its inference servers, while it is there."""


class RunningEngine(Engine, Protocol):
    """An engine that takes weights while it runs."""

    @property
    def version(self) -> int: ...
    async def load_weights(self, folder: Path, version: int) -> None: ...
    def stats(self) -> dict[str, float]: ...
    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Agent:
    """A model that has been loaded: its engine, how it talks, and how to score tokens with it."""

    engine: RunningEngine
    chat: ChatFormat
    score: Score | None = None
    servers: Callable[[], list[dict[str, Any]]] | None = None
    """What each inference server is doing. Given when the engine is servers, which check by themselves."""
    needs_files: bool = True
    """The engine loads from a version's files in this process's cache; otherwise the manifest is enough."""


LoadAgent = Callable[[Fetched], Agent]
"""Loads a fetched version; blocks."""


def loader(run_dir: Path, weights_uri: str, config: RolloutConfig, seed: int) -> LoadAgent:
    """What loads the engine that ``config`` asks for."""
    if not config.engines:
        return partial(load_local_agent, config=config, seed=seed)
    roster = run_dir / ROSTER
    return partial(load_remote_agent, config=config, weights_uri=weights_uri, roster=roster)


def load_local_agent(first: Fetched, *, config: RolloutConfig, seed: int) -> Agent:
    """The local engine on a fetched version. Raises ``ValueError``."""
    from hintloop.rollout.engines.local import LocalEngine

    chat = load_renderer(first.folder)
    engine = LocalEngine.from_folder(
        first.folder,
        slots=config.engine_slots,
        max_length=config.max_tokens,
        threads=config.engine_threads,
        seed=seed + first.version,
        version=first.version,
        stop_ids=chat.renderer.get_stop_token_ids(),
    )
    return Agent(engine, chat, engine.score)


def load_remote_agent(first: Fetched, *, config: RolloutConfig, weights_uri: str, roster: Path) -> Agent:
    """Inference servers as the engine; ``roster`` is the file that may name others than ``config``."""
    from hintloop.rollout.engines.pool import Pool
    from hintloop.rollout.engines.publish import Fetch, Way
    from hintloop.rollout.engines.publish_adapter import Adapter
    from hintloop.rollout.engines.publish_direct import Direct
    from hintloop.rollout.engines.vllm import Patience

    ways: dict[str, type[Way]] = {"fetch": Fetch, "adapter": Adapter, "direct": Direct}
    way = ways[config.weight_transfer]()
    chat = load_renderer(first.folder)
    pool = Pool(
        config.engines,
        weights_uri=weights_uri if "://" in weights_uri else str(Path(weights_uri).expanduser().absolute()),
        stop_ids=chat.renderer.get_stop_token_ids(),
        patience=Patience(turn=config.engine_timeout_s, join=config.idle_timeout_s),
        probe_tolerance=config.probe_tolerance,
        roster=roster,
        way=way,
        room=config.max_tokens,
    )
    return Agent(pool, chat, servers=pool.servers, needs_files=way.needs_files)
