"""A server of real vLLM on the CPU, as the tests of this folder start one, and a model that it can have.

``HINTLOOP_VLLM_PYTHON`` names a Python with vLLM 0.32 or newer, ``fsspec`` and ``structlog``;
``containers/vllm-env`` makes one.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from hintloop.rollout.vllm_extension import CACHE

START_S, STOP_S = 300.0, 60.0
VOCABULARY = 64
ADAPTERS = ("--lora-rank", "4")
TRANSFER = (
    "--worker-extension-cls",
    "sim_transfer.Extension",
    "--weight-transfer-config",
    '{"backend": "sim"}',
)
"""vLLM has no weight transfer of its own that works on a CPU."""


def tiny_model() -> Any:
    """A model with a tied head; heads of 32 are the smallest that vLLM has on a CPU."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config)


def python_path(folder: Path, repository: Path) -> str:
    """For vLLM's Python, where nothing of ours is installed; links in ``folder``."""
    (folder / "hintloop").symlink_to(repository)
    return f"{folder}:{Path(__file__).parent}"


@contextlib.contextmanager
def serving(folder: Path, model: Path, path: str, *more: str, max_length: int) -> Iterator[str]:
    """A server, whose log and cache lie in ``folder``; its URL."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    options = (
        f"--port {port} --max-model-len {max_length} --max-num-seqs 16 --stream-interval 8"
        f" --skip-tokenizer-init --kv-cache-memory-bytes {64 << 20}"
    )
    python = os.environ["HINTLOOP_VLLM_PYTHON"]
    command = [python, "-m", "hintloop.rollout.vllm_server", str(model), *more, *options.split()]
    env = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",  # threads of a tiny model wait for each other where others compute as well
        "PYTHONPATH": path,
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
        try:
            process.wait(STOP_S)
        finally:
            process.kill()


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False
