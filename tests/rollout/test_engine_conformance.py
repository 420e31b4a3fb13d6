"""What every engine promises: the local one, simulated servers and real vLLM, in each way that servers get versions.

Real vLLM (see ``vllm_process``) is started when the first case needs it, and once for all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3ForCausalLM

from hintloop.agent.engine import EngineError, Sample, Sampling
from hintloop.learner.config import LearnerConfig
from hintloop.learner.lora import add_lora, plain_tensors, save_adapter
from hintloop.replay.weights import WeightStore
from hintloop.rollout.engines import publish_direct
from hintloop.rollout.engines.local import LocalEngine
from hintloop.rollout.engines.pool import Pool
from hintloop.rollout.engines.publish import Fetch, Way
from hintloop.rollout.engines.publish_adapter import FOLDER, Adapter
from hintloop.rollout.engines.publish_direct import Direct
from hintloop.rollout.engines.sim import SimEngine
from hintloop.rollout.engines.sim_model import SimModel
from hintloop.rollout.engines.sim_plan import Plan
from hintloop.rollout.engines.sim_server import in_thread
from hintloop.rollout.engines.vllm import Patience

from .vllm_process import ADAPTERS, START_S, TRANSFER, VOCABULARY, python_path, serving, tiny_model

STOP = 7
MAX_LENGTH = 256
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
TOLERANCE = 1e-4
"""Nats."""
DEADLINE_S, VLLM_DEADLINE_S = 120.0, 300.0
"""Only what hangs needs them."""

Scores = Callable[[int, Sequence[int], float], list[float]]
"""(version, token ids, temperature) -> log-probabilities of all but the first."""


@dataclass
class Tried:
    """An engine at version 0, and what to compare it with."""

    engine: Any
    store: WeightStore
    cache: Path
    scores: Scores
    keeps_version: bool = False
    """A request keeps the version that it began with."""
    recomputes: bool = True
    """What older weights computed of a context is computed anew when weights change."""

    async def load(self, version: int) -> None:
        folder = await asyncio.to_thread(self.store.fetch, version, self.cache)
        await self.engine.load_weights(folder, version)

    async def sample(self, limit: int, *, temperature: float = 1.0, session: str = "s") -> Sample:
        sample = await self.engine.generate(PROMPT, Sampling(temperature, limit), session=session)
        assert isinstance(sample, Sample)
        return sample

    def check(self, sample: Sample, limit: int, *, temperature: float = 1.0) -> None:
        """The record is whole, and each log-probability is that which the version recorded with it gives."""
        count, versions = len(sample.token_ids), sample.policy_versions
        assert 1 <= count <= limit
        assert len(sample.logprobs) == len(versions) == count
        assert list(versions) == sorted(versions)
        assert STOP not in sample.token_ids[:-1]
        assert sample.finish_reason == ("stop" if sample.token_ids[-1] == STOP else "length")
        assert sample.finish_reason == "stop" or count == limit
        known = {
            version: self.scores(version, [*PROMPT, *sample.token_ids], temperature or 1.0)[len(PROMPT) - 1 :]
            for version in set(versions if self.recomputes else versions[:1])
        }
        for at, version in enumerate(versions):
            if version in known:
                assert sample.logprobs[at] == pytest.approx(known[version][at], abs=TOLERANCE)


def publish_two(root: Path, model: Any) -> WeightStore:
    """Two versions of what is trained of a model, each with its probe."""
    store, probes = WeightStore(root / "weights"), []
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    for version in (0, 1):
        with torch.no_grad():
            for weight in trained:
                weight.add_(0.05 * torch.randn_like(weight))
        folder = root / f"made{version}"
        model.save_pretrained(folder, state_dict=plain_tensors(model))
        if len(trained) < len(list(model.parameters())):
            save_adapter(model, folder / FOLDER)
        ids = list(range(5, 45))
        probes.append(logprobs(model, ids, 1.0))
        probe = {"token_ids": ids, "logprobs": probes[-1]}
        store.publish(version, folder, metadata={"probe": probe})
    assert max(abs(a - b) for a, b in zip(*probes, strict=True)) > 100 * TOLERANCE
    return store


def logprobs(model: Any, ids: Sequence[int], temperature: float) -> list[float]:
    with torch.no_grad():
        logits = model(torch.tensor([list(ids)])).logits[0, :-1] / temperature
    found: list[float] = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    return found


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> WeightStore:
    """Versions 0 and 1 of a tiny model."""
    return publish_two(tmp_path_factory.mktemp("engines"), tiny_model())


@pytest.fixture(scope="module")
def lora_store(tmp_path_factory: pytest.TempPathFactory) -> WeightStore:
    """The same with an adapter on it, which alone changes."""
    return publish_two(
        tmp_path_factory.mktemp("adapters"), add_lora(tiny_model(), LearnerConfig(lora_rank=4))
    )


def model_scores(store: WeightStore, folder: Path) -> Scores:
    @cache
    def model(version: int) -> Any:
        return Qwen3ForCausalLM.from_pretrained(store.fetch(version, folder), dtype=torch.float32)

    return lambda version, ids, temperature: logprobs(model(version), ids, temperature)


def sim_scores(store: WeightStore, folder: Path, under: str) -> Scores:
    """A simulated model is the same at every temperature."""

    @cache
    def model(version: int) -> SimModel:
        return SimModel.of(store.fetch(version, folder, under=under))

    return lambda version, ids, _: model(version).score(ids)


@contextlib.asynccontextmanager
async def local(store: WeightStore, tmp_path: Path) -> AsyncIterator[Tried]:
    model = Qwen3ForCausalLM.from_pretrained(store.fetch(0, tmp_path), dtype=torch.float32)
    engine = LocalEngine(model, [STOP], slots=4, max_length=MAX_LENGTH, threads=1, seed=0)
    try:
        yield Tried(engine, store, tmp_path, model_scores(store, tmp_path), recomputes=False)
    finally:
        await engine.close()


@contextlib.asynccontextmanager
async def simulated(store: WeightStore, tmp_path: Path, count: int, way: Way) -> AsyncIterator[Tried]:
    plan = Plan(token_ms=2.0, max_model_len=MAX_LENGTH, max_requests=8, vocabulary=VOCABULARY)
    with contextlib.ExitStack() as stack:
        caches = [tmp_path / f"server{number}" for number in range(count)]
        urls = [stack.enter_context(in_thread(SimEngine(plan, cache=cache))) for cache in caches]
        scores = sim_scores(store, tmp_path / "sim", FOLDER if way.by_name else "")
        async with on_servers(urls, store, tmp_path, way, scores) as tried:
            yield tried


@contextlib.asynccontextmanager
async def on_servers(
    urls: list[str], store: WeightStore, tmp_path: Path, way: Way, scores: Scores
) -> AsyncIterator[Tried]:
    patience = Patience(connect=60.0)  # for a busy machine
    pool = Pool(
        urls,
        weights_uri=store.uri,
        stop_ids=[STOP],
        way=way,
        patience=patience,
        probe_tolerance=TOLERANCE,
    )
    tried = Tried(pool, store, tmp_path, scores, keeps_version=way.by_name)
    try:
        await tried.load(0)
        yield tried
    finally:
        await pool.close()


@pytest.fixture(scope="module")
def path(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return python_path(tmp_path_factory.mktemp("ns"), repository)


@dataclass
class Server:
    url: str
    log: Path


@pytest.fixture(scope="module")
def real(path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """``real(*options)``: the server with these options, started if there is none."""
    with contextlib.ExitStack() as stack:

        @cache
        def start(*options: str) -> Server:
            folder = tmp_path_factory.mktemp("vllm")
            tiny_model().save_pretrained(folder / "base")
            server = serving(folder, folder / "base", path, *options, max_length=MAX_LENGTH)
            return Server(stack.enter_context(server), folder / "log")

        yield start


@pytest.fixture
def found_by_senders(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender of a direct transfer runs in vLLM's environment, where that is known."""
    monkeypatch.setenv("PYTHONPATH", path)


Run = Callable[[Callable[[Tried], Awaitable[None]]], None]
REAL = [pytest.mark.vllm, pytest.mark.slow]
WAYS = {"fetch": Fetch, "adapter": Adapter, "direct": Direct}


@pytest.fixture(
    params=[
        "local",
        "server fetch",
        "pool fetch",
        "pool adapter",
        "pool direct",
        *(pytest.param(f"vllm {way}", marks=REAL) for way in WAYS),
    ]
)
def run(request: pytest.FixtureRequest, found_by_senders: None, tmp_path: Path) -> Run:
    """Runs a check on an engine, with a deadline."""
    kind, _, way_name = request.param.partition(" ")
    store = request.getfixturevalue("lora_store" if way_name == "adapter" else "store")
    url = ""
    if kind == "vllm":
        start = request.getfixturevalue("real")
        url = start(*(ADAPTERS if way_name == "adapter" else TRANSFER)).url

    def opened() -> AbstractAsyncContextManager[Tried]:
        if kind == "local":
            return local(store, tmp_path)
        way: Way = WAYS[way_name]()
        if kind == "vllm":
            return on_servers([url], store, tmp_path, way, model_scores(store, tmp_path))
        return simulated(store, tmp_path, 1 if kind == "server" else 2, way)

    def run(check: Callable[[Tried], Awaitable[None]]) -> None:
        async def whole() -> None:
            seconds = VLLM_DEADLINE_S if kind == "vllm" else DEADLINE_S
            async with asyncio.timeout(seconds), opened() as tried:
                await check(tried)

        asyncio.run(whole())

    return run


def test_a_sample_is_a_record_of_each_token(run: Run) -> None:
    async def check(tried: Tried) -> None:
        samples = await asyncio.gather(*(tried.sample(40, session=str(number)) for number in range(24)))
        for sample in samples:
            tried.check(sample, 40)
            assert set(sample.policy_versions) == {0}
        assert len({sample.token_ids for sample in samples}) > 1
        assert "stop" in {sample.finish_reason for sample in samples}

    run(check)


def test_the_record_is_of_the_tempered_distribution_and_a_greedy_one_of_the_untempered(run: Run) -> None:
    async def check(tried: Tried) -> None:
        temperatures = (0.5, 2.0, 0.0)
        asked = (tried.sample(40, temperature=each, session=str(each)) for each in temperatures)
        for temperature, sample in zip(temperatures, await asyncio.gather(*asked), strict=True):
            tried.check(sample, 40, temperature=temperature)

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
        for sample in await asyncio.gather(*(tried.sample(20, session=str(number)) for number in range(8))):
            tried.check(sample, 20)
            assert set(sample.policy_versions) == {1}

    run(check)


def test_requests_go_on_while_weights_change(run: Run) -> None:
    async def check(tried: Tried) -> None:
        sampled: list[Sample] = []
        loaded = asyncio.Event()

        async def ask(name: int) -> None:
            while not loaded.is_set():
                sampled.append(await tried.sample(200, session=f"{name} {len(sampled)}"))

        async with asyncio.TaskGroup() as asking:
            for name in range(8):
                asking.create_task(ask(name))
            await tried.sample(1, session="first")
            await tried.load(1)
            loaded.set()
        for sample in sampled:
            tried.check(sample, 200)
        assert 0 in {sample.policy_versions[0] for sample in sampled}
        spanning = any(set(sample.policy_versions) == {0, 1} for sample in sampled)
        assert spanning != tried.keeps_version

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


@pytest.mark.vllm
@pytest.mark.slow
def test_a_broken_transfer_ends_a_real_server_which_comes_back(
    store: WeightStore,
    real: Callable[..., Server],
    found_by_senders: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ask, broken = publish_direct.Sender.ask, False

    async def ask_and_break(self: publish_direct.Sender, what: str, seconds: float, **details: Any) -> Any:
        nonlocal broken
        if what == "send" and not broken:
            broken = True
            self._process.kill()
        return await ask(self, what, seconds, **details)

    monkeypatch.setattr(publish_direct.Sender, "ask", ask_and_break)
    server = real(*TRANSFER)

    async def check() -> None:
        opened = partial(on_servers, [server.url], store, tmp_path, scores=model_scores(store, tmp_path))
        async with asyncio.timeout(VLLM_DEADLINE_S):
            async with opened(way=Fetch()) as tried:  # so that the other way has something to change
                await tried.load(1)
        async with asyncio.timeout(VLLM_DEADLINE_S + START_S), opened(way=Direct()) as tried:
            sample = await tried.sample(60)  # by a server that was started again
            tried.check(sample, 60)
            assert set(sample.policy_versions) == {0}

    asyncio.run(check())
    assert broken
    assert "is started again" in server.log.read_text()
