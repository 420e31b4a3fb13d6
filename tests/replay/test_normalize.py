"""Normalised pairs: the real data-juicer where there is one, and what is said where it is not."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hintloop.replay.normalize import DEFAULT_RECIPE, PYTHON, DJNormalizer, NormalizerFailed


@dataclass(frozen=True)
class MadePair:
    chosen: str
    task: str = "go"

    def row(self) -> dict[str, Any]:
        function = {"name": "edit_file", "arguments": json.dumps({"new": self.chosen})}
        call = {"type": "function", "function": function}
        return {
            "prompt": [{"role": "user", "content": self.task}],
            "chosen": [{"role": "assistant", "content": "", "tool_calls": [call]}],
            "rejected": [{"role": "assistant", "content": "bad"}],
        }


PAIRS = [
    MadePair("return x + 1"),
    MadePair("word " * 9000),
    MadePair("return x + 1"),
    MadePair("return x + 1", "another task"),
    MadePair("#%&*" * 200),
]


@pytest.fixture
def data_juicer() -> str:
    """A Python that has it."""
    python = os.environ.get(PYTHON)
    if python is None and importlib.util.find_spec("data_juicer") is None:
        pytest.skip(f"there is no data-juicer; {PYTHON} names a Python that has it")
    return python or sys.executable


def program(tmp_path: Path, body: str) -> str:
    """An interpreter that does something else; ``sys.argv`` is as a worker's."""
    path = tmp_path / "python"
    path.write_text(f"#!{sys.executable}\nimport json, os, sys, time\n{body}\n")
    path.chmod(0o755)
    return str(path)


OUTPUT = """
source, target = (sys.argv[sys.argv.index(name) + 1] for name in ("--dataset_path", "--export_path"))
os.makedirs(os.path.dirname(target))
samples = [json.loads(line) for line in open(source)]
json.dump({"version": "0", "steps": ["s"]}, open(sys.argv[2], "w"))
"""


@pytest.mark.slow
def test_the_default_recipe_drops_what_is_long_junk_or_there_already(data_juicer: str) -> None:
    made = DJNormalizer(python=data_juicer).normalize(PAIRS)
    assert [each.pair for each in made] == [PAIRS[0], PAIRS[3]]
    about = made[0].metadata
    assert about["normalizer"] == "data-juicer"
    assert about["version"]
    assert about["steps"] == [name for step in DEFAULT_RECIPE for name in step]
    assert about["stats"]["text_len"] == len('edit_file {"new": "return x + 1"}')
    assert json.loads(made[0].row()["metadata"])["steps"] == about["steps"]


@pytest.mark.slow
def test_a_recipe_file_of_data_juicer_is_taken_as_it_is(data_juicer: str, tmp_path: Path) -> None:
    recipe = tmp_path / "own.yaml"
    recipe.write_text("process:\n  - text_length_filter:\n      min_len: 100\n")
    made = DJNormalizer(recipe, python=data_juicer).normalize(PAIRS)
    assert [each.pair for each in made] == [PAIRS[1], PAIRS[4]]
    assert DJNormalizer(recipe, python=data_juicer).normalize([PAIRS[0]]) == []


def test_passing_through_says_so_and_needs_nothing() -> None:
    made = DJNormalizer(passthrough=True, python="/nowhere").normalize(PAIRS)
    assert [each.pair for each in made] == PAIRS
    assert all(each.metadata == {"normalizer": "passthrough"} for each in made)
    assert made[0].row() == {**PAIRS[0].row(), "metadata": '{"normalizer": "passthrough"}'}


def test_without_data_juicer_nothing_passes_through_by_itself(tmp_path: Path) -> None:
    lacking = program(tmp_path, "print('No module named data_juicer'); sys.exit(3)")
    with pytest.raises(NormalizerFailed, match=rf"No module named data_juicer.*{PYTHON}"):
        DJNormalizer(python=lacking).normalize(PAIRS)
    with pytest.raises(NormalizerFailed, match="cannot start"):
        DJNormalizer(python="/nowhere").normalize(PAIRS)
    assert DJNormalizer(python="/nowhere").normalize([]) == []


def test_what_is_left_keeps_its_order_and_its_stats(tmp_path: Path) -> None:
    body = OUTPUT + (
        "kept = [{**samples[n], '__dj__stats__': {'text_len': n, 'other': None}} for n in (3, 0)]\n"
        "open(target, 'w').write(''.join(json.dumps(each) + '\\n' for each in kept))"
    )
    made = DJNormalizer(python=program(tmp_path, body)).normalize(PAIRS)
    assert [each.pair for each in made] == [PAIRS[0], PAIRS[3]]
    assert made[1].metadata == {
        "normalizer": "data-juicer",
        "version": "0",
        "steps": ["s"],
        "stats": {"text_len": 3},
    }


def test_a_recipe_must_not_change_an_action(tmp_path: Path) -> None:
    body = OUTPUT + "open(target, 'w').write(json.dumps({**samples[0], 'text': 'x'}))"
    with pytest.raises(NormalizerFailed, match="changes texts"):
        DJNormalizer(python=program(tmp_path, body)).normalize(PAIRS)


def test_a_failure_and_a_hang_are_one_line_each_and_leave_no_process(tmp_path: Path) -> None:
    broken = program(tmp_path, "print('ops are broken', file=sys.stderr); sys.exit(1)")
    with pytest.raises(NormalizerFailed, match="failed: ops are broken"):
        DJNormalizer(python=broken).normalize(PAIRS)
    pids = tmp_path / "pids"
    body = f"child = os.fork()\nopen({str(pids)!r}, 'a').write(f'{{os.getpid()}} ')\ntime.sleep(60)"
    with pytest.raises(NormalizerFailed, match="did not end within 5 s"):
        DJNormalizer(python=program(tmp_path, body), timeout_s=5.0).normalize(PAIRS)
    deadline = time.monotonic() + 10
    while any(map(_lives, pids.read_text().split())) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(_lives, pids.read_text().split()))


def _lives(pid: str) -> bool:
    try:
        return "(python) Z" not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_the_worker_is_kept_from_installing(tmp_path: Path) -> None:
    body = "print(os.environ['UV_OFFLINE'], os.environ['PIP_NO_INDEX']); sys.exit(1)"
    with pytest.raises(NormalizerFailed, match="failed: 1 1"):
        DJNormalizer(python=program(tmp_path, body)).normalize(PAIRS)
