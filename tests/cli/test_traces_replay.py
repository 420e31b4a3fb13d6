"""``hintloop traces replay``: from recordings and teachers to pairs that a learner trains on, once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest

from hintloop.agent.policy import load_renderer
from hintloop.cli.main import run_command
from hintloop.cli.model import find_model
from hintloop.envs.models import ToolCall
from hintloop.learner.batch import BatchRules, build_step
from hintloop.replay.ingest.ingest import find_files
from hintloop.replay.journal import Journal
from hintloop.replay.supplement import SOURCE

from ..rollout.teacher_server import TeacherServer, says_all, teaching

Says = Callable[..., str]
GOOD = ToolCall(name="Bash", arguments={"command": "ls"})
USAGE = {"prompt_tokens": 1000, "completion_tokens": 1000}


@pytest.fixture
def action() -> tuple[ToolCall, ...]:
    """What all teachers would do."""
    return (GOOD,)


@pytest.fixture
def teachers(action: tuple[ToolCall, ...]) -> Iterator[TeacherServer]:
    with teaching(lambda number, body: says_all(*action, usage=USAGE)) as server:
        yield server


@pytest.fixture
def settings(teachers: TeacherServer, tmp_path: Path) -> Path:
    """Two teachers that must agree, at 10 USD per million answer tokens."""
    path = tmp_path / "settings.toml"
    specs = [
        f'[[teachers.teachers]]\nname = "{name}"\nbase_url = "{teachers.url}"\nmodel = "{name}"\n'
        "usd_per_mtok_in = 0\nusd_per_mtok_out = 10.0\n"
        for name in ("one", "two")
    ]
    path.write_text("[teachers]\nagree = 2\nask_probability = 0.0\n" + "".join(specs))
    return path


@pytest.fixture
def replay(says: Says, recording: Path, journal: str, settings: Path) -> Says:
    """Replays the journal of the recording with both teachers."""
    says("ingest", str(recording), "--journal", journal)

    def run(*words: str, budget: float = 1.0) -> str:
        chosen = ("--teachers", "one,two", "--budget", str(budget), "--config", str(settings))
        return says("replay", "--journal", journal, *chosen, *words)

    return run


def counts(text: str) -> dict[str, Any]:
    return {row["what"]: row["count"] for row in json.loads(text)}


def test_pairs_are_added_once_and_paid_once(replay: Says, journal: str, teachers: TeacherServer) -> None:
    first = json.loads(replay("--json"))
    assert (first["found"]["states"], first["pairs"], first["supplements"]) == (1, 1, 1)
    assert first["by_reason"]["error"]["pairs_per_usd"] == pytest.approx(50.0)
    assert first["ledger"]["spent_usd"] == pytest.approx(0.02)
    again = json.loads(replay("--json"))
    assert (again["found"]["settled"], again["asked_turns"], again["ledger"]["spent_usd"]) == (1, 0, 0.02)
    assert len(teachers.requests) == 2
    assert "0.0000 USD; 0 pairs in 0 new episodes" in replay()
    assert (Path(f"{journal}.teachers") / "teachers" / "ledger.jsonl").is_file()


def test_a_dry_run_asks_nothing_and_says_what_it_may_cost(
    replay: Says, journal: str, teachers: TeacherServer
) -> None:
    told = json.loads(replay("--dry-run", "--json"))
    assert [row["questions"] for row in told["teachers"]] == [1, 1]
    assert told["usd"] == pytest.approx(2 * 2048 * 10 / 1e6)
    assert told["worst_usd"] == pytest.approx(3 * told["usd"])
    assert "covers the former" in replay("--dry-run", budget=1.0)
    assert "does not cover the former" in replay("--dry-run", budget=0.01)
    assert not teachers.requests
    assert not Path(f"{journal}.teachers").exists()


def test_a_budget_that_is_too_small_is_said_to_be_so(replay: Says) -> None:
    assert "stopped, as the budget does not cover the next question" in replay(budget=0.01)


def test_a_learner_finds_the_pairs_and_trains_nothing_twice(
    replay: Says, says: Says, journal: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = str(tmp_path / "tokens")
    tokenise = ("tokenize", "--journal", journal, "--student", "student-tiny", "--to", tokens, "--json")
    before = counts(says(*tokenise))
    replay()
    after = counts(says(*tokenise))
    assert (before["episodes"], before["sites"], before["pairs"]) == (1, 1, 0)
    assert (after["episodes"], after["known_already"], after["sites"], after["pairs"]) == (1, 1, 0, 1)
    words = ["learn", "--run", str(tmp_path / "run"), "--journal", tokens, "--student", "student-tiny"]
    chosen = ["groups_per_step=1", "max_row_tokens=512", "beta_replay=0.1"]
    assert run_command([*words, "--json", *(w for s in chosen for w in ("--set", f"learner.{s}"))]) == 0
    learnt = json.loads(capsys.readouterr().out)
    assert (learnt["step"], learnt["episodes"], learnt["reason"]) == (2, 2, "journal_end")
    assert (learnt["counts"]["sites"], learnt["counts"]["pairs"], learnt["counts"]["tokens"]) == (1, 1, 0)
    assert learnt["counts"]["pairs_unusable"] == learnt["counts"]["pairs_too_long"] == 0


def test_supplements_are_told_apart_everywhere(
    replay: Says, says: Says, journal: str, tmp_path: Path
) -> None:
    replay()
    found = json.loads(says("stats", "--journal", journal, "--json"))
    assert {row["source"]: (row["sites"], row["pairs"]) for row in found["episodes"]} == {
        "claude_code": (1, 0),
        SOURCE: (0, 1),
    }
    assert [row["count"] for row in found["errors"]] == [1]
    assert len(says("grep", "not found", "--journal", journal).splitlines()) == 1
    (name,) = (each.episode_id for each in Journal(journal).reader().poll() if each.source == SOURCE)
    assert '>> one, two would rather: Bash {"command": "ls"}' in says("show", name, "--journal", journal)
    data = counts(
        says("export", "--journal", journal, "--format", "hf", "--to", str(tmp_path / "set"), "--json")
    )
    assert (data["sft"], data["preference"]) == (1, 1)
    files = counts(
        says("export", "--journal", journal, "--format", "atif", "--to", str(tmp_path / "a"), "--json")
    )
    assert files == {"trajectories": 1, "left_out: pairs": 1}
    assert counts_of_ingest(says, tmp_path / "projects", journal) == 0


@pytest.mark.parametrize("action", [(GOOD, ToolCall(name="Read", arguments={"path": "a.py"}))])
def test_several_calls_are_shown_exported_and_trained_on_as_one_action(
    replay: Says, says: Says, journal: str, tmp_path: Path
) -> None:
    replay()
    (name,) = (each.episode_id for each in Journal(journal).reader().poll() if each.source == SOURCE)
    told = '>> one, two would rather: Bash {"command": "ls"}\nRead {"path": "a.py"}'
    assert told in says("show", name, "--journal", journal)
    says("export", "--journal", journal, "--format", "hf", "--to", str(tmp_path / "set"))
    (row,) = parquet.read_table(tmp_path / "set" / "preference" / "train.parquet").to_pylist()
    assert [call["function"]["name"] for call in row["chosen"][0]["tool_calls"]] == ["Bash", "Read"]
    tokens = str(tmp_path / "tokens")
    tokenise = ("tokenize", "--journal", journal, "--student", "student-tiny", "--to", tokens, "--json")
    assert counts(says(*tokenise))["pairs"] == 1
    episodes = [each for each in Journal(tokens).reader().poll() if each.pairs]
    chat = load_renderer(find_model("student-tiny"))
    batch = build_step([episodes], BatchRules(len(chat.tokenizer)), version=0, seed=(0,))
    assert (batch.counts["pairs"], batch.counts["pairs_unusable"]) == (1, 0)
    text = chat.tokenizer.decode(list(episodes[0].pairs[0].chosen_ids))
    assert text.count("<tool_call>") == 2


def counts_of_ingest(says: Says, folder: Path, journal: str) -> int:
    """Episodes that a second ingestion adds."""
    return sum(
        report["episodes"]
        for report in json.loads(says("ingest", str(folder), "--journal", journal, "--json"))
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--teachers", "nobody"], "no teacher nobody; there are claude, gpt, gemini, one, two"),
        (["--teachers", "one", "--set", "teachers.agree=2"], "agree is 2, but there are 1 teachers"),
        (["--teachers", "one,two", "--set", "teachers.verify=no_error"], "needs an environment"),
        (["--teachers", "one,two", "--set", "teachers.ask=uncertain"], "has no log-probabilities"),
        (["--teachers", "one,two", "--set", "teachers.max_asks_per_episode=0"], "nothing is asked"),
    ],
)
def test_what_cannot_be_is_one_line(
    words: list[str],
    said: str,
    replay: Says,
    journal: str,
    settings: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["traces", "replay", "--journal", journal, "--budget", "1", "--config", str(settings), *words]
    assert run_command(command) == 2
    assert said in capsys.readouterr().err


def test_a_missing_key_is_one_line_and_no_hindrance_for_a_dry_run(
    says: Says,
    recording: Path,
    journal: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    says("ingest", str(recording), "--journal", journal)
    words = ("replay", "--journal", journal, "--teachers", "claude", "--teachers", "gpt", "--budget", "2")
    assert json.loads(says(*words, "--dry-run", "--json"))["usd"] > 0
    assert run_command(["traces", *words]) == 2
    assert "OPENROUTER_API_KEY is not set" in capsys.readouterr().err


def test_histories_are_counted_by_a_tokenizer(replay: Says, teachers: TeacherServer) -> None:
    words = ("--max-history-tokens", "100000", "--tokenizer", "student-tiny", "--json")
    assert json.loads(replay(*words))["pairs"] == 1
    told = json.loads(replay("--max-history-tokens", "1", "--json", "--set", "teachers.ask=all"))
    assert told["asked_turns"] == 0


@pytest.mark.parametrize(("name", "cap"), [("claude_code", 512), ("codex", 3072)])  # a patch is a long turn
def test_the_learner_alone_trains_on_the_shared_recordings(
    name: str,
    cap: int,
    says: Says,
    shared_data: Path,
    journal: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (file,) = find_files((shared_data / "traces").glob(f"{name}_*.jsonl"))
    tokens = str(tmp_path / "tokens")
    says("ingest", str(file), "--journal", journal)
    made = counts(
        says("tokenize", "--journal", journal, "--student", "student-tiny", "--to", tokens, "--json")
    )
    assert made["sites"] > 0
    words = [
        "learn",
        "--run",
        str(tmp_path / "run"),
        "--journal",
        tokens,
        "--student",
        "student-tiny",
        "--json",
    ]
    chosen = ["groups_per_step=4", f"max_row_tokens={cap}", "micro_batches=1"]
    assert run_command([*words, *(w for s in chosen for w in ("--set", f"learner.{s}"))]) == 0
    learnt = json.loads(capsys.readouterr().out)
    assert learnt["counts"]["sites"] + learnt["counts"]["sites_too_long"] == made["sites"]
    assert learnt["counts"]["sites"] > 0
    assert learnt["version"] > 0
