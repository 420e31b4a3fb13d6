"""The whole rollout process on a real environment server, with a scripted policy and a stand-in learner."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from hintloop.agent.policy import load_renderer
from hintloop.envs import tasksets  # noqa: F401 - registers the bundled sets
from hintloop.envs.registry import get_task, load_taskset
from hintloop.replay.episode import Episode, Outcome
from hintloop.replay.journal import Journal, JournalWriter
from hintloop.replay.weights import WeightStore
from hintloop.rollout import run as whole_run
from hintloop.rollout.config import EvaluationConfig, RolloutConfig, TeachersConfig, TeacherSpec
from hintloop.rollout.engines.scripted import ScriptedEngine
from hintloop.rollout.loading import Agent
from hintloop.rollout.manager import TooManyLost, group_id
from hintloop.rollout.pacing import LearnerSilent
from hintloop.rollout.run import RolloutSummary, run_rollout
from hintloop.rollout.sampler import choose_task
from hintloop.rollout.weights import Fetched, NoWeights, WeightsRefused

pytestmark = pytest.mark.usefixtures("within_time")
SEED = 5
FAILING = '<tool_call>\n{"name": "read_file", "arguments": {"path": "nowhere.py"}}\n</tool_call>'
SUBMIT = '<tool_call>\n{"name": "submit", "arguments": {}}\n</tool_call>'
SERVER = """
import sys
from pathlib import Path
from hintloop.envs import tasksets
from hintloop.envs.registry import load_taskset
from hintloop.envs.sandbox.local import LocalProvider
from hintloop.envs.server import serve
load_taskset("bugfix")
port, ready_file = sys.argv[1:]
serve(LocalProvider(), port=int(port), max_sessions=12, ready_file=Path(ready_file))
"""


@contextlib.contextmanager
def served(*commands: list[str], folder: Path) -> Iterator[list[str]]:
    """Start servers side by side, each with a ready file as its last argument; their URLs."""
    files = [folder / f"url{number}" for number in range(len(commands))]
    started = [
        subprocess.Popen([sys.executable, *command, str(file)])
        for command, file in zip(commands, files, strict=True)
    ]
    try:
        deadline = time.monotonic() + 60
        while not all(file.exists() for file in files):
            assert all(process.poll() is None for process in started), "a server did not start"
            assert time.monotonic() < deadline, "a server is not ready after a minute"
            time.sleep(0.05)
        yield [file.read_text().strip() for file in files]
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait(30)


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    expert = ["-m", "hintloop.rollout.expert_server", "--ready-file"]
    with served(["-c", SERVER, "0"], expert, folder=tmp_path_factory.mktemp("servers")) as found:
        yield found


@pytest.fixture(scope="module")
def env_url(urls: list[str]) -> str:
    return urls[0]


@pytest.fixture(scope="module")
def expert_url(urls: list[str]) -> str:
    return urls[1]


def splits() -> dict[str, list[str]]:
    return {name: list(ids) for name, ids in load_taskset("bugfix").splits().items()}


def script(session: str, turn: int) -> str:
    """One error; then half of the episodes write the reference solution, and all submit."""
    if turn != 1 or not session.startswith("g"):
        return FAILING if turn == 0 else SUBMIT
    index, number = int(session[1:7]), int(session.split("-")[1].split(".")[0])
    if number % 2:
        return SUBMIT
    solution = get_task(choose_task(splits()["train"], SEED, index)).solution["solution.py"]
    arguments = {"path": "solution.py", "content": solution}
    return f"<tool_call>\n{json.dumps({'name': 'write_file', 'arguments': arguments})}\n</tool_call>"


class Learner(threading.Thread):
    """Takes ``per_step`` groups for a version, as the learner does; the last version is final."""

    def __init__(self, folder: Path, student: Path, *, per_step: int, last: int) -> None:
        super().__init__(daemon=True)
        self.store = WeightStore(folder / "weights")
        self.journal = Journal(folder / "journal")
        self.student, self.per_step, self.last = student, per_step, last
        self.stop = threading.Event()
        if self.store.latest() is None:
            self.store.publish(0, student, metadata={})

    def run(self) -> None:
        latest = self.store.latest()
        assert latest is not None
        version = latest.version
        while version < self.last and not self.stop.wait(0.02):
            if len(self.journal.segments()) >= (version + 1) * self.per_step:
                version += 1
                self.store.publish(version, self.student, metadata={"final": version == self.last})


def rollout(folder: Path, url: str | list[str], student: Path, **changes: Any) -> RolloutSummary:
    chat = load_renderer(student)
    stop = chat.renderer.get_stop_token_ids()[0]

    def load(first: Fetched) -> Agent:
        assert (first.folder / "tokenizer.json").is_file()
        seconds = changes.get("seconds_per_turn", 0.0)
        engine = ScriptedEngine(
            chat.tokenizer, script, stop_id=stop, version=first.version, seconds_per_turn=seconds
        )
        return Agent(engine, chat)

    return run_rollout(
        run_dir=folder,
        journal_uri=str(folder / "journal"),
        weights_uri=str(folder / "weights"),
        env_url=url,
        splits=splits(),
        model="student",
        env="coding",
        seed=SEED,
        config=RolloutConfig(
            group_size=4,
            groups_per_step=2,
            max_staleness=1,
            episodes_in_flight=8,
            max_new_tokens=2000,
            max_tokens=6000,
            poll_s=0.02,
            idle_timeout_s=changes.get("idle_timeout_s", 30.0),
            **changes.get("config", {}),
        ),
        evaluation=EvaluationConfig(
            splits=("heldfn",), num_tasks=4, num_tasks_during=2, during=(2,), temperatures=(0.0,), in_flight=4
        ),
        teachers=changes.get("teachers", TeachersConfig()),
        load_agent=load,
    )


def stop_at(journal: Journal, *, segments: int) -> threading.Thread:
    """Ask this process to stop when so many segments are in the journal."""

    def stop_soon() -> None:
        deadline = time.monotonic() + 60
        while len(journal.segments()) < segments and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    stopper = threading.Thread(target=stop_soon)
    stopper.start()
    return stopper


def journalled(folder: Path) -> list[Episode]:
    return Journal(folder / "journal").reader().poll()


def test_a_run_from_the_first_weights_to_the_last(
    env_url: str, expert_url: str, student_folder: Path, tmp_path: Path
) -> None:
    learner = Learner(tmp_path, student_folder, per_step=2, last=4)
    learner.start()
    teachers = TeachersConfig(
        teachers=(TeacherSpec(name="expert", base_url=f"{expert_url}/v1", model="expert"),), deadline_s=60.0
    )
    summary = rollout(tmp_path, env_url, student_folder, teachers=teachers)
    learner.join(10)

    assert (summary.stopped, summary.version, summary.lost) == ("final", 4, {})
    episodes = journalled(tmp_path)
    groups = sorted({episode.group_id for episode in episodes})
    assert len(groups) == summary.groups >= 8
    assert len(episodes) == 4 * len(groups)
    for episode in episodes:
        solved = int(episode.episode_id.split("-")[1]) % 2 == 0
        assert episode.outcome is (Outcome.SOLVED if solved else Outcome.FAILED)
        assert episode.reward == float(solved)
        assert [site.kind for site in episode.hint_sites] == ["file_not_found"]
        assert any('"path": "solution.py"' in pair.chosen_text for pair in episode.pairs)
    for place, episode in enumerate(episodes):  # the learner takes two groups of four for a version, in order
        started = min(version for version in episode.policy_versions if version >= 0)
        assert place // 4 // 2 - started <= 1
    rows = [json.loads(line) for line in (tmp_path / "evaluation.jsonl").read_text().splitlines()]
    assert [(row["label"], row["n"], row["lost"]) for row in rows] == [
        ("before", 4, 0),
        ("during", 2, 0),
        ("after", 4, 0),
    ]
    assert (rows[0]["version"], rows[2]["version"]) == (0, 4)
    assert rows[1]["version"] >= 2
    status = json.loads((tmp_path / "status" / "rollout.json").read_text())
    assert status["state"] == "finished"
    assert status["groups_journalled"] == len(groups)
    assert status["teachers"]["pairs"] >= len(episodes)
    assert len(list((tmp_path / "cache" / "weights").glob("v*"))) <= 2
    assert len((tmp_path / "metrics" / "rollout.jsonl").read_text().splitlines()) == len(groups)


def test_a_stopped_run_goes_on_where_the_journal_ends(
    env_url: str, student_folder: Path, tmp_path: Path
) -> None:
    first = Learner(tmp_path, student_folder, per_step=2, last=2)
    first.start()
    first.join(0.1)

    first.last = 100  # it goes on for as long as it is let
    stopper = stop_at(first.journal, segments=3)
    stopped = rollout(tmp_path, env_url, student_folder)
    stopper.join()
    first.stop.set()
    first.join(10)
    assert stopped.stopped == "signal"
    before = {episode.episode_id for episode in journalled(tmp_path)}

    latest = first.store.latest()
    assert latest is not None
    second = Learner(tmp_path, student_folder, per_step=2, last=latest.version + 3)
    second.start()
    summary = rollout(tmp_path, env_url, student_folder)
    second.join(10)

    episodes = journalled(tmp_path)
    ids = [episode.episode_id for episode in episodes]
    groups = sorted({episode.group_id for episode in episodes})
    assert summary.stopped == "final"
    assert before < set(ids)
    assert len(ids) == len(set(ids)) == 4 * len(groups)
    assert groups[: 2 * summary.version] == [group_id(index) for index in range(2 * summary.version)]
    rows = [json.loads(line) for line in (tmp_path / "evaluation.jsonl").read_text().splitlines()]
    assert [row["label"] for row in rows].count("before") == 1


def test_a_run_goes_on_without_a_server_that_dies_and_through_a_journal_that_fails_for_a_while(
    env_url: str, student_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim_url = tmp_path / "victim"
    victim = subprocess.Popen([sys.executable, "-c", SERVER, "0", str(victim_url)])
    append, calls = JournalWriter.append, iter(range(10**6))

    def failing(writer: JournalWriter, episodes: Any) -> str:
        call = next(calls)
        if call == 1:
            victim.kill()
        if 1 <= call <= 3:
            raise OSError(28, "No space left on device")
        return append(writer, episodes)

    monkeypatch.setattr(JournalWriter, "append", failing)
    learner = Learner(tmp_path, student_folder, per_step=2, last=4)
    try:
        deadline = time.monotonic() + 60
        while not victim_url.exists():
            assert victim.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        learner.start()
        urls = [victim_url.read_text().strip(), env_url]
        summary = rollout(tmp_path, urls, student_folder, seconds_per_turn=0.02)
    finally:
        victim.kill()
        victim.wait(10)
    learner.join(10)
    assert (summary.stopped, summary.version) == ("final", 4)
    assert set(summary.lost) <= {"environment"}
    ids = [episode.episode_id for episode in journalled(tmp_path)]
    assert len(ids) == len(set(ids)) == 4 * summary.groups
    status = json.loads((tmp_path / "status" / "rollout.json").read_text())
    assert [(server["url"], server["state"]) for server in status["env_servers"]] == [
        (urls[0], "down"),
        (env_url, "ready"),
    ]
    assert status["failures"]["storage"] == 3
    assert status["loop"].keys() == {"lag_p50_ms", "lag_p99_ms", "lag_max_ms"}
    assert status["waits"] == []


class OnlyServer:
    """An environment server that can be killed, and starts again at the port that it had."""

    def __init__(self, folder: Path) -> None:
        self.ready_file = folder / "only"
        self.port = "0"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> str:
        """Its URL, when it is ready; the one that runs, if any."""
        if self.process is None:
            self.process = subprocess.Popen([sys.executable, "-c", SERVER, self.port, str(self.ready_file)])
            deadline = time.monotonic() + 60
            while not self.ready_file.exists():
                assert self.process.poll() is None, "the server did not start"
                assert time.monotonic() < deadline, "the server is not ready after a minute"
                time.sleep(0.05)
        url = self.ready_file.read_text().strip()
        self.port = url.rpartition(":")[2]
        return url

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(10)
            self.process = None
            self.ready_file.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def only_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnlyServer]:
    server = OnlyServer(tmp_path_factory.mktemp("only"))
    yield server
    server.kill()


def kill_at_the_second_append(server: OnlyServer, patch: pytest.MonkeyPatch) -> None:
    append, calls = JournalWriter.append, iter(range(10**6))

    def killing(writer: JournalWriter, episodes: Any) -> str:
        if next(calls) == 1:
            server.kill()
        return append(writer, episodes)

    patch.setattr(JournalWriter, "append", killing)


def test_a_run_waits_for_its_only_environment_server_to_come_back(
    only_server: OnlyServer, student_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = only_server.start()
    kill_at_the_second_append(only_server, monkeypatch)
    status_file = tmp_path / "status" / "rollout.json"

    def status() -> dict[str, Any]:
        return dict(json.loads(status_file.read_text())) if status_file.exists() else {}

    def start_again() -> None:
        deadline = time.monotonic() + 60
        while [each["state"] for each in status().get("env_servers", [])] != ["down"]:
            if time.monotonic() > deadline:
                return
            time.sleep(0.02)
        again.append(only_server.start())

    again: list[str] = []
    starter = threading.Thread(target=start_again)
    learner = Learner(tmp_path, student_folder, per_step=2, last=4)
    starter.start()
    learner.start()
    summary = rollout(tmp_path, url, student_folder, seconds_per_turn=0.02)
    learner.join(10)
    starter.join()
    assert again == [url]
    assert (summary.stopped, summary.version) == ("final", 4)
    assert set(summary.lost) <= {"environment"}
    ids = [episode.episode_id for episode in journalled(tmp_path)]
    assert len(ids) == len(set(ids)) == 4 * summary.groups
    assert {each.split("-")[0] for each in ids} >= {group_id(index) for index in range(8)}
    assert [(server["url"], server["state"]) for server in status()["env_servers"]] == [(url, "ready")]
    assert status()["groups_dropped"] == 0


def test_a_run_whose_only_environment_server_stays_away_ends_with_a_message(
    only_server: OnlyServer, student_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = only_server.start()
    kill_at_the_second_append(only_server, monkeypatch)
    monkeypatch.setattr(whole_run, "ENV_WAIT_S", 3.0)
    learner = Learner(tmp_path, student_folder, per_step=2, last=100)
    learner.start()
    limits = {"tries_per_episode": 2, "max_groups_lost": 2}
    with pytest.raises(TooManyLost, match=r"2 groups in a row were lost; .*: environment \d+$"):
        rollout(tmp_path, url, student_folder, config=limits)
    learner.stop.set()
    learner.join(10)
    assert only_server.process is None
    ids = [episode.episode_id for episode in journalled(tmp_path)]
    assert len(ids) == len(set(ids)) >= 8
    status = json.loads((tmp_path / "status" / "rollout.json").read_text())
    assert status["state"].startswith("failed: 2 groups in a row were lost")
    (server,) = status["env_servers"]
    assert (server["url"], server["state"], server["in_use"]) == (url, "down", 0)
    assert server["reason"]


def test_a_curriculum_with_groups_played_anew_goes_on_after_a_stop(
    env_url: str, student_folder: Path, tmp_path: Path
) -> None:
    config = {"task_sampling": "curriculum", "task_weights": {"*": 2.0}, "resample_equal": 1}
    # The script solves the tasks of a uniform draw: these are others, and all rewards are 0.
    first = Learner(tmp_path, student_folder, per_step=2, last=100)
    first.start()
    stopper = stop_at(first.journal, segments=2)
    assert rollout(tmp_path, env_url, student_folder, config=config).stopped == "signal"
    stopper.join()
    first.stop.set()
    first.join(10)
    (tmp_path / "metrics" / "rollout.jsonl").unlink()  # the journal has it all
    latest = first.store.latest()
    assert latest is not None
    second = Learner(tmp_path, student_folder, per_step=2, last=latest.version + 2)
    second.start()
    summary = rollout(tmp_path, env_url, student_folder, config=config)
    second.join(10)
    assert summary.stopped == "final"
    episodes = journalled(tmp_path)
    assert len({episode.episode_id for episode in episodes}) == len(episodes) == 4 * summary.groups
    assert all("r1-" in episode.episode_id for episode in episodes)
    again = (tmp_path / "metrics" / "resampled.jsonl").read_text().splitlines()
    assert len(again) >= summary.groups
    assert json.loads((tmp_path / "status" / "rollout.json").read_text())["groups_resampled"] > 0


@pytest.fixture(scope="module")
def tiny_model(student_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained model of one layer, with the student's tokenizer and settings."""
    folder = tmp_path_factory.mktemp("model") / "student"
    shutil.copytree(student_folder, folder)
    vocabulary = len(load_renderer(folder).tokenizer)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    Qwen3ForCausalLM(Qwen3Config(vocab_size=vocabulary, **sizes, **heads)).float().save_pretrained(folder)
    return folder


def probe_of(folder: Path) -> dict[str, list[float]]:
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return {"token_ids": [float(i) for i in range(20)], "logprobs": logprobs.tolist()}


def local_rollout(folder: Path, url: str) -> RolloutSummary:
    return run_rollout(
        run_dir=folder,
        journal_uri=str(folder / "journal"),
        weights_uri=str(folder / "weights"),
        env_url=url,
        splits=splits(),
        model="student",
        env="coding",
        seed=SEED,
        config=RolloutConfig(
            group_size=2,
            groups_per_step=1,
            episodes_in_flight=8,
            max_new_tokens=8,
            max_tokens=900,
            poll_s=0.02,
            idle_timeout_s=30.0,
            engine_slots=8,
        ),
        evaluation=EvaluationConfig(splits=("heldfn",), num_tasks=2, temperatures=(1.0,), in_flight=2),
        teachers=TeachersConfig(),
    )


def test_the_local_engine_follows_weights_that_it_can_reproduce(
    env_url: str, tiny_model: Path, tmp_path: Path
) -> None:
    store = WeightStore(tmp_path / "weights")
    probe = probe_of(tiny_model)
    store.publish(0, tiny_model, metadata={"probe": probe, "final": False})

    def learn() -> None:
        journal = Journal(tmp_path / "journal")
        deadline = time.monotonic() + 60
        while not journal.segments() and time.monotonic() < deadline:
            time.sleep(0.02)
        store.publish(1, tiny_model, metadata={"probe": probe, "final": True})

    learner = threading.Thread(target=learn)
    learner.start()
    summary = local_rollout(tmp_path, env_url)
    learner.join()
    assert (summary.stopped, summary.version, summary.lost) == ("final", 1, {})
    for episode in journalled(tmp_path):
        sampled = [value for value, mask in zip(episode.logprobs, episode.loss_mask, strict=True) if mask]
        assert sampled
        assert all(value < 0 for value in sampled)
        assert episode.outcome is Outcome.TRUNCATED
        assert len(episode.hint_sites) >= 5


def test_weights_that_the_engine_cannot_reproduce_are_refused(
    env_url: str, tiny_model: Path, tmp_path: Path
) -> None:
    probe = probe_of(tiny_model)
    probe["logprobs"][3] += 0.01
    WeightStore(tmp_path / "weights").publish(0, tiny_model, metadata={"probe": probe})
    with pytest.raises(WeightsRefused, match="version 0"):
        local_rollout(tmp_path, env_url)


def test_a_learner_that_falls_silent_ends_the_run_with_a_message(
    env_url: str, student_folder: Path, tmp_path: Path
) -> None:
    Learner(tmp_path, student_folder, per_step=2, last=0)
    with pytest.raises(LearnerSilent, match="is the learner running"):
        rollout(tmp_path, env_url, student_folder, idle_timeout_s=3.0)
    status = json.loads((tmp_path / "status" / "rollout.json").read_text())
    assert status["state"].startswith("failed: no weights after version 0")


def test_without_any_weights_the_run_says_so(env_url: str, student_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(NoWeights):
        rollout(tmp_path, env_url, student_folder, idle_timeout_s=0.2)
