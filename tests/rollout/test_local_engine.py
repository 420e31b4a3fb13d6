"""The local engine samples exactly what its model says, whatever else is going on in the other slots."""

from __future__ import annotations

import asyncio
import copy
import random
import threading
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from hintloop.agent.engine import EngineError, Sample, Sampling
from hintloop.rollout.engines.cache import Chunk
from hintloop.rollout.engines.decoder import Decoder, draw
from hintloop.rollout.engines.local import LocalEngine
from hintloop.rollout.engines.scheduler import PREFILL_TOKENS, Request, Scheduler, common_prefix

VOCABULARY = 97
DEADLINE = 120.0
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.3,
}


def tiny(kind: str = "qwen3", seed: int = 0) -> Any:
    torch.manual_seed(seed)
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**SHAPE))
    if kind == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**SHAPE, use_sliding_window=False))
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True))


@asynccontextmanager
async def running(model: Any, **kwargs: Any) -> AsyncIterator[LocalEngine]:
    options = {"slots": 3, "max_length": 256, "threads": 1, "seed": 0} | kwargs
    engine = LocalEngine(model, options.pop("stop_ids", [0]), **options)
    try:
        yield engine
    finally:
        await engine.close()


def run(main: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(main, DEADLINE))


async def until(condition: Any) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.002)


def ids(count: int, seed: int) -> list[int]:
    return [random.Random(f"{seed}-{i}").randrange(1, VOCABULARY) for i in range(count)]


@torch.no_grad()
def expected_logprobs(model: Any, prompt: list[int], sample: Sample, temperature: float = 1.0) -> list[float]:
    tokens = list(sample.token_ids)
    logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    logprobs = torch.log_softmax(logits / temperature, -1)
    return logprobs[range(len(tokens)), tokens].tolist()


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama"])
def test_logprobs_are_the_models_own_over_turns_lengths_and_evicted_sessions(kind: str) -> None:
    model = tiny(kind)
    reference = copy.deepcopy(model)

    async def episode(engine: LocalEngine, number: int) -> None:
        prompt, rng = ids(3 + 9 * number, number), random.Random(number)
        for turn in range(4):
            sampling = Sampling(0.7, rng.randint(1, 12))
            sample = await engine.generate(prompt, sampling, session=str(number))
            wanted = expected_logprobs(reference, prompt, sample, 0.7)
            assert sample.logprobs == pytest.approx(wanted, abs=1e-4)
            prompt = prompt + list(sample.token_ids) + ids(rng.randint(1, 7), turn)
            await asyncio.sleep(rng.random() / 100)
        await engine.end_session(str(number))

    async def main() -> dict[str, float]:
        async with running(model) as engine:
            await asyncio.gather(*(episode(engine, number) for number in range(8)))
            return engine.stats()

    stats = run(main())
    assert stats["evictions"] > 0
    assert stats["mean_occupancy"] > 1


def test_temperature_zero_takes_the_likeliest_token() -> None:
    model = tiny()
    reference = copy.deepcopy(model)

    async def main() -> Sample:
        async with running(model, stop_ids=[]) as engine:
            return await engine.generate(ids(5, 0), Sampling(0.0, 20), session="a")

    sample = run(main())
    logits = reference(torch.tensor([ids(5, 0) + list(sample.token_ids)])).logits[0, 4:-1]
    assert list(sample.token_ids) == logits.argmax(-1).tolist()
    assert sample.logprobs == pytest.approx(expected_logprobs(reference, ids(5, 0), sample), abs=1e-4)


def test_one_slot_and_one_seed_give_one_result() -> None:
    async def main(seed: int) -> list[Sample]:
        async with running(tiny(), slots=1, seed=seed) as engine:
            return [await engine.generate(ids(5, i), Sampling(1.0, 15), session=str(i)) for i in range(3)]

    assert run(main(1)) == run(main(1))
    assert run(main(1)) != run(main(2))


def test_a_sample_ends_with_a_stop_token_or_at_a_limit() -> None:
    async def main() -> tuple[Sample, Sample, Sample]:
        async with running(tiny(), stop_ids=range(10), max_length=64) as engine:
            stopped = await engine.generate(ids(4, 0), Sampling(1.0, 60), session="a")
        async with running(tiny(), stop_ids=[], max_length=64) as engine:
            short = await engine.generate(ids(4, 0), Sampling(1.0, 5), session="a")
            full = await engine.generate(ids(50, 0), Sampling(1.0, 60), session="b")
        return stopped, short, full

    stopped, short, full = run(main())
    assert stopped.finish_reason == "stop"
    assert [token < 10 for token in stopped.token_ids] == [False] * (len(stopped.token_ids) - 1) + [True]
    assert (short.finish_reason, len(short.token_ids)) == ("length", 5)
    assert (full.finish_reason, len(full.token_ids)) == ("length", 14)


@pytest.mark.parametrize(
    ("prompt", "sampling"),
    [
        ([1] * 64, Sampling()),
        ([], Sampling()),
        ([VOCABULARY], Sampling()),
        ([-1], Sampling()),
        ([1], Sampling(max_new_tokens=0)),
        ([1], Sampling(temperature=-1.0)),
        ([1], Sampling(temperature=float("nan"))),
    ],
)
def test_impossible_requests_are_value_errors(prompt: list[int], sampling: Sampling) -> None:
    async def main() -> None:
        async with running(tiny(), max_length=64) as engine:
            with pytest.raises(ValueError, match=r"prompt|token ids|cannot sample"):
                await engine.generate(prompt, sampling, session="a")

    run(main())


def test_a_next_turn_computes_only_what_is_new() -> None:
    async def main() -> None:
        async with running(tiny(), stop_ids=[]) as engine:
            first = await engine.generate(ids(40, 0), Sampling(1.0, 10), session="a")
            assert engine.stats()["prefilled_tokens"] == 40
            prompt = ids(40, 0) + list(first.token_ids) + ids(6, 1)
            await engine.generate(prompt, Sampling(1.0, 10), session="a")
            assert engine.stats()["prefilled_tokens"] == 40 + 1 + 6  # the last sampled token was never fed
            await engine.end_session("a")

    run(main())


def test_a_new_session_copies_a_prefix_that_another_one_computed_with_the_same_weights(
    tmp_path: Path,
) -> None:
    tiny(seed=1).save_pretrained(tmp_path)
    model, later = tiny(), tiny(seed=1)
    reference = copy.deepcopy(model)
    system = ids(40, 0)

    async def main() -> None:
        async with running(model, stop_ids=[]) as engine:
            await engine.generate(system + ids(5, 1), Sampling(1.0, 4), session="a")
            prompt = system + ids(5, 2)
            shared = await engine.generate(prompt, Sampling(1.0, 4), session="b")
            assert engine.stats()["reused_tokens"] == 40
            assert shared.logprobs == pytest.approx(expected_logprobs(reference, prompt, shared), abs=1e-4)
            await engine.load_weights(tmp_path, 1)
            alone = await engine.generate(prompt, Sampling(1.0, 4), session="c")
            assert engine.stats()["reused_tokens"] == 40
            assert alone.logprobs == pytest.approx(expected_logprobs(later, prompt, alone), abs=1e-4)
            assert set(alone.policy_versions) == {1}

    run(main())


def test_a_request_that_spans_an_update_goes_on_with_its_cache_and_records_both_versions(
    tmp_path: Path,
) -> None:
    tiny(seed=1).save_pretrained(tmp_path)
    model = tiny()
    old, new = copy.deepcopy(model), tiny(seed=1)
    prompt = ids(20, 0)

    async def main() -> Sample:
        async with running(model, stop_ids=[], version=6, max_length=2048) as engine:
            task = asyncio.create_task(engine.generate(prompt, Sampling(1.0, 1000), session="a"))
            await until(lambda: engine.stats()["sampled_tokens"] > 10)
            assert engine.version == 6
            await engine.load_weights(tmp_path, 7)
            assert engine.version == 7
            return await task

    sample = run(main())
    before = sample.policy_versions.count(6)
    assert sample.policy_versions == (6,) * before + (7,) * (1000 - before)
    assert 10 < before < 1000
    tokens, cache = list(sample.token_ids), DynamicCache()
    with torch.no_grad():
        first = old(torch.tensor([prompt + tokens[: before - 1]]), cache=cache, use_cache=True).logits[0]
        rest = new(torch.tensor([tokens[before - 1 : -1]]), cache=cache, use_cache=True).logits[0]
    logprobs = torch.log_softmax(torch.cat([first[len(prompt) - 1 :], rest]), -1)
    assert sample.logprobs == pytest.approx(logprobs[range(1000), tokens].tolist(), abs=1e-4)


def test_weights_that_do_not_fit_change_nothing(tmp_path: Path) -> None:
    tiny("llama", seed=1).save_pretrained(tmp_path / "other")
    (tmp_path / "empty").mkdir()

    async def main() -> None:
        async with running(tiny(), slots=1) as engine, running(tiny(), slots=1) as same:
            for folder in ("other", "empty", "absent"):
                with pytest.raises(ValueError, match="weights missing"):
                    await engine.load_weights(tmp_path / folder, 5)
            assert engine.version == 0
            ask = (ids(9, 0), Sampling(1.0, 9))
            assert await engine.generate(*ask, session="a") == await same.generate(*ask, session="a")

    run(main())


def test_scoring_uses_the_weights_in_use_and_disturbs_no_request(tmp_path: Path) -> None:
    tiny(seed=1).save_pretrained(tmp_path)
    model = tiny()
    old, new = copy.deepcopy(model), tiny(seed=1)
    probe = ids(30, 5)
    rest = Sample(tuple(probe[1:]), (), (), "")

    async def main() -> None:
        async with running(model, stop_ids=[], slots=1) as engine:
            call = asyncio.create_task(engine.generate(ids(9, 0), Sampling(1.0, 50), session="a"))
            assert await engine.score(probe) == pytest.approx(
                expected_logprobs(old, probe[:1], rest), abs=1e-4
            )
            sample = await call
            wanted = expected_logprobs(old, ids(9, 0), sample)
            assert sample.logprobs == pytest.approx(wanted, abs=1e-4)
            await engine.load_weights(tmp_path, 1)
            assert await engine.score(probe) == pytest.approx(
                expected_logprobs(new, probe[:1], rest), abs=1e-4
            )
            for wrong in ([1], [1] * 300, [1, VOCABULARY]):
                with pytest.raises(ValueError, match=r"score|token ids"):
                    await engine.score(wrong)

    run(main())


def test_more_live_sessions_than_slots_wait_for_their_turn() -> None:
    async def main() -> list[Sample]:
        async with running(tiny(), slots=2, stop_ids=[]) as engine:
            asks = [engine.generate(ids(4, i), Sampling(1.0, 8), session=str(i)) for i in range(20)]
            return await asyncio.gather(*asks)

    assert [len(sample.token_ids) for sample in run(main())] == [8] * 20


def test_calls_of_one_session_run_one_after_the_other() -> None:
    model = tiny()
    reference = copy.deepcopy(model)
    prompts = [ids(10, i) for i in range(5)]

    async def main() -> list[Sample]:
        async with running(model, stop_ids=[]) as engine:
            return await asyncio.gather(*(engine.generate(p, Sampling(), session="a") for p in prompts))

    for prompt, sample in zip(prompts, run(main()), strict=True):
        assert sample.logprobs == pytest.approx(expected_logprobs(reference, prompt, sample), abs=1e-4)


def test_a_failing_worker_fails_every_call_with_the_cause() -> None:
    model = tiny()
    armed = threading.Event()

    def explode(*_: Any) -> None:
        if armed.is_set():
            raise RuntimeError("out of luck")

    async def main() -> list[Any]:
        async with running(model, stop_ids=[], slots=1, max_length=2048) as engine:
            model.register_forward_pre_hook(explode)
            asks = [engine.generate(ids(4, i), Sampling(1.0, 2000), session=str(i)) for i in range(3)]
            tasks = [asyncio.create_task(ask) for ask in asks]
            await until(lambda: engine.stats()["sampled_tokens"] > 3)
            armed.set()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            late = engine.generate(ids(4, 0), Sampling(), session="late")
            return results + await asyncio.gather(late, engine.end_session("0"), return_exceptions=True)

    for error in run(main()):
        assert isinstance(error, EngineError)
        assert isinstance(error.__cause__, RuntimeError)
        assert "out of luck" in str(error)


def test_logits_that_are_not_finite_are_an_engine_error() -> None:
    model = tiny()

    async def main() -> None:
        async with running(model) as engine:
            model.model.norm.weight.data.fill_(float("nan"))
            with pytest.raises(EngineError, match="not finite"):
                await engine.generate(ids(4, 0), Sampling(), session="a")

    run(main())


def test_a_worker_that_stops_moving_is_noticed() -> None:
    model = tiny()
    stuck = threading.Event()

    def hang(*_: Any) -> None:
        stuck.wait(DEADLINE)

    async def main() -> None:
        engine = LocalEngine(model, [], slots=1, max_length=64, threads=1, seed=0, stall_seconds=0.2)
        model.register_forward_pre_hook(hang)
        try:
            with pytest.raises(EngineError, match="not finished a step"):
                await engine.generate(ids(4, 0), Sampling(), session="a")
            with pytest.raises(EngineError, match="did not stop"):
                await engine.close()
        finally:
            stuck.set()
            await engine.close()

    run(main())


def test_cancelling_a_call_frees_its_row() -> None:
    async def main() -> float:
        async with running(tiny(), slots=1, stop_ids=[], max_length=2048) as engine:
            running_call = asyncio.create_task(engine.generate(ids(4, 0), Sampling(1.0, 2000), session="a"))
            waiting_call = asyncio.create_task(engine.generate(ids(4, 1), Sampling(1.0, 2000), session="b"))
            await until(lambda: engine.stats()["sampled_tokens"] > 3)
            for call in (running_call, waiting_call):
                call.cancel()
            await asyncio.gather(running_call, waiting_call, return_exceptions=True)
            await engine.generate(ids(4, 2), Sampling(1.0, 5), session="c")
            return engine.stats()["sampled_tokens"]

    assert run(main()) < 2000


def test_closing_ends_calls_that_wait_and_refuses_new_ones() -> None:
    async def main() -> None:
        engine = LocalEngine(tiny(), [], slots=1, max_length=2048, threads=1, seed=0)
        call = asyncio.create_task(engine.generate(ids(4, 0), Sampling(1.0, 2000), session="a"))
        await until(lambda: engine.stats()["sampled_tokens"] > 3)
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await call
        with pytest.raises(EngineError, match="closed"):
            await engine.generate(ids(4, 0), Sampling(), session="a")
        await engine.close()

    run(main())


def save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w1")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token="w0").save_pretrained(folder)


def test_an_engine_starts_from_a_model_folder_and_stops_at_its_end_token(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path)
    save_tokenizer(tmp_path)

    async def main() -> Sample:
        engine = LocalEngine.from_folder(tmp_path, slots=2, max_length=1024, threads=1, seed=0, version=3)
        try:
            return await engine.generate(ids(4, 0), Sampling(1.0, 1000), session="a")
        finally:
            await engine.close()

    sample = run(main())
    assert sample.token_ids[-1] == 0
    assert set(sample.policy_versions) == {3}


@pytest.mark.parametrize("left_out", ["config.json", "model.safetensors", "tokenizer_config.json"])
def test_a_folder_without_model_or_tokenizer_is_a_value_error(tmp_path: Path, left_out: str) -> None:
    tiny().save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    (tmp_path / left_out).unlink()
    with pytest.raises(ValueError, match="not a model folder"):
        LocalEngine.from_folder(tmp_path, slots=2, max_length=64, threads=1, seed=0)


def test_models_that_cannot_run_in_slots_are_refused() -> None:
    sliding = Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=4, max_window_layers=1)
    with pytest.raises(ValueError, match="only full attention"):
        Decoder(Qwen2ForCausalLM(sliding), slots=1, max_length=16)
    with pytest.raises(ValueError, match="positions"):
        Decoder(tiny(), slots=1, max_length=4096)
    wrong = tiny()
    wrong.lm_head.register_forward_hook(lambda module, _, output: output + torch.rand(1) * 100)
    with pytest.raises(ValueError, match="other logits"):
        Decoder(wrong, slots=1, max_length=16)


# The parts, without a thread


def test_prompts_longer_than_a_step_are_computed_in_pieces_while_others_decode() -> None:
    model = tiny()
    reference = copy.deepcopy(model)
    scheduler = Scheduler(Decoder(model, slots=4, max_length=1400), stop_ids=[], seed=0, version=0)
    sizes = (5, PREFILL_TOKENS * 2 + 50, PREFILL_TOKENS + 3)
    requests = [Request(ids(size, size), 1.0, 6, str(size)) for size in sizes]
    for request in requests:
        scheduler.submit(request)
    with torch.inference_mode():
        finished = [request for _ in range(20) for request in scheduler.step()]
    assert finished[0] is requests[0]
    assert {id(request) for request in finished} == {id(request) for request in requests}
    for request in requests:
        sample = Sample(tuple(request.token_ids), (), (), "")
        wanted = expected_logprobs(reference, request.prompt, sample)
        assert request.logprobs == pytest.approx(wanted, abs=1e-4)


def test_live_rows_move_together_and_keep_their_caches() -> None:
    model = tiny()
    reference = copy.deepcopy(model)
    decoder = Decoder(model, slots=8, max_length=64)
    scheduler = Scheduler(decoder, stop_ids=[], seed=0, version=0)
    requests = [Request(ids(4 + i, i), 1.0, 20 if i in (3, 7) else 2, str(i)) for i in range(8)]
    for request in requests:
        scheduler.submit(request)
    widths: list[int] = []
    plan = decoder.cache.plan

    def watched(positions: Any, chunks: Any) -> Any:
        widths.append(len(positions))
        return plan(positions, chunks)

    decoder.cache.plan = watched  # type: ignore[method-assign]
    with torch.inference_mode():
        while scheduler.busy:
            scheduler.step()
        assert widths[1] == 8
        assert widths[-1] == 2
        again = [Request(r.prompt + r.token_ids + [5], 1.0, 3, r.session) for r in requests]
        for request in again:
            scheduler.submit(request)
        while scheduler.busy:
            scheduler.step()
    for request in [*requests, *again]:
        sample = Sample(tuple(request.token_ids), (), (), "")
        wanted = expected_logprobs(reference, request.prompt, sample)
        assert request.logprobs == pytest.approx(wanted, abs=1e-4)
    assert scheduler.counters.prefilled == sum(len(r.prompt) for r in requests) + 2 * len(again)


def test_one_forward_mixes_decoding_idle_rows_and_chunks() -> None:
    model = tiny("llama")
    reference = copy.deepcopy(model)
    decoder = Decoder(model, slots=4, max_length=32)
    one, two = ids(12, 1), ids(9, 2)
    with torch.inference_mode():
        decoder.forward([], [], [Chunk(2, 0, one[:10]), Chunk(0, 0, two[:4])], [])
        tokens, positions = [0, 0, one[10]], [32, 32, 10]
        logits = decoder.forward(tokens, positions, [Chunk(0, 4, two[4:])], [2, 7])
        wanted = [reference(torch.tensor([row])).logits[0, -1] for row in (one[:11], two)]
    assert torch.allclose(logits, torch.stack(wanted), atol=1e-4)


@settings(deadline=None)  # a busy machine is not a failure
@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_common_prefix_is_the_longest_one(one: list[int], other: list[int]) -> None:
    length = common_prefix(one, other)
    assert one[:length] == other[:length]
    assert length == min(len(one), len(other)) or one[length] != other[length]


def test_draws_follow_the_tempered_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, -1.0, float("-inf")]]).repeat(20_000, 1)
    tokens, logprobs = draw(logits, [0.5] * 20_000, torch.Generator().manual_seed(0))
    wanted = torch.softmax(logits[0] / 0.5, -1)
    shares = torch.bincount(torch.tensor(tokens), minlength=4) / 20_000
    assert shares == pytest.approx(wanted, abs=0.012)
    assert shares[3] == 0
    assert logprobs[0] == pytest.approx(wanted[tokens[0]].log().item(), abs=1e-5)


def test_greedy_and_sampled_rows_share_a_step() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    tokens, logprobs = draw(logits, [0.0, 1.0] * 3, torch.Generator().manual_seed(0))
    assert tokens[::2] == logits[::2].argmax(-1).tolist()
    rows = torch.log_softmax(logits, -1)
    assert logprobs == pytest.approx(rows[range(6), tokens].tolist(), abs=1e-5)
