"""The real thing: vLLM on the CPU takes weights in each way while it generates, and every token's record is exact.

``HINTLOOP_VLLM_PYTHON`` names a Python with vLLM 0.32 or newer, ``fsspec`` and ``structlog``;
``containers/vllm-env`` makes one.
"""

from __future__ import annotations

import asyncio
import contextlib
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
from hintloop.learner.config import LearnerConfig
from hintloop.learner.lora import add_lora, plain_tensors, save_adapter
from hintloop.replay.weights import WeightStore
from hintloop.rollout.engines import publish_direct
from hintloop.rollout.engines.pool import Pool
from hintloop.rollout.engines.publish import Way
from hintloop.rollout.engines.publish_adapter import FOLDER, Adapter
from hintloop.rollout.engines.publish_direct import Direct
from hintloop.rollout.engines.vllm import Patience, VllmServer
from hintloop.rollout.vllm_extension import CACHE

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
START_S, DEADLINE_S = 300.0, 600.0
STOPS = list(range(100, 130))
PROMPT = [5, 6, 11, 12, 13]
LONG = 800
"""Tokens of an answer that weights change in."""


def tiny_model() -> Any:
    """A model with a tied head."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "head_dim": 32,
    }
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=1000, **sizes, **heads))


def publish_two(root: Path, model: Any) -> WeightStore:
    """Two versions of what is trained of a model, each with its probe."""
    store = WeightStore(root / "weights")
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    for version in (0, 1):
        if version:
            with torch.no_grad():
                for weight in trained:
                    weight.add_(0.02 * torch.randn_like(weight))
        folder = root / f"made{version}"
        model.save_pretrained(folder, state_dict=plain_tensors(model))
        if len(trained) < len(list(model.parameters())):
            save_adapter(model, folder / FOLDER)
        ids = list(range(5, 45))
        probe = {"token_ids": ids, "logprobs": logprobs(model, ids, 1.0)}
        store.publish(version, folder, metadata={"probe": probe})
    return store


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> WeightStore:
    return publish_two(tmp_path_factory.mktemp("vllm"), tiny_model())


@pytest.fixture(scope="module")
def lora_store(tmp_path_factory: pytest.TempPathFactory) -> WeightStore:
    model = add_lora(tiny_model(), LearnerConfig(lora_rank=4))
    return publish_two(tmp_path_factory.mktemp("lora"), model)


def logprobs(model: Any, ids: list[int], temperature: float) -> list[float]:
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1] / temperature
    found: list[float] = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    return found


@pytest.fixture(scope="module")
def python_path(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """For vLLM's Python, where nothing of ours is installed."""
    folder = tmp_path_factory.mktemp("ns")
    (folder / "hintloop").symlink_to(repository)
    return f"{folder}:{Path(__file__).parent}"


@contextlib.contextmanager
def serving(folder: Path, model: Path, python_path: str, *more: str) -> Iterator[str]:
    """A server; its URL."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    command = [os.environ["HINTLOOP_VLLM_PYTHON"], "-m", "hintloop.rollout.vllm_server", str(model), *more]
    options = (
        f"--port {port} --max-model-len 1024 --max-num-seqs 16 --stream-interval 8 --skip-tokenizer-init"
    )
    command += options.split()
    env = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": python_path,
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


def metric(url: str, name: str) -> float:
    """What the server counts under a name."""
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"vllm:{name}{{"))


async def above(value: float, url: str, name: str) -> None:
    """Wait until a count of the server is above a value; requests go on meanwhile."""
    while await asyncio.to_thread(metric, url, name) <= value:  # noqa: ASYNC110 - it is of another process
        await asyncio.sleep(0.05)


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


async def check_every_token(url: str, store: WeightStore, cache: Path, way: type[Way] | None) -> None:
    """What is sampled before, while and after the weights change is recorded as the versions give it."""
    ways = [way() if way else None for _ in range(2)]
    patience = Patience(connect=60.0)
    ending = Pool([url], weights_uri=store.uri, stop_ids=STOPS, way=ways[0], patience=patience)
    endless = Pool([url], weights_uri=store.uri, stop_ids=[], way=ways[1], patience=patience)
    await ending.load_weights(store.fetch(0, cache), 0)
    for temperature in (1.0, 0.5, 0.0):
        sample = await ending.generate(PROMPT, Sampling(temperature, 60), session="a")
        assert (sample.token_ids[-1] in STOPS) == (sample.finish_reason == "stop")
        assert worst(store, cache, PROMPT, sample, temperature) < 1e-4
    await ending.close()
    await endless.load_weights(store.fetch(0, cache), 0)
    prompts = [[5, 6, number] for number in range(20, 28)]
    folder = store.fetch(1, cache)
    asked = [
        asyncio.create_task(endless.generate(prompt, Sampling(1.0, LONG), session=str(prompt)))
        for prompt in prompts
    ]
    await above(len(prompts) - 1, url, "num_requests_running")
    await above(metric(url, "generation_tokens_total"), url, "generation_tokens_total")
    await endless.load_weights(folder, 1)
    spans = {0} if way is Adapter else {0, 1}
    for prompt, sample in zip(prompts, await asyncio.gather(*asked), strict=True):
        assert list(sample.policy_versions) == sorted(sample.policy_versions)
        assert worst(store, cache, prompt, sample, 1.0) < 1e-4
        assert set(sample.policy_versions) == spans
    sample = await endless.generate(PROMPT, Sampling(1.0, 60), session="new")
    assert set(sample.policy_versions) == {1}
    assert worst(store, cache, PROMPT, sample, 1.0) < 1e-4
    await endless.close()


async def within_time(url: str, store: WeightStore, cache: Path, way: type[Way] | None) -> None:
    async with asyncio.timeout(DEADLINE_S):
        await check_every_token(url, store, cache, way)


def test_every_token_is_recorded_exactly_while_the_weights_change(
    store: WeightStore, python_path: str, tmp_path: Path
) -> None:
    with serving(tmp_path, store.fetch(0, tmp_path), python_path) as url:
        asyncio.run(within_time(url, store, tmp_path, None))


def test_every_token_is_recorded_exactly_while_adapters_come_and_go(
    lora_store: WeightStore, python_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model().save_pretrained(tmp_path / "base")
    found: list[float] = []
    score = VllmServer.score_adapter

    async def kept(self: VllmServer, ids: Any, *, name: str) -> list[float]:
        scores = await score(self, ids, name=name)
        version = int(name[1:7])
        model = Qwen3ForCausalLM.from_pretrained(lora_store.fetch(version, tmp_path), dtype=torch.float32)
        found.append(max(abs(a - b) for a, b in zip(scores, logprobs(model, ids, 1.0), strict=True)))
        return scores

    monkeypatch.setattr(VllmServer, "score_adapter", kept)
    with serving(tmp_path, tmp_path / "base", python_path, "--lora-rank", "4") as url:
        asyncio.run(within_time(url, lora_store, tmp_path, Adapter))
        cards = httpx.get(f"{url}/v1/models", timeout=5).json()["data"]
    print("largest differences of the probes:", found)
    assert max(found) < 1e-4  # of the probe, against the learner's merged model
    assert [card["id"][:7] for card in cards if card["parent"]][-1] == "v000001"


TRANSFER = (
    "--worker-extension-cls",
    "sim_transfer.Extension",
    "--weight-transfer-config",
    '{"backend": "sim"}',
)


def test_every_token_is_recorded_exactly_while_weights_are_sent_and_a_broken_transfer_ends_the_server(
    store: WeightStore, python_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", python_path)  # the sender runs in vLLM's environment
    ask, broken = publish_direct.Sender.ask, False

    async def ask_and_break(self: publish_direct.Sender, what: str, seconds: float, **details: Any) -> Any:
        nonlocal broken
        if what == "send" and not broken:
            broken = True
            self._process.kill()
        return await ask(self, what, seconds, **details)

    async def break_once(url: str) -> None:
        monkeypatch.setattr(publish_direct.Sender, "ask", ask_and_break)
        pool = Pool([url], weights_uri=store.uri, stop_ids=[999], way=Direct())
        async with asyncio.timeout(DEADLINE_S + START_S):
            await pool.load_weights(store.fetch(0, tmp_path), 0)  # by a server that was started again
            sample = await pool.generate(PROMPT, Sampling(1.0, 60), session="a")
            assert worst(store, tmp_path, PROMPT, sample, 1.0) < 1e-4
        await pool.close()

    with serving(tmp_path, store.fetch(0, tmp_path), python_path, *TRANSFER) as url:
        asyncio.run(within_time(url, store, tmp_path, Direct))
        asyncio.run(break_once(url))
    assert broken
    assert "is started again" in (tmp_path / "log").read_text()


NCCL = """
import inspect, sys
from pathlib import Path
from types import SimpleNamespace
import torch
from vllm.distributed.weight_transfer import nccl_common, packed_tensor
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferUpdateInfo
from hintloop.rollout.vllm_extension import iter_tensors
from hintloop.rollout.vllm_sender import DTYPES, NcclLink

assert all(isinstance(getattr(torch, name), torch.dtype) for name in DTYPES.values())
link = NcclLink()
info = nccl_common.NCCLWeightTransferInitInfo(**link.offer("127.0.0.1", 2))
assert (info.world_size, info.rank_offset, info.packed) == (3, 1, True)

met = []
nccl_common.stateless_init_process_group = lambda *place: met.append(place) or SimpleNamespace(device="cpu")
torch.accelerator.current_device_index = lambda: 0
link.join()  # vLLM's own trainer_init, but for the group itself
assert met == [(info.master_address, info.master_port, 0, 3, 0)]

told = link.describe(Path(sys.argv[1]))
NCCLWeightTransferUpdateInfo(**told)
produce, got = packed_tensor.packed_nccl_broadcast_producer, {}

def producer(**settings):  # vLLM's own packing and unpacking, but for the broadcast between them
    inspect.signature(produce).bind(**settings)
    size = settings["buffer_size_bytes"]
    assert size == info.packed_buffer_size_bytes and settings["num_buffers"] == info.packed_num_buffers
    kinds = [getattr(torch, name) for name in told["dtype_names"]]
    chunk = packed_tensor.pack_tensors(settings["iterator"], settings["post_iter_func"], size)
    got.update(packed_tensor.unpack_tensor(
        chunk.packed_tensor, told["names"], told["shapes"], kinds, chunk.tensor_sizes))

packed_tensor.packed_nccl_broadcast_producer = producer
link.send()
expected = dict(iter_tensors(Path(sys.argv[1])))
assert got.keys() == expected.keys() and all(torch.equal(got[name], expected[name]) for name in got)
print("all", len(got))
"""


def test_the_sender_calls_vllm_as_it_wants_to_be_called(
    store: WeightStore, python_path: str, tmp_path: Path
) -> None:
    command = [os.environ["HINTLOOP_VLLM_PYTHON"], "-c", NCCL, str(store.fetch(0, tmp_path))]
    env = os.environ | {"PYTHONPATH": python_path}
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.split()[-2:] == ["all", "24"]
