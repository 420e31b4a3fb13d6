"""A chat format as the bundled student has it: the real Qwen3 renderer on a small byte-level tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hintloop.agent.policy import ChatFormat, load_renderer
from hintloop.agent.student.tokenizer import train_tokenizer


@pytest.fixture(scope="session")
def student_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer and a ``hintloop.json``, but no weights."""
    folder = tmp_path_factory.mktemp("student")
    train_tokenizer(
        ['", "arguments": {"path": "solution.py"}}', "read_file", "edit_file"] * 8
    ).save_pretrained(folder)
    (folder / "hintloop.json").write_text(json.dumps({"renderer": "qwen3", "prompt": "one_line"}))
    return folder


@pytest.fixture(scope="session")
def chat(student_folder: Path) -> ChatFormat:
    return load_renderer(student_folder)
