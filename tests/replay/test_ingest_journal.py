"""Files into a journal: each conversation and each error once, whatever happens in between."""

from __future__ import annotations

import json
import os
from itertools import islice
from pathlib import Path

import pytest

from hintloop.replay.episode import Episode, Outcome
from hintloop.replay.ingest import ingest as module
from hintloop.replay.ingest.detect import FORMATS, detect
from hintloop.replay.ingest.episodes import NO_RESULT, to_episode
from hintloop.replay.ingest.ingest import find_files, ingest
from hintloop.replay.ingest.report import Refused, Report
from hintloop.replay.journal import Journal

from .recordings import Claude, lines, read, small_claude, small_codex


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "journal")


def write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def episodes(journal: Journal) -> list[Episode]:
    return journal.reader().poll()


def test_an_episode_has_text_turns_no_tokens_and_sites_at_the_failing_turn(
    tmp_path: Path, journal: Journal
) -> None:
    (report,) = ingest([write(tmp_path / "a", small_claude().data())], journal)
    (episode,) = episodes(journal)
    assert (report.episodes, report.sites, report.errors) == (1, 1, {"model/command_not_found": 1})
    assert (episode.outcome, episode.reward, episode.source) == (Outcome.UNGRADED, None, "claude_code")
    assert (len(episode.token_ids), episode.tokenizer_fingerprint) == (0, "")
    assert [turn.role for turn in episode.turns] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "tool",
        "assistant",
    ]
    failing = episode.turns[1]
    assert (failing.tool_name, failing.tool_arguments) == ("Bash", '{"command":"lss"}')
    assert (failing.error_kind, failing.error_cause) == ("command_not_found", "model")
    assert episode.turns[2].exit_code == 127
    (site,) = episode.hint_sites
    assert (site.turn, site.kind, site.hint, site.hint_ids) == (1, "command_not_found", "", ())


def test_formats_are_told_by_content_not_by_name(tmp_path: Path, journal: Journal) -> None:
    files = [
        write(tmp_path / "codex.jsonl", b"\n\n" + small_claude().data()),
        write(tmp_path / "claude.txt", lines(small_codex())),
    ]
    assert [report.format for report in ingest(files, journal)] == ["claude_code", "codex"]


@pytest.mark.parametrize(
    "data", [b"", b"hello\n", b"\x89PNG\r\n\x1a\n" * 9, b'{"agentType": "x"}', b"[1, 2]\n", b"{}\n" * 9]
)
def test_a_file_of_no_known_format_is_refused(tmp_path: Path, journal: Journal, data: bytes) -> None:
    (report,) = ingest([write(tmp_path / "a.jsonl", data)], journal)
    assert report.refused == f"not a trace of a known format ({', '.join(FORMATS)})"
    assert (report.format, journal.segments()) == ("", [])


def test_a_refused_file_leaves_nothing_and_the_next_is_read(tmp_path: Path, journal: Journal) -> None:
    bad = write(tmp_path / "bad", small_claude().data() + b'{"cut\n' * 5)
    missing = tmp_path / "gone"
    good = write(tmp_path / "good", lines(small_codex()))
    reports = list(ingest([bad, missing, good], journal))
    assert [bool(report.refused) for report in reports] == [True, True, False]
    assert [episode.source for episode in episodes(journal)] == ["codex"]


def test_taking_the_same_files_again_adds_nothing(tmp_path: Path, journal: Journal) -> None:
    files = [write(tmp_path / "a", small_claude().data()), write(tmp_path / "b", small_claude().data())]
    first = list(ingest(files, journal))
    again = list(ingest(files, journal))
    assert [report.episodes for report in first + again] == [1, 0, 0, 0]
    assert len(journal.segments()) == 1


def test_a_file_that_grew_brings_only_its_new_errors(tmp_path: Path, journal: Journal) -> None:
    made = small_claude()
    path = write(tmp_path / "a", made.data())
    list(ingest([path], journal))
    made.user("more")
    made.calls("c9", "m9")
    made.gets("c9", "Exit code 1\nboom", True)
    write(path, made.data())
    (report,) = ingest([path], journal)
    old, new = episodes(journal)
    assert report.notes["error_known_already"] == 1
    assert ([s.turn for s in old.hint_sites], [s.turn for s in new.hint_sites]) == ([1], [7])
    assert old.group_id != new.group_id


def test_history_that_a_resumed_session_copied_brings_no_error_twice(
    tmp_path: Path, journal: Journal
) -> None:
    resumed = small_claude()
    resumed.user("go on")
    resumed.says("yes", "m8")
    for record in resumed.records:
        record["sessionId"] = "resumed"
        record["uuid"], record["parentUuid"] = record["uuid"] + "r", (record["parentUuid"] or "") + "r"
    resumed.records[0]["parentUuid"] = None
    files = [write(tmp_path / "a", small_claude().data()), write(tmp_path / "b", resumed.data())]
    reports = list(ingest(files, journal))
    assert [report.sites for report in reports] == [1, 0]
    assert [report.episodes for report in reports] == [1, 1]


def test_errors_in_the_shared_beginning_of_branches_count_once() -> None:
    made = small_claude()
    fork = made.last
    made.user("this")
    made.says("this", "m8")
    made.user("that", parent=fork)
    made.says("that", "m9")
    traces, _ = read(made.data())
    report, seen = Report(), set[bytes]()
    sites = [len(to_episode(trace, seen, report).hint_sites) for trace in traces]
    assert (sorted(sites), report.errors) == ([0, 1], {"model/command_not_found": 1})


def test_parallel_calls_make_one_site_by_the_error_that_the_model_caused() -> None:
    made = Claude()
    made.user("go")
    made.calls("c1", "m1")
    made.calls("c2", "m1")
    made.calls("c3", "m1")
    made.gets("c1", "The user doesn't want to proceed with this tool use.", True)
    made.gets("c2", "Exit code 1\nboom", True)
    ((trace,), _) = read(made.data())
    episode = to_episode(trace, set(), Report())
    assert [site.turn for site in episode.hint_sites] == [1]
    assert episode.turns[1].error_cause == "model"
    assert [turn.error_message for turn in episode.turns[2:]] == [None, None, NO_RESULT]


def test_refusals_and_failing_tests_make_no_site() -> None:
    made = Claude()
    made.user("go")
    made.calls("c1", "m1")
    made.gets("c1", "no", True, toolDenialKind="user")
    made.calls("c2", "m2")
    made.gets("c2", "Exit code 1\n=== 2 failed, 1 passed ===", True)
    ((trace,), _) = read(made.data())
    episode = to_episode(trace, set(), Report())
    assert [turn.error_kind for turn in episode.turns if turn.role == "assistant"] == [
        "permission_denied",
        "test_failure",
    ]
    assert episode.hint_sites == ()


def test_secrets_are_replaced_unless_told_otherwise(tmp_path: Path) -> None:
    made = small_claude()
    secret = "ghp_" + "a1" * 18
    made.user(f"use {secret}")
    made.says(f"I use {secret}", "m9")
    path = write(tmp_path / "a", made.data())
    (report,) = ingest([path], Journal(tmp_path / "safe"))
    list(ingest([path], Journal(tmp_path / "open"), keep_secrets=True))
    assert report.secrets == {"github_token": 2}
    assert secret not in str(episodes(Journal(tmp_path / "safe")))
    assert secret in str(episodes(Journal(tmp_path / "open")))


def test_a_crash_between_segments_loses_and_repeats_nothing(
    tmp_path: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = []
    for number in range(6):
        made = small_claude()
        made.records[0]["message"]["content"] = f"task {number}"
        files.append(write(tmp_path / f"{number}", made.data()))
    list(islice(ingest(files, journal), 3))  # what a kill leaves: whole segments, and nothing else
    monkeypatch.setattr(module, "SEGMENT_CHARS", 1)
    list(ingest(files, journal))
    found = episodes(journal)
    assert sorted(episode.turns[0].text for episode in found) == [f"task {number}" for number in range(6)]
    assert sum(len(episode.hint_sites) for episode in found) == 6


def test_folders_are_walked_without_following_links(tmp_path: Path) -> None:
    inside = write(tmp_path / "a" / "session" / "subagents" / "agent-1.jsonl", b"x")
    outside = write(tmp_path / "b.jsonl", b"x")
    os.symlink(outside, tmp_path / "a" / "link.jsonl")
    assert find_files([tmp_path / "a", outside, inside]) == [inside, outside]
    with pytest.raises(FileNotFoundError):
        find_files([tmp_path / "none"])


def test_progress_counts_each_byte_once(tmp_path: Path, journal: Journal) -> None:
    path = write(tmp_path / "a", small_claude().data() * 3)
    seen: list[int] = []
    list(ingest([path], journal, progress=seen.append))
    assert sum(seen) == path.stat().st_size


def test_a_report_is_json(tmp_path: Path, journal: Journal) -> None:
    (report,) = ingest([write(tmp_path / "a", small_claude().data())], journal)
    assert json.loads(json.dumps(report.plain()))["errors"] == {"model/command_not_found": 1}


def test_the_shared_files_give_a_site_for_each_known_error(shared_data: Path, journal: Journal) -> None:
    reports = list(ingest(find_files([shared_data / "traces"]), journal))
    assert [(report.format, report.episodes, report.sites) for report in reports] == [
        ("claude_code", 3, 3),
        ("codex", 1, 1),
    ]
    assert [report.skipped for report in reports] == [{}, {}]


def test_detection_says_so_when_nothing_fits(tmp_path: Path) -> None:
    with write(tmp_path / "a", b'{"type": "user"}\n').open("rb") as stream, pytest.raises(Refused):
        detect(stream)
