"""A small synthetic run: what the files of a run look like, without running one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hintloop.cli.config import load_config
from hintloop.cli.main import run_command
from hintloop.cli.runfolder import RunFolder
from hintloop.replay.episode import Episode, HintSite, Outcome, PreferencePair, Turn
from hintloop.replay.journal import Journal

START = 1_000_000.0


def make_episode(name: str, group: str, *, solved: bool, version: int = 0, error: bool = True) -> Episode:
    """Two turns: one that reads (a missing file, when ``error``), one that submits."""
    turns = (
        Turn("system", 0, 2, "Tools: read_file(path), submit()"),
        Turn("user", 2, 3, "Fix solution.py"),
        Turn(
            "assistant",
            4,
            7,
            "<tool_call>...</tool_call>",
            tool_name="read_file",
            tool_arguments='{"path": "nowhere.py"}',
            error_kind="file_not_found" if error else None,
            error_cause="model" if error else None,
        ),
        Turn("tool", 7, 8, "error: no such file: nowhere.py" if error else "1: x = 1"),
        Turn("assistant", 9, 10, "<tool_call>submit</tool_call>", tool_name="submit", tool_arguments="{}"),
    )
    mask = (0, 0, 0, 0, 1, 1, 1, 0, 0, 1)
    site = HintSite(2, "file_not_found", "files are solution.py", 3, 4, 7, (5, 6))
    pair = PreferencePair(2, 4, (1, 2), (3, 4), "read_file {}", "read_file {}", 1, 1, True, ("expert",))
    return Episode(
        episode_id=name,
        group_id=group,
        task_id="bugfix/first.0.0",
        env="bugfix",
        source="rollout",
        created_at=START + 60.0 * version,
        model="student-tiny",
        tokenizer_fingerprint="sha256:0",
        token_ids=tuple(range(10)),
        loss_mask=mask,
        logprobs=tuple(-0.5 * bit for bit in mask),
        policy_versions=tuple(version if bit else -1 for bit in mask),
        turns=turns,
        outcome=Outcome.SOLVED if solved else Outcome.FAILED,
        reward=float(solved),
        hint_sites=(site,) if error else (),
        pairs=(pair,) if error else (),
    )


def step_record(step: int, **more: float) -> dict[str, Any]:
    return {
        "step": step,
        "version": step,
        "time": START + 60.0 * step,
        "tokens": 100,
        "sites": 3,
        "pairs": 2,
        "staleness_mean": 0.5,
        "staleness_max": 1.0,
        "seconds_training": 2.0,
        "seconds_waiting": 1.0,
        "seconds_publishing": 0.5,
        **more,
    }


def evaluation_record(label: str, version: int, rate: float, temperature: float = 1.0) -> dict[str, Any]:
    return {
        "label": label,
        "version": version,
        "split": "heldmut",
        "temperature": temperature,
        "time": START + 60.0 * version,
        "n": 200,
        "solved": round(200 * rate),
        "rate": rate,
        "low": rate - 0.06,
        "high": rate + 0.06,
        "seconds": 10.0,
    }


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture
def empty_run(tmp_path: Path) -> RunFolder:
    """A run that was started and has done nothing yet."""
    folder = RunFolder(tmp_path / "runs" / "small")
    (folder.path / "status").mkdir(parents=True)
    folder.config.write_text(load_config(preset="smoke", values={"run.name": "small"}).to_toml())
    return folder


@pytest.fixture
def run(empty_run: RunFolder) -> RunFolder:
    """Two groups of two episodes, two steps of which one has no pairs, an evaluation before and after."""
    writer = Journal(empty_run.journal).writer("rollout")
    writer.append(
        [make_episode("g0-0", "g0", solved=False), make_episode("g0-1", "g0", solved=True, error=False)]
    )
    writer.append([make_episode(f"g1-{i}", "g1", solved=True, version=1) for i in range(2)])
    write_lines(empty_run.plays, [{"time": START - 10.0, "seed": 0}])
    channels = {"loss_grpo": 0.4, "loss_sdpo": 0.02}
    steps = [
        step_record(1, **channels, loss_dpo=0.69, grad_norm_grpo=1.0, grad_norm_sdpo=0.1, grad_norm_dpo=0.2),
        step_record(2, **channels),
    ]
    write_lines(empty_run.metrics("learner"), steps)
    rows = [
        evaluation_record("before", 0, 0.3),
        evaluation_record("before", 0, 0.4, temperature=0.0),
        evaluation_record("during", 1, 0.4),
        evaluation_record("after", 2, 0.5),
    ]
    write_lines(empty_run.evaluation, rows)
    return empty_run


@pytest.fixture
def keep_example(run: RunFolder) -> Callable[..., None]:
    """``keep_example(label, version, number, solved=...)`` writes an episode of an evaluation."""

    def keep(label: str, version: int, number: int, *, solved: bool) -> None:
        name = f"{label}-v{version}-heldmut-t1"
        episode = make_episode(f"{name}-{number:04d}", name, solved=solved, version=version)
        path = run.path / "examples" / f"{name}-{number}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(episode.plain()))

    return keep


@pytest.fixture
def says(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command and gives what it printed."""

    def run(*words: str, code: int = 0) -> str:
        assert run_command(["traces", *words]) == code, capsys.readouterr().err
        return capsys.readouterr().out

    return run


def record(kind: str, uuid: str, parent: str | None, content: Any, **message: Any) -> dict[str, Any]:
    return {
        "type": kind,
        "uuid": uuid,
        "parentUuid": parent,
        "sessionId": "s1",
        "timestamp": "2025-09-07T09:52:03Z",
        "message": {"role": kind, "content": content, **message},
    }


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """A Claude Code session with one error, and a file beside it that is no trace."""
    use = {"type": "tool_use", "id": "c1", "name": "Bash", "input": {"command": "lss"}}
    failed = {
        "type": "tool_result",
        "tool_use_id": "c1",
        "is_error": True,
        "content": "lss: command not found",
    }
    records = [
        record("user", "1", None, "list the files with ghp_" + "a1" * 18),
        record("assistant", "2", "1", [use], id="m1", model="claude-x"),
        record("user", "3", "2", [failed]),
        record("assistant", "4", "3", [{"type": "text", "text": "sorry " * 200}], id="m2", model="claude-x"),
    ]
    folder = tmp_path / "projects"
    folder.mkdir()
    (folder / "s1.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    (folder / "agent.meta.json").write_text('{"agentType": "x"}')
    return folder


@pytest.fixture
def journal(tmp_path: Path) -> str:
    return str(tmp_path / "journal")
