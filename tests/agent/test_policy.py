"""Loading a chat format: what is known is found, what is not is refused with a way out."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hintloop.agent.policy import (
    ChatFormat,
    PromptStyle,
    fingerprint,
    first_messages,
    load_renderer,
    make_renderer,
)
from hintloop.envs.models import TaskInfo
from hintloop.envs.tools import TOOL_PROMPT, TOOLS

TASK = TaskInfo(
    task_id="bugfix/x",
    instruction="Fix solution.py",
    files=["solution.py"],
    tools=list(TOOLS.values()),
    tool_prompt=TOOL_PROMPT,
    max_turns=8,
)


def test_a_student_folder_says_how_it_talks(chat: ChatFormat) -> None:
    assert type(chat.renderer).__name__ == "Qwen3Renderer"
    assert chat.prompt is PromptStyle.ONE_LINE
    assert chat.fingerprint.startswith("sha256:")


def test_the_fingerprint_follows_the_vocabulary_and_not_the_folder(
    chat: ChatFormat, student_folder: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(student_folder, copy)
    assert load_renderer(copy).fingerprint == chat.fingerprint
    other = load_renderer(copy).tokenizer
    other.add_tokens(["a whole new token"])
    assert fingerprint(other) != chat.fingerprint


def test_an_unknown_chat_template_is_refused_and_the_message_says_what_to_do(
    student_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "someones-model"
    shutil.copytree(student_folder, folder)
    (folder / "hintloop.json").unlink()
    with pytest.raises(ValueError, match=r"does not know the chat template.*hintloop\.json.*qwen3"):
        load_renderer(folder)


@pytest.mark.parametrize(
    ("template", "family"), [("qwen2_5", "qwen3"), ("qwen3", "qwen3"), ("llama3_1", None), ("phi3", None)]
)
def test_a_chat_template_tells_the_family_where_the_name_does_not(
    student_folder: Path, tmp_path: Path, template: str, family: str | None
) -> None:
    folder = tmp_path / "someones-model"
    shutil.copytree(student_folder, folder)
    (folder / "hintloop.json").unlink()
    trl = Path(str(importlib.util.find_spec("trl").origin)).parent
    (folder / "chat_template.jinja").write_text((trl / "chat_templates" / f"{template}.jinja").read_text())
    if family is None:
        with pytest.raises(ValueError, match="does not know the chat template"):
            load_renderer(folder)
    else:
        chat = load_renderer(folder)
        assert type(chat.renderer) is type(make_renderer(chat.tokenizer, family))
        assert chat.prompt is PromptStyle.SCHEMAS


@pytest.mark.parametrize("name", ["default", "auto", "no-such-family", "llama-3"])
def test_a_renderer_that_does_not_fit_is_refused(student_folder: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(student_folder, folder)
    (folder / "hintloop.json").write_text(json.dumps({"renderer": name}))
    with pytest.raises(ValueError, match=name):
        load_renderer(folder)


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "hintloop.json").write_text('{"renderer": "qwen3"}')
    with pytest.raises(ValueError, match="no tokenizer"):
        load_renderer(tmp_path)


def test_damaged_settings_are_refused(student_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(student_folder, folder)
    (folder / "hintloop.json").write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        load_renderer(folder)
    (folder / "hintloop.json").write_text('{"renderer": "qwen3", "prompt": "poem"}')
    with pytest.raises(ValueError, match="one_line or schemas"):
        load_renderer(folder)


def test_the_one_line_prompt_names_the_tools_in_the_system_text() -> None:
    messages, tools = first_messages(TASK, PromptStyle.ONE_LINE)
    assert messages == [
        {"role": "system", "content": f"Tools: {TOOL_PROMPT}"},
        {"role": "user", "content": "Fix solution.py"},
    ]
    assert tools == []


def test_the_schemas_prompt_renders_every_tool(chat: ChatFormat) -> None:
    messages, tools = first_messages(TASK, PromptStyle.SCHEMAS)
    text = chat.tokenizer.decode(chat.renderer.render_ids(messages, tools=tools))
    assert all(f'"name": "{name}"' in text for name in TOOLS)


@given(st.text())
@settings(deadline=None)
def test_the_lean_encoder_gives_the_tokenizers_own_ids(chat: ChatFormat, text: str) -> None:
    encoder = chat.renderer._tokenizer
    ids = chat.tokenizer.encode(text, add_special_tokens=False)
    assert encoder.encode(text) == ids
    assert encoder.decode(ids, skip_special_tokens=False) == chat.tokenizer.decode(ids)
