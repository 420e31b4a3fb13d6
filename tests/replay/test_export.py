"""Journals as ATIF and as data sets: what goes out comes back, and trainers take it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hintloop.replay.episode import NOT_SAMPLED, Episode, HintSite, Outcome, PreferencePair, Turn
from hintloop.replay.export import hf
from hintloop.replay.export.atif import export_atif, file_name, trajectory
from hintloop.replay.export.chat import actions_of
from hintloop.replay.export.hf import export_hf
from hintloop.replay.ingest.episodes import NO_RESULT
from hintloop.replay.ingest.ingest import find_files, ingest
from hintloop.replay.journal import Journal

from .recordings import balanced, small_claude
from .samples import files


def live_episode(
    name: str = "live", reward: float | None = 1.0, outcome: Outcome = Outcome.SOLVED
) -> Episode:
    """As a rollout leaves one: an error of the model, two calls in a turn, a call that could not be read."""
    turns = (
        Turn("system", 0, 1, "Tools: run, submit"),
        Turn("user", 1, 2, "fix it"),
        Turn("assistant", 3, 5, "<tool_call>lss</tool_call>", tool_name="run", tool_arguments='{"command": "lss"}',
             error_kind="command_not_found", error_message="lss: not found", error_cause="model"),
        Turn("tool", 5, 6, "error: lss: not found", tool_name="run", exit_code=127, seconds=0.25),
        Turn("assistant", 6, 8, "<tool_call>a</tool_call>", tool_name="run", tool_arguments='{"command":"a"}'),
        Turn("tool", 8, 9, "A", tool_name="run", exit_code=0),
        Turn("tool", 9, 9, "B", tool_name="read_file"),
        Turn("assistant", 9, 11, "<tool_call>{", error_kind="json_decode", error_message="not JSON",
             error_cause="model"),
        Turn("tool", 11, 12, "error: not JSON"),
        Turn("assistant", 12, 14, "<tool_call>submit</tool_call>", tool_name="submit", tool_arguments="{}",
             error_kind="test_failure", error_message="1 failed", error_cause="user"),
        Turn("tool", 14, 14, "1 failed", tool_name="submit", exit_code=1),
    )  # fmt: skip
    mask = [int(any(t.start <= at < t.end for t in turns if t.role == "assistant")) for at in range(14)]
    pair = PreferencePair(
        2, 3, (1,), (2,), "<tool_call>ls</tool_call>", "<tool_call>lss</tool_call>", 2, 1, True, ("t",)
    )
    return Episode(
        episode_id=name,
        group_id="g",
        task_id="bugfix/1",
        env="coding",
        source="rollout",
        created_at=1_760_000_000.5,
        model="student",
        tokenizer_fingerprint="f",
        token_ids=range(14),
        loss_mask=mask,
        logprobs=[-0.5 * bit for bit in mask],
        policy_versions=[3 if bit else NOT_SAMPLED for bit in mask],
        turns=turns,
        outcome=outcome,
        reward=reward,
        reward_parts={} if reward is None else {"tests": reward},
        hint_sites=(HintSite(2, "command_not_found", "use ls", 3, 3, 5, (7,)),),
        pairs=(pair,),
    )


def recorded(folder: Path) -> list[Episode]:
    """The episodes of every recording there is a sample of."""
    paths = []
    for name, (_, data) in files().items():
        paths.append(folder / name)
        paths[-1].write_bytes(data)
    journal = Journal(folder / "recorded")
    assert all(balanced(report) for report in ingest(paths, journal))
    return journal.reader().poll()


def round_trip(episodes: Iterable[Episode], folder: Path) -> dict[str, Episode]:
    """The episodes after journal, ATIF, ingestion and journal, by their old ids."""
    first, second = Journal(folder / "first"), Journal(folder / "second")
    first.writer("w").append(list(episodes))
    export_atif((first.read(segment) for segment in first.segments()), str(folder / "atif"))
    reports = list(ingest(find_files([folder / "atif"]), second, keep_secrets=True))
    assert all(report.format == "atif" and not report.refused and not report.skipped for report in reports)
    return {episode.task_id.removeprefix("atif/"): episode for episode in second.reader().poll()}


def plain(turn: Turn) -> tuple[Any, ...]:
    """All of a turn that a trajectory has a place for."""
    arguments = turn.tool_arguments if turn.role == "assistant" else None
    return (turn.role, turn.text, turn.tool_name, arguments, turn.error_kind, turn.error_message, turn.error_cause,
            turn.exit_code, turn.seconds)  # fmt: skip


@pytest.mark.parametrize(
    ("reward", "outcome"),
    [(1.0, Outcome.SOLVED), (0.25, Outcome.FAILED), (0.0, Outcome.TRUNCATED), (None, Outcome.INFRA_ERROR)],
)
def test_a_live_episode_comes_back_from_atif_with_all_turns_calls_errors_and_its_reward(
    tmp_path: Path, reward: float | None, outcome: Outcome
) -> None:
    episode = live_episode(reward=reward, outcome=outcome)
    found = round_trip([episode], tmp_path)["live"]
    assert [plain(turn) for turn in found.turns] == [plain(turn) for turn in episode.turns]
    assert (found.outcome, found.reward, found.reward_parts) == (outcome, reward, episode.reward_parts)
    assert (found.model, found.created_at) == (episode.model, episode.created_at)
    assert [(site.turn, site.kind) for site in found.hint_sites] == [
        (2, "command_not_found"),
        (7, "json_decode"),
    ]


def test_recordings_of_every_format_come_back_from_atif_as_they_were(tmp_path: Path) -> None:
    episodes = {episode.episode_id: episode for episode in recorded(tmp_path)}
    found = round_trip(episodes.values(), tmp_path)
    assert found.keys() == episodes.keys()
    for name, episode in episodes.items():
        assert [plain(turn) for turn in found[name].turns] == [plain(turn) for turn in episode.turns]
        assert [turn.tool_arguments for turn in found[name].turns] == [
            turn.tool_arguments for turn in episode.turns
        ]
        assert (found[name].outcome, found[name].reward) == (episode.outcome, episode.reward)
        assert found[name].model == episode.model


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=20)
ERRORS = st.sampled_from(
    [(None, None, None), ("timeout", "slow", "model"), ("test_failure", "1 failed", "user")]
)


@st.composite
def conversations(draw: Any) -> tuple[Turn, ...]:
    turns = [Turn("user", 0, 0, draw(TEXT) + "?")]
    for _ in range(draw(st.integers(1, 4))):
        kind, message, cause = draw(ERRORS)
        names = draw(st.lists(st.sampled_from(["run", "read"]), max_size=3))
        arguments = draw(
            st.sampled_from(["{}", '{"a": 1}', '"text"', "[1]", "null", "1e400", '{"a":"\\u00e9"}'])
        )
        name, given = (names[0], arguments) if names else (None, None)
        turns.append(Turn("assistant", 0, 0, draw(TEXT) + "!", name, given, kind, message, cause))
        for number, called in enumerate(names):
            lost = draw(st.booleans())
            turns.append(
                Turn("tool", 0, 0, "" if lost else draw(TEXT), called, arguments if not number else '{"b":2}',
                     error_message=NO_RESULT if lost else None,
                     exit_code=None if lost else draw(st.sampled_from([None, 0, 1, -1])))
            )  # fmt: skip
    return tuple(turns)


@given(turns=conversations())
def test_any_recorded_conversation_comes_back_from_its_trajectory(
    turns: tuple[Turn, ...], tmp_path_factory: pytest.TempPathFactory
) -> None:
    episode = replace(
        live_episode("x", None, Outcome.UNGRADED), source="codex", turns=turns, token_ids=(), loss_mask=(),
        logprobs=(), policy_versions=(), hint_sites=(), pairs=(), tokenizer_fingerprint="",
    )  # fmt: skip
    found = round_trip([episode], tmp_path_factory.mktemp("trip"))["x"]
    assert found.turns == turns


def test_a_trajectory_has_what_the_format_asks_for() -> None:
    found = trajectory(live_episode())
    assert found["schema_version"] == "ATIF-v1.8"
    assert [step["step_id"] for step in found["steps"]] == list(range(1, len(found["steps"]) + 1))
    for step in found["steps"]:
        assert step["source"] in ("system", "user", "agent")
        assert step["source"] == "agent" or not step.keys() & {"tool_calls", "metrics", "model_name"}
        calls = {call["tool_call_id"] for call in step.get("tool_calls", ())}
        results = step.get("observation", {}).get("results", ())
        assert {result["source_call_id"] for result in results if "source_call_id" in result} <= calls
    failing = found["steps"][2]
    assert failing["metrics"]["completion_token_ids"] == [3, 4]
    assert failing["metrics"]["logprobs"] == [-0.5, -0.5]
    assert failing["observation"]["results"][0]["extra"]["tool_result_is_error"] is True
    assert found["agent"]["name"] == "hintloop"


def test_unknown_log_probabilities_and_odd_arguments_leave_valid_json(tmp_path: Path) -> None:
    episode = live_episode()
    logprobs = [math.nan] * 14
    turns = (*episode.turns[:2], replace(episode.turns[4], tool_arguments='{"a": NaN}'), *episode.turns[5:7])
    export_atif([[replace(episode, logprobs=logprobs, turns=turns)]], str(tmp_path))
    (file,) = tmp_path.iterdir()
    found = json.loads(file.read_text(), parse_constant=pytest.fail)
    assert "logprobs" not in found["steps"][2]["metrics"]
    assert found["steps"][2]["tool_calls"][0]["arguments"] == {"input": '{"a": NaN}'}


def test_an_episode_always_goes_to_the_same_file_and_no_two_to_one(tmp_path: Path) -> None:
    for _ in range(2):
        counts = export_atif([[live_episode("a/b"), live_episode("a:b")]], str(tmp_path))
    assert len(list(tmp_path.iterdir())) == 2
    assert counts == {"trajectories": 2, "left_out: pairs": 2}
    assert all(
        set(file_name(name)) <= set("abcdefghijklmnopqrstuvwxyz0123456789-._")
        for name in ("/../x", "ü", "a" * 999)
    )
    assert len(file_name("a" * 999)) < 100


def test_a_data_set_has_the_turns_that_are_worth_learning_and_the_pairs(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    failed = live_episode("failed", 0.0, Outcome.FAILED)
    counts = export_hf([[live_episode()], [failed]], tmp_path / "set")
    assert counts == {
        "sft": 2,
        "preference": 2,
        "left_out: turn that went wrong": 2,
        "left_out: episode failed": 1,
    }
    sft = datasets.load_dataset(
        str(tmp_path / "set"), "sft", split="train", cache_dir=str(tmp_path / "cache")
    )
    assert [row["turn"] for row in sft] == [4, 9]
    assert [message["role"] for message in sft[0]["prompt"]] == ["system", "user", "assistant", "tool"]
    assert sft[0]["completion"][0]["content"] == "<tool_call>a</tool_call>"
    assert (sft[0]["episode_id"], sft[0]["reward"], sft[0]["outcome"]) == ("live", 1.0, "solved")
    pairs = datasets.load_dataset(
        str(tmp_path / "set"), "preference", split="train", cache_dir=str(tmp_path / "cache")
    )
    assert pairs[0]["chosen"][0]["content"] == "<tool_call>ls</tool_call>"
    assert [message["content"] for message in pairs[0]["prompt"]] == ["Tools: run, submit", "fix it"]
    assert pairs[0]["verified"] is True
    card = (tmp_path / "set" / "README.md").read_text()
    assert "| `sft` | 2 |" in card
    assert "| episode failed | 1 |" in card


def test_calls_of_recordings_are_tool_calls_with_any_arguments(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    path = tmp_path / "a"
    made = small_claude()
    made.calls("c7", "m7", given={"deep": {"list": [1, {"x": None}]}})
    made.calls("c8", "m7", given="text")
    made.gets("c7", "ok")
    path.write_bytes(made.data())
    journal = Journal(tmp_path / "journal")
    list(ingest([path], journal))
    export_hf([journal.reader().poll()], tmp_path / "set")
    rows = datasets.load_dataset(str(tmp_path / "set"), split="train", cache_dir=str(tmp_path / "cache"))
    calls = [call["function"] for row in rows for call in row["completion"][0]["tool_calls"] or []]
    assert [call["arguments"] for call in calls] == [
        {"command": "ls"},
        {"deep": {"list": [1, {"x": None}]}},
        {"input": "text"},
    ]
    assert [message["role"] for message in rows[-1]["prompt"]][-2:] == ["tool", "assistant"]


def rows_of(folder: Path, episode: Episode) -> list[dict[str, Any]]:
    datasets = pytest.importorskip("datasets")
    export_hf([[episode]], folder / "set")
    return list(
        datasets.load_dataset(
            str(folder / "set"), "preference", split="train", cache_dir=str(folder / "cache")
        )
    )


def calls_in(message: dict[str, Any]) -> list[tuple[str, Any]]:
    calls = [call["function"] for call in message["tool_calls"] or ()]
    return [(call["name"], call["arguments"]) for call in calls]


@pytest.mark.parametrize("further", [(), (("look", {"path": "a.py"}), ("run", {"command": "pwd"}))])
@pytest.mark.parametrize("source", ["rollout", "codex"])
def test_both_sides_of_a_pair_have_the_same_form(
    tmp_path: Path, source: str, further: Sequence[tuple[str, Any]]
) -> None:
    episode = live_episode()
    calls = [("run", {"command": "ls"}), *further]
    text = "\n".join(f"{name} {json.dumps(given)}" for name, given in calls)
    chosen = replace(episode.pairs[0], chosen_text=text)
    episode = replace(episode, source=source, pairs=(chosen,))
    if source == "codex":
        called = replace(episode.turns[3], tool_arguments='{"command": "lss"}')
        turns = (*episode.turns[:3], called, *episode.turns[4:])
        episode = replace(episode, turns=turns, token_ids=(), loss_mask=(), logprobs=(), policy_versions=())
    (row,) = rows_of(tmp_path, episode)
    assert calls_in(row["chosen"][0]) == calls
    assert calls_in(row["rejected"][0]) == [("run", {"command": "lss"})]


def test_a_pair_whose_own_action_is_not_known_is_text_on_both_sides(tmp_path: Path) -> None:
    episode = live_episode()
    two_calls = replace(episode.pairs[0], turn=4, chosen_text='run {"command": "ls"}')
    (row,) = rows_of(tmp_path, replace(episode, pairs=(two_calls,)))
    assert row["chosen"][0]["content"] == 'run {"command": "ls"}'
    assert row["rejected"][0]["content"] == "<tool_call>lss</tool_call>"
    assert calls_in(row["chosen"][0]) == calls_in(row["rejected"][0]) == []


def test_an_action_is_read_as_it_was_written() -> None:
    assert actions_of('run {"a": {"b": "c {d}"}}') == [("run", {"a": {"b": "c {d}"}})]
    assert actions_of('run {}\nlook {"a": "b\\nc {}"}') == [("run", {}), ("look", {"a": "b\nc {}"})]
    for text in ("", "run", "malformed", " {}", 'run {"a": ', "run []", "<tool_call>ls</tool_call>"):
        assert actions_of(text) is None
        assert actions_of(f"run {{}}\n{text}") is None


def test_long_prompts_are_left_out_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf, "MAX_PROMPT_CHARS", 5)
    counts = export_hf([[live_episode()]], tmp_path)
    assert (counts["sft"], counts["preference"]) == (0, 0)
    assert counts["left_out: turn with a long prompt"] == 2
    assert counts["left_out: pair with a long prompt"] == 1
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["README.md"]


def test_an_export_takes_the_place_of_the_last_and_a_broken_one_has_no_card(tmp_path: Path) -> None:
    export_hf([[live_episode()]], tmp_path)
    export_hf([[replace(live_episode(), pairs=())]], tmp_path)
    assert not (tmp_path / "preference" / "train.parquet").exists()
    assert "preference" not in (tmp_path / "README.md").read_text().partition("---\n\n")[0]

    def breaks() -> Iterable[list[Episode]]:
        yield [live_episode()]
        raise OSError("the storage is gone")

    with pytest.raises(OSError, match="storage"):
        export_hf(breaks(), tmp_path)
    assert not (tmp_path / "README.md").exists()
    assert not list(tmp_path.rglob("*.tmp"))


def test_rows_are_written_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(hf, "BATCH_CHARS", 1)
    counts = export_hf([[live_episode(f"e{number}") for number in range(5)]], tmp_path / "set")
    rows = datasets.load_dataset(str(tmp_path / "set"), split="train", cache_dir=str(tmp_path / "cache"))
    assert len(rows) == counts["sft"] == 10


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} {{ c.function.arguments | tojson }}</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def student(repository: Path) -> tuple[Any, Any]:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("trl")
    folder = str(repository / "agent" / "student" / "student-tiny")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    return transformers.AutoModelForCausalLM.from_pretrained(folder), tokenizer


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:`(is_)?gradient_checkpointing` is deprecated:FutureWarning"
)  # transformers itself
@pytest.mark.parametrize("subset", ["sft", "preference"])
def test_trainers_of_trl_run_two_steps(tmp_path: Path, student: tuple[Any, Any], subset: str) -> None:
    import datasets
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    model, tokenizer = student
    episodes = [live_episode(f"e{number}") for number in range(4)]
    export_hf([[*episodes, *recorded(tmp_path)[:3]]], tmp_path / "set")
    rows = datasets.load_dataset(
        str(tmp_path / "set"), subset, split="train", cache_dir=str(tmp_path / "cache")
    )
    config, trainer = (SFTConfig, SFTTrainer) if subset == "sft" else (DPOConfig, DPOTrainer)
    arguments = config(
        output_dir=str(tmp_path / "out"), max_steps=2, per_device_train_batch_size=2, max_length=256, logging_steps=1,
        report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    made = trainer(model=model, args=arguments, train_dataset=rows, processing_class=tokenizer)
    losses = [record["loss"] for record in (made.train(), made.state.log_history)[1] if "loss" in record]
    assert len(losses) == 2
    assert all(math.isfinite(loss) for loss in losses)
