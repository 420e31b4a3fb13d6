"""The whole loop on two real vLLM servers, one of which is killed in the middle of it.

``HINTLOOP_VLLM_PYTHON`` names a Python with vLLM 0.32 or newer; ``containers/vllm-env`` makes one.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import Qwen3ForCausalLM

from hintloop.replay.episode import Episode
from hintloop.replay.journal import Journal
from hintloop.replay.weights import WeightStore
from hintloop.rollout.vllm_extension import CACHE

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
STEPS, GROUPS, GROUP_SIZE = 6, 2, 4
SMALL = (
    f"rollout.group_size={GROUP_SIZE}",
    f"rollout.groups_per_step={GROUPS}",
    "rollout.episodes_in_flight=8",
    "rollout.idle_timeout_s=3600",  # the learner is held
    'evaluation.splits=["heldfn"]',
    "evaluation.temperatures=[1.0]",
    "evaluation.num_tasks=2",
    "evaluation.during=[]",
    f"learner.steps={STEPS}",
    f"learner.keep_versions={STEPS + 1}",
    "learner.grad_norm_every=0",
    "learner.learning_rate=1e-3",  # so that versions differ by much more than TOLERANCE
    "learner.warmup_steps=0",
)
TOLERANCE = 1e-4
"""Nats."""
PROBE = list(range(5, 69))
WAIT_S = 600.0
"""For anything to happen; a server that starts on a busy machine takes long."""


class Server:
    """A vLLM server, started as the documentation tells users to."""

    def __init__(self, folder: Path, repository: Path) -> None:
        folder.mkdir()
        (folder / "ns").mkdir()
        (folder / "ns" / "hintloop").symlink_to(repository)
        with socket.create_server(("127.0.0.1", 0)) as sock:
            port = str(sock.getsockname()[1])
        self.url, self.log = f"http://127.0.0.1:{port}", folder / "log"
        model = str(repository / "agent" / "student" / "student-tiny")
        command = ["-m", "hintloop.rollout.vllm_server", model, "--port", port]
        more = ["--max-num-seqs", "16", "--kv-cache-memory-bytes", str(64 << 20)]
        env = os.environ | {
            "PYTHONPATH": str(folder / "ns"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            CACHE: str(folder / "cache"),
        }
        with self.log.open("w") as log:
            python = os.environ["HINTLOOP_VLLM_PYTHON"]
            self.process = subprocess.Popen([python, *command, *more], env=env, stdout=log, stderr=log)

    def api_process(self) -> int:
        """vLLM's own process, which the documented command starts and watches."""
        (api,) = children(self.process.pid)
        return api[0]

    def score(self) -> tuple[str, list[float]] | None:
        """The name of its weights, and what they give for the probe; None while it changes or is away."""
        params = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False}
        body = {"token_ids": PROBE, "sampling_params": params}
        try:
            before = self._ask("GET", "/weight_info")["weight_version"]
            found = self._ask("POST", "/inference/v1/generate", json=body)["prompt_logprobs"]
            after = self._ask("GET", "/weight_info")["weight_version"]
        except (httpx.HTTPError, ValueError):
            return None
        scores = [
            float(entry[str(token)]["logprob"]) for entry, token in zip(found[1:], PROBE[1:], strict=True)
        ]
        return (before, scores) if before == after else None

    def sampled(self) -> float:
        """Tokens since it was started, by its own count."""
        text = httpx.get(f"{self.url}/metrics", timeout=60).text
        lines = [line for line in text.splitlines() if line.startswith("vllm:generation_tokens_total")]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def _ask(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        found: dict[str, Any] = (
            httpx.request(method, self.url + path, timeout=30, **options).raise_for_status().json()
        )
        return found

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Run:
    """A run of ``hintloop play`` on servers, and the learner's own model of each version."""

    def __init__(self, folder: Path, urls: list[str]) -> None:
        self.folder, self.log = folder, folder.parent / "play.log"
        self.store, self.journal = WeightStore(folder / "weights"), Journal(str(folder / "journal"))
        settings = [*SMALL, f"run.output={folder.parent}", f"rollout.engines={json.dumps(urls)}"]
        command = [
            sys.executable,
            "-m",
            "hintloop.cli.main",
            "play",
            "--preset",
            "smoke",
            "--name",
            folder.name,
        ]
        command += [word for setting in settings for word in ("--set", setting)]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        self.model = cache(self._model)

    def _model(self, version: int) -> Any:
        folder = self.store.fetch(version, self.folder.parent / "fetched")
        return Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def logprobs(self, version: int, ids: list[int], head: int | None = None) -> list[float]:
        """Of each token but the first; ``head``: with the output head of that version."""
        model = self.model(version)
        weight = self.model(version if head is None else head).model.embed_tokens.weight
        with torch.no_grad():
            logits = model.model(torch.tensor([ids])).last_hidden_state[0, :-1] @ weight.T
        found: list[float] = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
        return found

    def learner(self) -> int:
        return next(pid for pid, words in children(self.process.pid) if "learn" in words)

    def latest(self) -> int:
        """The version that servers are brought to; -1: none."""
        manifest = self.store.latest()
        return -1 if manifest is None else manifest.version

    def ready_servers(self) -> dict[str, int]:
        """URL -> version of the servers that the rollout side samples from."""
        try:
            servers = json.loads((self.folder / "status" / "rollout.json").read_text()).get("servers", [])
        except FileNotFoundError:
            return {}
        return {server["url"]: server["version"] for server in servers if server["state"] == "ready"}

    def episodes(self) -> list[Episode]:
        return [episode for name in self.journal.segments() for episode in self.journal.read(name)]

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(90)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def children(parent: int) -> list[tuple[int, list[str]]]:
    """Pid and command words of a process's children."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            stat, words = (
                folder.joinpath("stat").read_text(),
                folder.joinpath("cmdline").read_text(errors="replace"),
            )
            if int(stat.rpartition(")")[2].split()[1]) == parent:
                found.append((int(folder.name), words.split("\0")))
    return found


def worst(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


class Watch:
    """Compares what the servers compute with the learner's models, again and again."""

    def __init__(self, run: Run, servers: list[Server]) -> None:
        self.run, self.servers = run, servers
        self.seen: dict[str, set[int]] = {server.url: set() for server in servers}
        """Versions by server that were found to be served exactly."""

    def look(self) -> None:
        for server in self.servers:
            if (scored := server.score()) is None or scored[0] == "default":
                continue
            version = int(scored[0].partition("-")[0].removeprefix("v"))
            assert worst(scored[1], self.run.logprobs(version, PROBE)) <= TOLERANCE, (server.url, version)
            self.seen[server.url].add(version)

    def until(self, true: Callable[[], bool], what: str, *, looking: bool = True) -> None:
        """Wait; without ``looking``, which takes long on a busy machine, what comes true is seen at once."""
        deadline = time.monotonic() + WAIT_S
        while not true():
            ended = self.run.process.poll()
            assert time.monotonic() < deadline, self._told(f"{what}: not within {WAIT_S:g} s")
            assert ended in (None, 0), self._told(f"{what}: play ended with {ended}")
            assert ended is None or true(), self._told(f"{what}: not before play ended")
            if looking:
                self.look()
            time.sleep(0.1 if looking else 0.02)

    def _told(self, what: str) -> str:
        logs = [self.run.log, *(server.log for server in self.servers)]
        tails = [f"{log}:\n{log.read_text()[-1500:]}" for log in logs]
        return "\n".join([what, f"seen: {self.seen}", *tails])


@pytest.fixture
def servers(tmp_path: Path, repository: Path) -> Iterator[list[Server]]:
    with contextlib.ExitStack() as stack:
        made = []
        for place in range(2):
            made.append(Server(tmp_path / f"server{place}", repository))
            stack.callback(made[-1].close)
        yield made


@contextlib.contextmanager
def held(watch: Watch) -> Iterator[Callable[[], None]]:
    """Keep the learner from learning; what is given lets it do one step.

    Or the run might be over before a server can be killed, and before that one can be up again.
    """
    run, pid = watch.run, watch.run.learner()

    def step() -> None:
        before = run.latest()
        os.kill(pid, signal.SIGCONT)
        watch.until(lambda: run.latest() > before, "one step of the learner", looking=False)
        os.kill(pid, signal.SIGSTOP)

    os.kill(pid, signal.SIGSTOP)
    try:
        yield step
    finally:
        os.kill(pid, signal.SIGCONT)


def test_the_loop_on_vllm_survives_a_killed_server(tmp_path: Path, servers: list[Server]) -> None:
    torch.set_num_threads(1)
    victim, other = servers
    run = Run(tmp_path / "run", [server.url for server in servers])
    watch = Watch(run, servers)
    seen = watch.seen

    def all_at(version: int) -> bool:
        return all(max(of, default=-1) >= version for of in seen.values())

    try:
        watch.until(lambda: run.latest() >= 1, "trained weights", looking=False)
        with held(watch) as step:
            first = run.latest()
            assert first + 3 < STEPS
            watch.until(lambda: all_at(first), "trained weights on both")
            before = victim.sampled()
            step()  # after which there is something to play
            killed_at = run.latest()
            watch.until(lambda: victim.sampled() > before, "work for the server", looking=False)
            os.kill(victim.api_process(), signal.SIGKILL)
            step()
            watch.until(lambda: max(seen[other.url]) > killed_at, "newer weights on the server that is left")
            watch.until(
                lambda: run.ready_servers().get(victim.url, -1) > killed_at, "the server in the pool again"
            )
            step()
            newest = run.latest()
            watch.until(lambda: all_at(newest), "weights on both that are newer still")
        watch.until(lambda: run.process.poll() is not None, "the end of the run")
        # The last weights are sure to be on one: at the end the other may still be getting them, and stay paused.
        deadline = time.monotonic() + WAIT_S
        while max(set.union(*seen.values())) < STEPS and time.monotonic() < deadline:
            watch.look()
        assert max(set.union(*seen.values())) == STEPS, seen
        assert victim.sampled() > 100
    finally:
        run.close()
    check_versions(run, set.union(*seen.values()))
    check_nothing_lost_or_repeated(run)
    check_records(run)


def check_versions(run: Run, seen: set[int]) -> None:
    """The probe tells a version from the one before it, and from one that kept the head of that."""
    assert len(seen) >= 3
    for version in seen - {0}:
        right = run.logprobs(version, PROBE)
        for wrong in (run.logprobs(version - 1, PROBE), run.logprobs(version, PROBE, head=version - 1)):
            assert worst(right, wrong) > 10 * TOLERANCE


def check_nothing_lost_or_repeated(run: Run) -> None:
    """What the rollout side says that it finished is in the journal, once; so is what was trained on."""
    episodes = run.episodes()
    ids = [episode.episode_id for episode in episodes]
    assert len(ids) == len(set(ids))
    lines = (run.folder / "metrics" / "rollout.jsonl").read_text().splitlines()
    finished = [(line["group"], line["episodes"]) for line in map(json.loads, lines)]
    assert sorted(finished) == sorted(Counter(episode.group_id for episode in episodes).items())
    assert {size for _, size in finished} == {GROUP_SIZE}
    records = [json.loads(line) for line in (run.folder / "trained.jsonl").read_text().splitlines()]
    trained = [episode_id for record in records for episode_id in record["episodes"]]
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert len(trained) == len(set(trained)) == STEPS * GROUPS * GROUP_SIZE
    assert set(trained) <= set(ids)
    status = json.loads((run.folder / "status" / "rollout.json").read_text())
    assert status["groups_dropped"] == 0
    assert status["lost"] == {}  # a turn whose server is killed goes on at the other one


def check_records(run: Run) -> None:
    """Each sampled token's log-probability is that of the version it is recorded for."""
    versions = set()
    for episode in run.episodes():
        for version in set(episode.policy_versions) - {-1}:
            versions.add(version)
            known = [0.0, *run.logprobs(version, list(episode.token_ids))]
            at = [i for i, of in enumerate(episode.policy_versions) if of == version]
            ours = [float(episode.logprobs[i]) for i in at]
            assert worst(ours, [known[i] for i in at]) <= TOLERANCE, episode.episode_id
    assert len(versions) >= 3
