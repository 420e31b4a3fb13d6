"""Text that others wrote, made fit for a page: no character that hides, reorders or breaks what is shown."""

from __future__ import annotations

import json
import re
import time
from typing import Any

MAX_CHARS = 8_000
"""Characters of one message that are shown."""
MAX_NAME_CHARS = 160
"""The same for names, which stand in tables."""
DASH = "\u2013"
"""Stands for a number that is not known."""
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ud800-\udfff\ufeff]"
)
_WHEN = "%Y-%m-%d %H:%M:%S"


def visible(text: str) -> str:
    """Control characters as the pictures that Unicode has for them, others that nobody sees by their number."""
    return _UNSEEN.sub(_picture, text.replace("\r\n", "\n"))


def clip(text: str, limit: int = MAX_CHARS) -> str:
    """At most about ``limit`` characters: the beginning, the end, and how much is missing between them."""
    if len(text) <= limit:
        return text
    head = limit * 2 // 3
    tail = limit - head
    return f"{text[:head]}\n[… {len(text) - limit:,} more characters …]\n{text[-tail:]}"


def name(value: str) -> str:
    """A name in one line, shortened and visible."""
    line = visible(" ".join(value[: MAX_NAME_CHARS + 1].split()))
    return line if len(line) <= MAX_NAME_CHARS else line[:MAX_NAME_CHARS] + "…"


def number(value: float | None) -> str:
    """Three digits that tell something, and separators between thousands; a dash for None."""
    if value is None:
        return DASH
    if abs(value) >= 1000 or value == int(value):
        return f"{round(value):,}"
    return f"{value:.3g}"


def percent(rate: float | None, digits: int = 1) -> str:
    """``41.5 %``, or a dash."""
    return DASH if rate is None else f"{100 * rate:.{digits}f} %"


def dollars(value: float | None) -> str:
    """``$1.20``; four digits after the point below ten cents."""
    if value is None:
        return DASH
    return f"${value:,.2f}" if value >= 0.1 or value == 0 else f"${value:.4f}"


def moment(unix_s: float) -> str:
    """A time, UTC; a dash for what is none."""
    try:
        return time.strftime(_WHEN, time.gmtime(unix_s))
    except (OverflowError, ValueError, OSError):
        return DASH


def as_arguments(text: str | None) -> dict[str, str] | None:
    """The arguments of a tool call, each value as text; None when ``text`` is no JSON object."""
    try:
        found: Any = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in found.items()}


def _picture(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "\u2421"
    return "\ufffd" if 0xD800 <= code <= 0xDFFF else f"<U+{code:04X}>"
