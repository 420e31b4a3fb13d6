"""A folder that ``datasets.load_dataset`` reads, with rows as TRL's trainers take them, and a card.

``sft`` has prompt and completion: a row for each turn that is worth learning from, with all that came before it as
its prompt. ``preference`` has prompt, chosen and rejected: a row for each pair that a teacher gave. Files are
written piece by piece beside their final names; the card comes last, so a folder with a card is complete.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from hintloop.replay.episode import Episode, Outcome, PreferencePair
from hintloop.replay.export.chat import (
    ChatMessage,
    actions_of,
    answers_to,
    arguments_object,
    calls_message,
    messages_of,
    text_message,
)
from hintloop.replay.storage import Store, sweep_temporaries, sync_folder, temporary_path
from hintloop.replay.supplement import is_supplement

MAX_PROMPT_CHARS = 1 << 18
"""A turn with a longer prompt is left out: prompts repeat, so long conversations would grow with their square."""
BATCH_CHARS = 16 << 20
"""Rows are written once they hold this much text."""
CARD = "README.md"

SUBSETS = {
    "sft": ["prompt", "completion"],
    "preference": ["prompt", "chosen", "rejected"],
}
"""The columns that hold messages, by subset."""
_ABOUT = [
    ("episode_id", pa.string()),
    ("task_id", pa.string()),
    ("source", pa.string()),
    ("model", pa.string()),
    ("outcome", pa.string()),
    ("turn", pa.int32()),
    ("reward", pa.float64()),
]
_ABOUT_PAIR = [("verified", pa.bool_()), ("agreed", pa.int32()), ("asked", pa.int32())]

Row = dict[str, Any]


def export_hf(segments: Iterable[Iterable[Episode]], folder: Path) -> Counter[str]:
    """Write the data set. Counts rows by subset, and by reason what was left out (``left_out: ...``).

    A folder that was exported to before gets the new rows in the place of the old ones. ``OSError``.
    """
    counts: Counter[str] = Counter(dict.fromkeys(SUBSETS, 0))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CARD).unlink(missing_ok=True)
    tables = {name: _Table(folder / name / "train.parquet", name) for name in SUBSETS}
    try:
        for episode in (episode for episodes in segments for episode in episodes):
            for row in _sft_rows(episode, counts):
                tables["sft"].add(row)
            for row in _preference_rows(episode, counts):
                tables["preference"].add(row)
        for name, table in tables.items():
            counts[name] = table.finish()
    finally:
        for table in tables.values():
            table.close()
    Store(folder).replace(CARD, _card(counts).encode())
    return counts


def _sft_rows(episode: Episode, counts: Counter[str]) -> Iterator[Row]:
    if is_supplement(episode):  # its turns are in the journal by themselves
        return
    if episode.outcome not in (Outcome.SOLVED, Outcome.UNGRADED):
        counts[f"left_out: episode {episode.outcome}"] += 1
        return
    messages, before, chars = messages_of(episode), list[ChatMessage](), 0
    for number, (turn, message) in enumerate(zip(episode.turns, messages, strict=True)):
        if message is None:
            continue
        if turn.role == "assistant" and (reason := _unfit(turn.error_cause, message, chars)):
            counts[f"left_out: {reason}"] += 1
        elif turn.role == "assistant":
            yield {"prompt": list(before), "completion": [message], **_about(episode, number)}
        before.append(message)
        chars += _chars(message)


def _unfit(cause: str | None, message: ChatMessage, prompt_chars: int) -> str:
    """Why a turn is nothing to learn from; empty when it is."""
    if cause == "model":
        return "turn that went wrong"
    if prompt_chars == 0:
        return "turn without a prompt"
    if prompt_chars > MAX_PROMPT_CHARS:
        return "turn with a long prompt"
    return "" if message["content"] or message.get("tool_calls") else "empty turn"


def _preference_rows(episode: Episode, counts: Counter[str]) -> Iterator[Row]:
    messages = messages_of(episode) if episode.pairs else []
    for pair in episode.pairs:
        prompt = [message for message in messages[: pair.turn] if message is not None]
        if sum(map(_chars, prompt)) > MAX_PROMPT_CHARS:
            counts["left_out: pair with a long prompt"] += 1
            continue
        chosen, rejected = _sides(episode, pair, messages[pair.turn])
        yield {
            "prompt": prompt,
            "chosen": [chosen],
            "rejected": [rejected],
            **_about(episode, pair.turn),
            "verified": pair.verified,
            "agreed": pair.agreed,
            "asked": pair.asked,
        }


def _sides(
    episode: Episode, pair: PreferencePair, own: ChatMessage | None
) -> tuple[ChatMessage, ChatMessage]:
    """Both in the same form, so that what is learnt is the action: calls where the agent's are known, else text."""
    turn, answers = episode.turns[pair.turn], answers_to(episode.turns, pair.turn)
    actions = actions_of(pair.chosen_text)
    if actions is not None and own is not None and own.get("tool_calls"):
        return calls_message(actions), own
    if actions is not None and turn.tool_name and turn.tool_arguments and len(answers) <= 1:
        known = turn.tool_name, arguments_object(turn.tool_arguments)
        return calls_message(actions), calls_message([known])
    return text_message(pair.chosen_text), text_message(pair.rejected_text)


def _about(episode: Episode, turn: int) -> Row:
    return {
        "episode_id": episode.episode_id,
        "task_id": episode.task_id,
        "source": episode.source,
        "model": episode.model,
        "outcome": str(episode.outcome),
        "turn": turn,
        "reward": episode.reward,
    }


def _chars(message: ChatMessage) -> int:
    calls = message.get("tool_calls")
    return len(message["content"]) + (len(json.dumps(calls)) if calls else 0)


class _Table:
    """One Parquet file that grows under a temporary name."""

    def __init__(self, path: Path, name: str) -> None:
        self._path = path
        # Nothing builds nested JSON values, but text can be cast to them, and then the reader gets objects.
        self._made, self._schema = (_schema(name, kind) for kind in (pa.string(), pa.json_()))
        self._writer: Any = None
        self._temporary = temporary_path(path)
        self._rows: list[Row] = []
        self._chars, self._written = 0, 0

    def add(self, row: Row) -> None:
        self._rows.append({name: _stored(value) for name, value in row.items()})
        self._chars += sum(sum(map(_chars, value)) for value in row.values() if isinstance(value, list))
        if self._chars > BATCH_CHARS:
            self._flush()

    def finish(self) -> int:
        """Put the file in its place; without a row there is none. The number of rows."""
        self._flush()
        if self._writer is None:
            self._path.unlink(missing_ok=True)
            return 0
        self._writer.close()
        with self._temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(self._temporary, self._path)
        sync_folder(self._path.parent)
        return self._written

    def close(self) -> None:
        """Forget what was not finished."""
        if self._writer is not None:
            self._writer.close()
        self._temporary.unlink(missing_ok=True)

    def _flush(self) -> None:
        if not self._rows:
            return
        if self._writer is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            sweep_temporaries(self._path.parent, self._path.name)
            self._writer = pq.ParquetWriter(self._temporary, self._schema, compression="zstd")
        self._writer.write_table(pa.Table.from_pylist(self._rows, schema=self._made).cast(self._schema))
        self._written += len(self._rows)
        self._rows, self._chars = [], 0


def _schema(name: str, arguments: Any) -> Any:
    """The columns of a subset. ``arguments`` is the type of what calls were given: no two need the same fields."""
    call = pa.struct(
        [("type", pa.string()), ("function", pa.struct([("name", pa.string()), ("arguments", arguments)]))]
    )
    message = pa.struct(
        [
            ("role", pa.string()),
            ("content", pa.string()),
            ("name", pa.string()),
            ("tool_calls", pa.list_(call)),
        ]
    )
    columns = [(column, pa.list_(message)) for column in SUBSETS[name]]
    return pa.schema([*columns, *_ABOUT, *(_ABOUT_PAIR if name == "preference" else [])])


def _stored(value: Any) -> Any:
    """A cell with the arguments of calls as JSON text."""
    if not isinstance(value, list):
        return value
    return [{**message, "tool_calls": _stored_calls(message.get("tool_calls"))} for message in value]


def _stored_calls(calls: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    if calls is None:
        return None
    return [
        {
            "type": call["type"],
            "function": {
                "name": call["function"]["name"],
                "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
            },
        }
        for call in calls
    ]


def _card(counts: Counter[str]) -> str:
    found = [name for name in SUBSETS if counts[name]]
    header = ["---", "tags:", "- trl", "- agent-traces"]
    for name in found:
        header += [] if name != found[0] else ["configs:"]
        header += [f"- config_name: {name}", f"  data_files: {name}/train.parquet"]
        header += [] if name != found[0] else ["  default: true"]
    rows = [f"| `{name}` | {counts[name]} | {_WHAT[name]} |" for name in found] or ["| none | 0 | |"]
    gone = [
        f"| {reason.removeprefix('left_out: ')} | {count} |"
        for reason, count in sorted(counts.items())
        if reason.startswith("left_out: ")
    ]
    table = ["| subset | rows | columns |", "| --- | ---: | --- |", *rows, ""]
    left_out = ["| left out | count |", "| --- | ---: |", *gone, ""] if gone else []
    return "\n".join([*header, "---", "", _TEXT_OF_CARD, *table, *left_out])


_WHAT = {
    "sft": "`prompt`, `completion`: messages up to a turn, and the turn",
    "preference": "`prompt`, `chosen`, `rejected`: messages up to a turn, a teacher's turn, and the agent's own",
}
_TEXT_OF_CARD = """# Turns of a coding agent

Exported from a journal of `hintloop`. Messages are in the conversational form of TRL. Each row also names its
episode, the number of its turn in it, the task, the source, the model, the outcome and the reward (null where
nobody graded).

`sft` has the turns of solved episodes and of recordings that nobody graded, but for turns that made an error of
the model's own doing. `preference` has the pairs; `verified` says that the chosen turn was run and made no error.
"""
