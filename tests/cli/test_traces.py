"""``hintloop traces``: recordings in, a table or JSON out, tokens for a learner."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hintloop.cli.main import run_command
from hintloop.cli.runfolder import RunFolder
from hintloop.replay.journal import Journal

Says = Callable[..., str]


def test_ingest_walks_a_folder_and_prints_what_became_of_it(
    says: Says, recording: Path, journal: str
) -> None:
    text = says("ingest", str(recording), "--journal", journal)
    assert "s1.jsonl" in text
    assert "errors: 1 model/command_not_found" in text
    assert "secrets: 1 github_token" in text
    assert "1 other files are no traces" in text
    assert len(Journal(journal).episode_ids()) == 1


def test_ingest_reports_as_json(says: Says, recording: Path, journal: str) -> None:
    reports = json.loads(says("ingest", str(recording), "--journal", journal, "--json"))
    by_name = {Path(report["path"]).name: report for report in reports}
    assert by_name["s1.jsonl"]["used"] == 4
    assert by_name["agent.meta.json"]["refused"].startswith("not a trace")


def test_secrets_are_kept_only_on_request(says: Says, recording: Path, journal: str) -> None:
    says("ingest", str(recording), "--journal", journal, "--keep-secrets")
    (episode,) = Journal(journal).reader().poll()
    assert "ghp_a1a1" in episode.turns[0].text


@pytest.mark.parametrize("content", ["no trace\n", '{"type": "user", "sessionId": "s", "message": {}}\n' * 3])
def test_a_file_that_cannot_be_used_ends_with_status_1_and_a_reason(
    says: Says, tmp_path: Path, journal: str, content: str
) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text(content)
    assert f"refused: {bad}: " in says("ingest", str(bad), "--journal", journal, code=1)


def test_a_missing_path_is_one_line(tmp_path: Path, journal: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["traces", "ingest", str(tmp_path / "none"), "--journal", journal]) == 2
    assert "no such file or folder" in capsys.readouterr().err


def test_show_prints_a_file_or_an_episode(says: Says, recording: Path, journal: str) -> None:
    says("ingest", str(recording), "--journal", journal)
    (episode_id,) = Journal(journal).episode_ids()
    of_file = says("show", str(recording / "s1.jsonl"))
    assert of_file == says("show", episode_id, "--journal", journal)
    assert "!! model/command_not_found; hint site: no hint yet" in of_file
    assert "characters more]" in of_file
    assert "characters more]" not in says("show", episode_id, "--journal", journal, "--full")
    (plain,) = json.loads(says("show", episode_id, "--journal", journal, "--json"))
    assert plain["episode_id"] == episode_id


def test_show_prints_the_hints_and_pairs_of_a_run(says: Says, run: RunFolder) -> None:
    shown = says("show", "g0-0", "--journal", run.journal)
    assert "1 hint sites, 1 pairs" in shown
    assert "!! model/file_not_found; hint site: files are solution.py" in shown
    assert ">> expert would rather: read_file {}" in shown


@pytest.mark.parametrize("words", [["show", "nobody"], ["show", "nobody", "--journal", "J"]])
def test_an_unknown_episode_is_one_line(
    words: list[str], journal: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["traces", *(journal if word == "J" else word for word in words)]) == 2
    assert "nobody" in capsys.readouterr().err


def test_stats_count_by_source_and_by_kind_of_error(says: Says, recording: Path, journal: str) -> None:
    says("ingest", str(recording), "--journal", journal)
    found = json.loads(says("stats", "--journal", journal, "--json"))
    assert found == {
        "episodes": [
            {
                "source": "claude_code",
                "outcome": "ungraded",
                "episodes": 1,
                "turns": 2,
                "calls": 1,
                "tokens": 0,
                "sites": 1,
                "pairs": 0,
            }
        ],
        "errors": [{"source": "claude_code", "cause": "model", "error": "command_not_found", "count": 1}],
    }
    assert "command_not_found" in says("stats", "--journal", journal)


def test_tokenize_writes_another_journal_once(
    says: Says, recording: Path, journal: str, tmp_path: Path
) -> None:
    says("ingest", str(recording), "--journal", journal)
    words = ("--journal", journal, "--student", "student-tiny", "--to", str(tmp_path / "tokens"), "--json")
    first = {row["what"]: row["count"] for row in json.loads(says("tokenize", *words))}
    again = {row["what"]: row["count"] for row in json.loads(says("tokenize", *words))}
    assert (first["episodes"], first["sites"], first["known_already"]) == (1, 1, 0)
    assert (again["episodes"], again["known_already"]) == (0, 1)
    (episode,) = Journal(tmp_path / "tokens").reader().poll()
    assert len(episode.token_ids) == first["tokens"] > 0
    assert len(episode.hint_sites[0].hint_ids) > 0


def test_tokens_do_not_go_into_the_journal_of_texts(
    says: Says, recording: Path, journal: str, capsys: pytest.CaptureFixture[str]
) -> None:
    says("ingest", str(recording), "--journal", journal)
    words = ["tokenize", "--journal", journal, "--student", "student-tiny", "--to", journal]
    assert run_command(["traces", *words]) == 2
    assert "another journal" in capsys.readouterr().err


def test_the_learner_trains_on_recordings_by_their_hints(
    says: Says, recording: Path, journal: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = str(tmp_path / "tokens")
    says("ingest", str(recording), "--journal", journal)
    says("tokenize", "--journal", journal, "--student", "student-tiny", "--to", tokens)
    words = ["learn", "--run", str(tmp_path / "run"), "--journal", tokens, "--student", "student-tiny"]
    settings = ["steps=1", "groups_per_step=1", "max_row_tokens=512"]
    assert run_command([*words, "--json", *(w for s in settings for w in ("--set", f"learner.{s}"))]) == 0
    counts = json.loads(capsys.readouterr().out)["counts"]
    assert (counts["sites"], counts["episodes_unusable"], counts["tokens"]) == (1, 0, 0)
    assert counts["tokens_unscored"] > 0


@pytest.mark.parametrize("words", ["ingest", "tokenize", "export", "push", "grep", "show", "stats", "replay"])
def test_every_command_has_help_with_an_example(says: Says, words: str) -> None:
    assert f"Example: hintloop traces {words}" in " ".join(says(words, "--help").split())


def test_grep_prints_episode_turn_and_line(says: Says, recording: Path, journal: str) -> None:
    says("ingest", str(recording), "--journal", journal)
    (episode,) = Journal(journal).reader().poll()
    assert (
        says("grep", "command not f.und", "--journal", journal)
        == f"{episode.episode_id}:2: lss: command not found\n"
    )
    (line,) = says("grep", '"command":"lss"', "--journal", journal, "--json").splitlines()
    assert json.loads(line) == {
        "episode_id": episode.episode_id,
        "turn": 2,
        "role": "tool",
        "line": '{"command":"lss"}',
    }
    assert "characters more]" in says("grep", "sorry", "--journal", journal)


def test_grep_without_a_match_has_status_1_and_an_odd_pattern_is_one_line(
    says: Says, recording: Path, journal: str, capsys: pytest.CaptureFixture[str]
) -> None:
    says("ingest", str(recording), "--journal", journal)
    assert says("grep", "nowhere", "--journal", journal, code=1) == ""
    assert run_command(["traces", "grep", "(", "--journal", journal]) == 2
    assert "is no regular expression" in capsys.readouterr().err


def test_export_writes_a_data_set_and_trajectories_that_can_be_read_again(
    says: Says, recording: Path, journal: str, tmp_path: Path
) -> None:
    says("ingest", str(recording), "--journal", journal)
    words = ["export", "--journal", journal, "--json"]
    counts = json.loads(says(*words, "--format", "hf", "--to", str(tmp_path / "set")))
    assert {"what": "sft", "count": 1} in counts
    assert (tmp_path / "set" / "README.md").is_file()
    counts = json.loads(says(*words, "--format", "atif", "--to", str(tmp_path / "atif")))
    assert counts == [{"what": "trajectories", "count": 1}]
    again = json.loads(says("ingest", str(tmp_path / "atif"), "--journal", str(tmp_path / "again"), "--json"))
    assert [(report["format"], report["sites"]) for report in again] == [("atif", 1)]


def test_an_export_in_an_unknown_format_is_one_line(
    journal: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["traces", "export", "--journal", journal, "--to", str(tmp_path), "--format", "csv"]
    assert run_command(words) == 2
    assert "csv" in capsys.readouterr().err


def test_pushing_without_a_token_is_one_line(
    says: Says,
    recording: Path,
    journal: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    says("ingest", str(recording), "--journal", journal)
    words = ["traces", "export", "--journal", journal, "--to", str(tmp_path / "set"), "--format", "hf"]
    assert run_command([*words, "--push", "me/set"]) == 2
    said = capsys.readouterr().err
    assert "set the environment variable HF_TOKEN" in said
    assert len(said.splitlines()) == 1
    assert run_command(["traces", "push", str(tmp_path / "set"), "me/set"]) == 2
    assert "HF_TOKEN" in capsys.readouterr().err
