"""The real thing: vLLM on the CPU takes weights while it generates, and every token's record is exact.

``HINTLOOP_VLLM_PYTHON`` names a Python with vLLM 0.32 or newer, ``fsspec`` and ``structlog``;
``containers/vllm-env`` makes one.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from hintloop.agent.engine import Sample, Sampling
from hintloop.replay.weights import WeightStore
from hintloop.rollout.engines.pool import Pool
from hintloop.rollout.vllm_extension import CACHE

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
START_S, DEADLINE_S = 300.0, 240.0
STOPS = list(range(100, 130))
PROMPT = [5, 6, 11, 12, 13]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> WeightStore:
    """Two versions of a model with a tied head, each with its probe."""
    root = tmp_path_factory.mktemp("vllm")
    store = WeightStore(root / "weights")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "head_dim": 32,
    }
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    model: Any = Qwen3ForCausalLM(Qwen3Config(vocab_size=1000, **sizes, **heads))
    for version in (0, 1):
        if version:
            with torch.no_grad():
                for weight in model.parameters():
                    weight.add_(0.02 * torch.randn_like(weight))
        folder = root / f"made{version}"
        model.save_pretrained(folder)
        ids = list(range(5, 45))
        probe = {"token_ids": ids, "logprobs": logprobs(model, ids, 1.0)}
        store.publish(version, folder, metadata={"probe": probe})
    return store


def logprobs(model: Any, ids: list[int], temperature: float) -> list[float]:
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1] / temperature
    found: list[float] = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    return found


@pytest.fixture(scope="module")
def url(store: WeightStore, repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("server")
    (folder / "ns").mkdir()
    (folder / "ns" / "hintloop").symlink_to(repository)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    model = str(store.fetch(0, folder))
    command = [os.environ["HINTLOOP_VLLM_PYTHON"], "-m", "hintloop.rollout.vllm_server", model]
    options = (
        f"--port {port} --max-model-len 1024 --max-num-seqs 16 --stream-interval 8 --skip-tokenizer-init"
    )
    command += options.split()
    env = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(folder / "ns"),
        CACHE: str(folder / "cache"),
    }
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log)
    try:
        found, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_S
        while not answers(found):
            assert process.poll() is None, (folder / "log").read_text()[-3000:]
            assert time.monotonic() < deadline, "vLLM did not start"
            time.sleep(1)
        yield found
    finally:
        process.terminate()
        process.wait(60)


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def worst(store: WeightStore, cache: Path, prompt: list[int], sample: Sample, temperature: float) -> float:
    """Largest difference between a recorded log-probability and that of the version it is recorded for."""
    differences = [0.0]
    for version in set(sample.policy_versions):
        model = Qwen3ForCausalLM.from_pretrained(store.fetch(version, cache), dtype=torch.float32)
        known = logprobs(model, [*prompt, *sample.token_ids], temperature or 1.0)[len(prompt) - 1 :]
        for ours, theirs, of in zip(sample.logprobs, known, sample.policy_versions, strict=True):
            differences.append(abs(ours - theirs) if of == version else 0.0)
    return max(differences)


def test_every_token_is_recorded_exactly_while_the_weights_change(
    store: WeightStore, url: str, tmp_path: Path
) -> None:
    async def run() -> None:
        ending = Pool([url], weights_uri=store.uri, stop_ids=STOPS)
        endless = Pool([url], weights_uri=store.uri, stop_ids=[999])
        async with asyncio.timeout(DEADLINE_S):
            for pool in (ending, endless):
                await pool.load_weights(store.fetch(0, tmp_path), 0)
            for temperature in (1.0, 0.5, 0.0):
                sample = await ending.generate(PROMPT, Sampling(temperature, 60), session="a")
                assert (sample.token_ids[-1] in STOPS) == (sample.finish_reason == "stop")
                assert worst(store, tmp_path, PROMPT, sample, temperature) < 1e-4
            await ending.close()
            prompts = [[5, 6, number] for number in range(20, 28)]
            asked = [
                asyncio.create_task(endless.generate(prompt, Sampling(1.0, 400), session=str(prompt)))
                for prompt in prompts
            ]
            await asyncio.sleep(1.0)
            await endless.load_weights(store.fetch(1, tmp_path), 1)
            for prompt, sample in zip(prompts, await asyncio.gather(*asked), strict=True):
                assert list(sample.policy_versions) == sorted(sample.policy_versions)
                assert worst(store, tmp_path, prompt, sample, 1.0) < 1e-4
                assert set(sample.policy_versions) == {0, 1} or len(sample.token_ids) < 400
            await endless.close()

    asyncio.run(run())
