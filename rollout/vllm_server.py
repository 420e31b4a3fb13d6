"""One vLLM server as the rollout side needs it: ``python -m hintloop.rollout.vllm_server MODEL --port 8100``.

For vLLM's own environment; it needs there what the worker extension needs. ``--lora-rank 16`` lets it take versions as
adapters. What follows its own options goes to vLLM, and wins. A server that was up and ends is started again: one whose
model is lost ends by itself, and the pool takes it back once it has the newest weights. vLLM leaves its engine running,
with all its memory, when its API process is killed, so everything that it started is killed whenever that one ends, and
it ends with this process.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import http.client
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version

from hintloop.rollout.vllm_extension import WorkerExtension

LOGPROBS_MODE = "processed_logprobs"
"""What log-probabilities must be of: the distribution that tokens are sampled from."""
OPTIONS = {
    "--worker-extension-cls": f"{WorkerExtension.__module__}.{WorkerExtension.__qualname__}",
    "--logprobs-mode": LOGPROBS_MODE,
    "--generation-config": "vllm",  # a model's own one may cut off probabilities
    "--stream-interval": "16",  # tokens in one piece of an answer: less work on both sides
}
CPU_OPTIONS = {
    "--dtype": "float32",  # as the learner computes there
    "--kv-cache-memory-bytes": str(2 << 30),  # by itself it takes most of the machine's memory
}
"""Needed on a CPU, beside ``--enforce-eager``: compiled code would go on with old weights."""
ENV = {"VLLM_NO_USAGE_STATS": "1"}  # nothing is told to its makers
CPU_ENV = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else all servers of a machine compute on the same cores
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # a process less, which is for threads that are bound
    "TORCHDYNAMO_DISABLE": "1",  # it compiles some functions all the same, for which an image has no compiler
}
ADAPTER_SLOTS = 3
"""Adapters that requests may use at the same time: of this version, the one before, and one that is being loaded."""
ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Largest ranks that vLLM can be told."""
ADAPTER_ENV = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
POLL_S = 0.2
SILENT_S = 120.0
"""How long a server that was ready may not answer: one whose engine is dead may hang instead of ending."""
START_S = 3600.0
"""How long a server may take to come up."""
PAUSE_S = 2.0
"""Before it is started again; each time that it did not come up, twice as long."""
STARTS = 6
"""Starts in a row without an answer after which a server that was up is given up: what one that was killed leaves,
memory of a GPU or a port, may be free only after a while."""
STOP_S = 30.0
"""How long vLLM may take to end when it is told to."""
_PR_SET_PDEATHSIG = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; the exit status, which is vLLM's when it does not come up."""
    parser = argparse.ArgumentParser(prog="python -m hintloop.rollout.vllm_server", allow_abbrev=False)
    parser.add_argument("model", help="folder or name of the model that the run starts from")
    parser.add_argument("--host", default="127.0.0.1", help="it obeys whoever reaches it: no public address")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument(
        "--lora-rank", type=int, default=0, help="rank of the adapters that it takes; 0: none"
    )
    parser.add_argument(
        "--start-timeout",
        type=float,
        default=START_S,
        help="seconds until it must be ready (default: %(default)g)",
    )
    ours, more = parser.parse_known_args(arguments)
    url = f"http://{ours.host}:{ours.port}"
    if answers(url):
        parser.error(f"something answers at {url} already")
    if not 0 <= ours.lora_rank <= ADAPTER_RANKS[-1]:
        parser.error(f"--lora-rank is from 0 to {ADAPTER_RANKS[-1]}")
    on_cpu = is_cpu_build()
    address = ["--host", ours.host, "--port", str(ours.port)]
    words = [*command(ours.model, on_cpu=on_cpu, lora_rank=ours.lora_rank), *address, *more]
    env = {**ENV, **(CPU_ENV if on_cpu else {}), **os.environ, "VLLM_SERVER_DEV_MODE": "1"}
    env |= ADAPTER_ENV if ours.lora_rank else {}
    return keep_up(partial(start, words, env), partial(answers, url), name=url, start_s=ours.start_timeout)


def command(model: str, *, on_cpu: bool, lora_rank: int = 0) -> list[str]:
    """vLLM's command for a model, all but the address."""
    options = OPTIONS | (CPU_OPTIONS if on_cpu else {})
    flags = ["--enable-scale-out", "--disable-uvicorn-access-log", *(["--enforce-eager"] if on_cpu else [])]
    if lora_rank:
        flags.append("--enable-lora")
        room = min(rank for rank in ADAPTER_RANKS if rank >= lora_rank)
        options |= {"--max-lora-rank": str(room), "--max-loras": str(ADAPTER_SLOTS)}
    return [*_program(model), *(word for pair in options.items() for word in pair), *flags]


def is_cpu_build() -> bool:
    """Whether the vLLM that is installed computes on the CPU."""
    try:
        return "cpu" in version("vllm")
    except PackageNotFoundError:
        version("vllm-cpu")  # neither: its name in the error says what is missing
        return True


def _program(model: str) -> list[str]:
    try:
        version("vllm")
    except PackageNotFoundError:  # of the package vllm-cpu, the command ``vllm`` fails
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model]


def start(words: Sequence[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a process in a group of its own that is told to end when this process ends."""
    parent = os.getpid()

    def leash() -> None:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return subprocess.Popen(words, env=env, start_new_session=True, preexec_fn=leash)


def answers(url: str) -> bool:
    """Whether a server is well."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # it is on this machine
    try:
        with opener.open(f"{url}/health", timeout=2) as response:
            return bool(response.status == 200)
    except (OSError, http.client.HTTPException):
        return False


def keep_up(
    start: Callable[[], subprocess.Popen[bytes]],
    answers: Callable[[], bool],
    *,
    name: str,
    start_s: float = START_S,
) -> int:
    """Run a server until a signal says stop; 0 then.

    Its own status when it does not come up (each time within ``start_s``), or not any more.
    """
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    was_up, fruitless = False, 0
    while True:
        process = start()
        ready = _watch(process, answers, stop, name, start_s)
        code = _end(process)
        if stop.is_set():
            return 0
        was_up, fruitless = was_up or ready, 0 if ready else fruitless + 1
        what = "ended" if ready else "did not come up"
        if not was_up or fruitless == STARTS:
            _say(f"{name} {what} (exit status {code})")
            return code or 1
        _say(f"{name} {what} (exit status {code}) and is started again")
        stop.wait(PAUSE_S * 2**fruitless)


def _watch(
    process: subprocess.Popen[bytes],
    answers: Callable[[], bool],
    stop: threading.Event,
    name: str,
    start_s: float,
) -> bool:
    """Wait until a server ends, has to, or hangs; whether it was ready."""
    ready, heard = False, time.monotonic()
    while not _ended(process) and not stop.wait(POLL_S):
        silent_s, limit_s = time.monotonic() - heard, SILENT_S if ready else start_s
        if ready and silent_s < SILENT_S / 4:
            continue
        if answers():
            if not ready:
                _say(f"{name} is ready")
            ready, heard = True, time.monotonic()
        elif silent_s > limit_s:
            _say(f"{name} has not answered for {limit_s:g} s")
            break
    return ready


def _ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether it has ended; it is not reaped, so its group cannot be another's yet."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _end(process: subprocess.Popen[bytes]) -> int:
    """End a process and everything in its group; its exit status."""
    if not _ended(process):
        process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + STOP_S
    while not _ended(process) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def _say(line: str) -> None:
    print(f"vllm_server: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
