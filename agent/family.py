"""Which renderer of the package ``renderers`` a model needs: by its name on the hub, else by its chat template.

Many models share the template of another family (Qwen2.5-Coder renders as Qwen3 does). A family counts as the
model's own when its renderer opens a conversation, and appends a tool result to one, exactly as the chat
template of the model does.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

_UNUSABLE = ("default", "auto")
"""They render through Jinja, which does not keep earlier tokens as they were."""
_BY_NAME_ONLY = ("gpt-oss",)
"""Their renderers fetch files from the network when they are made."""
_SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
_TOOLS = [{"type": "function", "function": {"name": "look", "description": "Look.", "parameters": _SCHEMA}}]
_OPENING = [{"role": "system", "content": "You look."}, {"role": "user", "content": "Look at a.py"}]
_CALL = {"name": "look", "arguments": {"path": "a.py"}}
_RESULT = {"role": "tool", "content": "1: x = 1"}


def family_of(source: str | Path, tokenizer: Any, make: Callable[[Any, str], Any]) -> str:
    """The family of a model; ``make(tokenizer, family)`` makes a renderer. ``ValueError`` when there is none."""
    from renderers.base import MODEL_RENDERER_MAP

    families = sorted({str(family) for family in MODEL_RENDERER_MAP.values()} - set(_UNUSABLE))
    named = MODEL_RENDERER_MAP.get(str(source))
    if named is not None and str(named) not in _UNUSABLE:
        return str(named)
    if getattr(tokenizer, "chat_template", None):
        for family in families:
            if family not in _BY_NAME_ONLY and _fits(family, tokenizer, make):
                return family
    raise ValueError(
        f"`renderers` does not know the chat template of {source}; if you know that the one of a family fits all "
        f'the same, name it (student.renderer, or "renderer" in hintloop.json): {", ".join(families)}'
    )


def _fits(family: str, tokenizer: Any, make: Callable[[Any, str], Any]) -> bool:
    try:
        renderer = make(tokenizer, family)
    except ValueError:
        return False
    said = [{"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": _CALL}]}]
    opening = list(renderer.render_ids(_OPENING, tools=_TOOLS, add_generation_prompt=True))
    if tokenizer.decode(opening) != _templated(tokenizer, _OPENING):
        return False
    stop = list(renderer.get_stop_token_ids())[:1]
    bridged = renderer.bridge_to_next_turn(opening, stop, [_RESULT], tools=_TOOLS)
    if bridged is None:
        return False
    appended = tokenizer.decode(list(bridged.token_ids)[len(opening) :])
    return _templated(tokenizer, [*_OPENING, *said, _RESULT]).endswith(appended)


def _templated(tokenizer: Any, messages: list[dict[str, Any]]) -> str:
    """What the model's own template makes of a conversation; empty where it takes no such conversation."""
    from jinja2 import TemplateError

    try:
        text: str = tokenizer.apply_chat_template(
            messages, tools=_TOOLS, add_generation_prompt=True, tokenize=False
        )
    except (TemplateError, TypeError, ValueError):
        return ""
    return text
