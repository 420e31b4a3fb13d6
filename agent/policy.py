"""How a model talks: its tokenizer, the renderer of its chat template, and the first messages it gets.

A model folder may hold ``hintloop.json``: ``renderer`` names the family of its chat template, as the package
``renderers`` calls it (``qwen3``, ``glm-5``, ...), and ``prompt`` the style of its first messages. Without it
the family follows from the model's name on the hub or from its chat template (``family.py``). A template that
no renderer renders is refused: going through its Jinja text would not keep earlier tokens as they were.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Any

from hintloop.agent.conversation import Message
from hintloop.agent.family import family_of
from hintloop.envs.models import TaskInfo

SETTINGS_FILE = "hintloop.json"
_SHORT_CHARS = 1000
"""Texts up to this long are remembered with their tokens: the template's pieces, and what a group reads."""
_REMEMBERED = 2048


class PromptStyle(StrEnum):
    """What a model is told of its tools."""

    ONE_LINE = "one_line"
    """A system text with one line that names the tools: for models too small for schemas."""
    SCHEMAS = "schemas"
    """The tools' JSON schemas, through the model's own chat template."""


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """Everything that turns messages into a model's tokens and back."""

    name: str
    """The folder or hub name that it was loaded from."""
    tokenizer: Any
    renderer: Any
    """A ``renderers.Renderer``."""
    fingerprint: str
    """``sha256:`` and the digest of the vocabulary: equal when every token id means the same text."""
    prompt: PromptStyle


def load_renderer(source: str | Path) -> ChatFormat:
    """The chat format of a model folder, or of a model on the hub.

    Raises ``ValueError`` when there is no tokenizer, or when its chat template is not known.
    """
    settings = _settings(Path(source))
    tokenizer = _load_tokenizer(source, own="renderer" in settings)
    family = settings.get("renderer") or family_of(source, tokenizer, make_renderer)
    return ChatFormat(
        name=str(source),
        tokenizer=tokenizer,
        renderer=make_renderer(tokenizer, family),
        fingerprint=fingerprint(tokenizer),
        prompt=_prompt_style(settings),
    )


def first_messages(task: TaskInfo, prompt: PromptStyle) -> tuple[list[Message], list[dict[str, Any]]]:
    """The messages that open an episode, and the tool schemas to render with them."""
    user = {"role": "user", "content": task.instruction}
    if prompt is PromptStyle.ONE_LINE:
        return [{"role": "system", "content": f"Tools: {task.tool_prompt}"}, user], []
    files = ", ".join(task.files) or "none"
    system = (
        "You repair code in a working directory. Make one tool call in every message; "
        f"call submit when the work is done. Files: {files}"
    )
    return [{"role": "system", "content": system}, user], list(task.tools)


def fingerprint(tokenizer: Any) -> str:
    """A digest of the whole vocabulary, added tokens included, wherever the tokenizer came from."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()), separators=(",", ":"))
    return "sha256:" + hashlib.sha256(vocabulary.encode()).hexdigest()


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / SETTINGS_FILE
    if not path.is_file():
        return {}
    try:
        settings = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(settings, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return settings


def _prompt_style(settings: dict[str, Any]) -> PromptStyle:
    name = settings.get("prompt", PromptStyle.SCHEMAS)
    try:
        return PromptStyle(name)
    except ValueError:
        raise ValueError(f"{SETTINGS_FILE}: prompt must be one_line or schemas, not {name!r}") from None


def _load_tokenizer(source: str | Path, *, own: bool) -> Any:
    """``own``: take ``tokenizer.json`` as it is, without what a model type adds to it."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    folder = Path(source)
    if folder.is_dir() and not any(folder.glob("tokenizer*.json")):
        raise ValueError(f"{source} holds no tokenizer (tokenizer.json)")
    loader = PreTrainedTokenizerFast if own and (folder / "tokenizer.json").is_file() else AutoTokenizer
    try:
        return loader.from_pretrained(str(source))
    except (OSError, ValueError) as error:
        raise ValueError(f"{source} has no tokenizer that can be loaded: {error}") from error


def make_renderer(tokenizer: Any, family: str) -> Any:
    """The renderer of a family. ``ValueError`` when the tokenizer does not fit or there is no such family."""
    from renderers import config_from_name, create_renderer

    if family in ("default", "auto"):
        raise ValueError(f"renderer {family!r} in {SETTINGS_FILE} cannot keep earlier tokens as they were")
    try:
        config: Any = config_from_name(family)
        return create_renderer(_Encoder(tokenizer) if tokenizer.is_fast else tokenizer, config)
    except (ValueError, KeyError, AssertionError) as error:
        raise ValueError(f"{family!r} does not fit this tokenizer, or is no renderer: {error}") from error


def retaining(chat: ChatFormat) -> ChatFormat:
    """The same chat format, except that what a model thought stays when a user message follows.

    Without that, many templates take earlier thoughts out at every user message, so that a conversation with
    several of those cannot grow in place. A renderer that has no such choice stays as it is.
    """
    from renderers import create_renderer

    config = chat.renderer.config
    try:
        kept = type(config).model_validate(
            {**config.model_dump(exclude_unset=True), "thinking_retention": "all"}
        )
    except ValueError:
        return chat
    return replace(chat, renderer=create_renderer(_Encoder(chat.tokenizer), kept))


class _Encoder:
    """The part of a tokenizer that renderers use, without transformers' cost per call (about 40 µs).

    It has no ``__call__``: renderers then leave out character attribution, which nothing here reads.
    """

    def __init__(self, tokenizer: Any):
        self.name_or_path: str = tokenizer.name_or_path
        self.unk_token_id: int | None = tokenizer.unk_token_id
        self.eos_token_id: int | None = tokenizer.eos_token_id
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_padding()
        self._backend.no_truncation()
        self._short = lru_cache(maxsize=_REMEMBERED)(self._encode)
        self._token_ids = lru_cache(maxsize=_REMEMBERED)(tokenizer.convert_tokens_to_ids)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._backend.encode(text, add_special_tokens=False).ids)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """The token ids of ``text`` alone."""
        if add_special_tokens:
            raise ValueError("chat templates place special tokens themselves")
        return list(self._short(text) if len(text) <= _SHORT_CHARS else self._encode(text))

    def decode(self, token_ids: int | Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of ``token_ids``."""
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        text: str = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def convert_tokens_to_ids(self, tokens: str | list[str]) -> Any:
        """The id of a token, or the ids of several."""
        return (
            self._token_ids(tokens)
            if isinstance(tokens, str)
            else [self._token_ids(token) for token in tokens]
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._tokenizer, name)
