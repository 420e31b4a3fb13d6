"""What every engine promises: the local one, one server, and a pool of servers, in each way that they get versions."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from hintloop.agent.engine import EngineError, Sample, Sampling
from hintloop.replay.weights import WeightStore
from hintloop.rollout.engines.local import LocalEngine
from hintloop.rollout.engines.pool import Pool
from hintloop.rollout.engines.publish import Fetch, Way
from hintloop.rollout.engines.publish_adapter import FOLDER, Adapter
from hintloop.rollout.engines.publish_direct import Direct
from hintloop.rollout.engines.sim import SimEngine
from hintloop.rollout.engines.sim_model import SimModel
from hintloop.rollout.engines.sim_plan import Plan
from hintloop.rollout.engines.sim_server import in_thread

VOCABULARY = 64
STOP = 7
MAX_LENGTH = 256
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
DEADLINE_S = 30.0


@dataclass
class Tried:
    """An engine at version 0, and what to compare it with."""

    engine: Any
    store: WeightStore
    cache: Path
    score: Callable[[int, Sequence[int]], list[float]]
    """(version, token ids) -> log-probabilities of all but the first."""

    async def load(self, version: int) -> None:
        folder = await asyncio.to_thread(self.store.fetch, version, self.cache)
        await self.engine.load_weights(folder, version)

    async def sample(self, limit: int, *, temperature: float = 1.0, session: str = "s") -> Sample:
        sample = await self.engine.generate(PROMPT, Sampling(temperature, limit), session=session)
        assert isinstance(sample, Sample)
        return sample


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> WeightStore:
    """Versions 0 and 1 of a tiny model."""
    root = tmp_path_factory.mktemp("engines")
    store = WeightStore(root / "weights")
    for version in (0, 1):
        torch.manual_seed(version)
        config = Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            tie_word_embeddings=True,
        )
        folder = root / f"made{version}"
        Qwen3ForCausalLM(config).save_pretrained(folder)
        (folder / FOLDER).mkdir()
        (folder / FOLDER / "adapter_config.json").write_text(f'{{"r": {version + 1}}}')
        store.publish(version, folder, metadata={})
    return store


def model_scores(store: WeightStore, cache: Path) -> Callable[[int, Sequence[int]], list[float]]:
    def score(version: int, ids: Sequence[int]) -> list[float]:
        model = Qwen3ForCausalLM.from_pretrained(store.fetch(version, cache), dtype=torch.float32)
        with torch.no_grad():
            logits = model(torch.tensor([list(ids)])).logits[0, :-1].log_softmax(-1)
        found: list[float] = logits.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
        return found

    return score


def sim_scores(store: WeightStore, cache: Path, under: str) -> Callable[[int, Sequence[int]], list[float]]:
    def score(version: int, ids: Sequence[int]) -> list[float]:
        return SimModel.of(store.fetch(version, cache, under=under)).score(ids)

    return score


@contextlib.asynccontextmanager
async def local(store: WeightStore, tmp_path: Path) -> AsyncIterator[Tried]:
    model = Qwen3ForCausalLM.from_pretrained(store.fetch(0, tmp_path), dtype=torch.float32)
    engine = LocalEngine(model, [STOP], slots=4, max_length=MAX_LENGTH, threads=1, seed=0)
    yield Tried(engine, store, tmp_path, model_scores(store, tmp_path))
    await engine.close()


@contextlib.asynccontextmanager
async def remote(store: WeightStore, tmp_path: Path, count: int, way: Way) -> AsyncIterator[Tried]:
    plan = Plan(token_ms=0.5, max_model_len=MAX_LENGTH, max_requests=8, vocabulary=VOCABULARY)
    with contextlib.ExitStack() as stack:
        caches = [tmp_path / f"server{number}" for number in range(count)]
        urls = [stack.enter_context(in_thread(SimEngine(plan, cache=cache))) for cache in caches]
        pool = Pool(urls, weights_uri=store.uri, stop_ids=[STOP], way=way)
        scores = sim_scores(store, tmp_path / "sim", FOLDER if way.by_name else "")
        tried = Tried(pool, store, tmp_path, scores)
        await tried.load(0)
        yield tried
        await pool.close()


Run = Callable[[Callable[[Tried], Awaitable[None]]], None]


@pytest.fixture(params=["local", "server", "pool", "adapter", "direct"])
def run(request: pytest.FixtureRequest, store: WeightStore, tmp_path: Path) -> Run:
    """Runs a check on an engine, with a deadline."""

    def run(check: Callable[[Tried], Awaitable[None]]) -> None:
        async def whole() -> None:
            opened = {
                "local": lambda: local(store, tmp_path),
                "server": lambda: remote(store, tmp_path, 1, Fetch()),
                "pool": lambda: remote(store, tmp_path, 2, Fetch()),
                "adapter": lambda: remote(store, tmp_path, 2, Adapter()),
                "direct": lambda: remote(store, tmp_path, 2, Direct()),
            }[request.param]()
            async with asyncio.timeout(DEADLINE_S), opened as tried:
                await check(tried)

        asyncio.run(whole())

    return run


def test_a_sample_is_a_record_of_each_token(run: Run) -> None:
    async def check(tried: Tried) -> None:
        samples = [await tried.sample(40, session=str(number)) for number in range(12)]
        for sample in samples:
            count = len(sample.token_ids)
            assert 1 <= count <= 40
            assert len(sample.logprobs) == len(sample.policy_versions) == count
            assert set(sample.policy_versions) == {0}
            stopped = sample.token_ids[-1] == STOP
            assert STOP not in sample.token_ids[:-1]
            assert sample.finish_reason == ("stop" if stopped else "length")
            assert stopped or count == 40
            known = tried.score(0, [*PROMPT, *sample.token_ids])[len(PROMPT) - 1 :]
            assert sample.logprobs == pytest.approx(known, abs=1e-4)
        assert len({sample.token_ids for sample in samples}) > 1
        assert "stop" in {sample.finish_reason for sample in samples}

    run(check)


def test_greedy_sampling_repeats_itself(run: Run) -> None:
    async def check(tried: Tried) -> None:
        one = await tried.sample(20, temperature=0.0, session="a")
        other = await tried.sample(20, temperature=0.0, session="b")
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)

    run(check)


def test_the_limit_may_be_a_single_token(run: Run) -> None:
    async def check(tried: Tried) -> None:
        assert len((await tried.sample(1)).token_ids) == 1

    run(check)


def test_what_does_not_fit_is_cut_or_refused(run: Run) -> None:
    async def check(tried: Tried) -> None:
        full = [5] * (MAX_LENGTH - 3)
        sample = await tried.engine.generate(full, Sampling(1.0, 50), session="long")
        assert 1 <= len(sample.token_ids) <= 3
        for prompt, sampling in (
            ([5] * MAX_LENGTH, Sampling()),
            ([], Sampling()),
            (PROMPT, Sampling(temperature=-1.0)),
            (PROMPT, Sampling(temperature=float("inf"))),
            (PROMPT, Sampling(max_new_tokens=0)),
            ([-1, 5], Sampling()),
        ):
            with pytest.raises(ValueError, match=r"."):
                await tried.engine.generate(prompt, sampling, session="bad")
        assert (await tried.sample(5)).token_ids  # it is none the worse for it

    run(check)


def test_many_requests_at_once_are_all_answered(run: Run) -> None:
    async def check(tried: Tried) -> None:
        samples = await asyncio.gather(*(tried.sample(10, session=str(number)) for number in range(40)))
        assert all(sample.token_ids for sample in samples)
        assert tried.engine.stats()["sampled_tokens"] == sum(len(sample.token_ids) for sample in samples)

    run(check)


def test_new_weights_count_from_the_moment_they_are_loaded(run: Run) -> None:
    async def check(tried: Tried) -> None:
        await tried.load(1)
        assert tried.engine.version == 1
        samples = await asyncio.gather(*(tried.sample(20, session=str(number)) for number in range(8)))
        for sample in samples:
            assert set(sample.policy_versions) == {1}
            known = tried.score(1, [*PROMPT, *sample.token_ids])[len(PROMPT) - 1 :]
            assert sample.logprobs == pytest.approx(known, abs=1e-4)

    run(check)


def test_requests_go_on_while_weights_change(run: Run) -> None:
    async def check(tried: Tried) -> None:
        asked = [asyncio.create_task(tried.sample(200, session=str(number))) for number in range(12)]
        await asyncio.sleep(0.02)
        await tried.load(1)
        for sample in await asyncio.gather(*asked):
            versions = list(sample.policy_versions)
            assert versions == sorted(versions)
            assert set(versions) <= {0, 1}

    run(check)


def test_a_cancelled_call_leaves_nothing_behind(run: Run) -> None:
    async def check(tried: Tried) -> None:
        asked = [asyncio.create_task(tried.sample(200, session=str(number))) for number in range(20)]
        await asyncio.sleep(0.01)
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        assert (await tried.sample(5)).token_ids

    run(check)


def test_a_closed_engine_refuses(run: Run) -> None:
    async def check(tried: Tried) -> None:
        await tried.engine.end_session("never seen")
        await tried.engine.close()
        with pytest.raises(EngineError):
            await tried.sample(5)

    run(check)
