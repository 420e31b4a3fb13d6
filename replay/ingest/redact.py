"""Secrets in recorded text, replaced before anything is stored.

All texts of a trace are searched at once by one expression in Arrow (RE2), for anything that may be a secret;
only texts with a find go through the rules. A replacement is ``[redacted:kind]``; it holds no quote or
backslash, and no match ends inside of an escape, so JSON text stays JSON.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import compress

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from hintloop.replay.ingest.trace import Failure, Message, ToolCall, Trace

_B = r"(?<![A-Za-z0-9_])"
_VALUE = (
    r"(?P<secret>(?=[A-Za-z0-9+/_.\-]{0,200}[0-9])(?=[A-Za-z0-9+/_.\-]{0,200}[A-Za-z])"
    r"[A-Za-z0-9+/_.\-]{16,}={0,2})"
)
"""At least 16 characters with a digit and a letter among the first: no plain word, no plain number."""
_NAME = (
    r"(?:(?:[Aa]pi|API|[Aa]ccess|ACCESS|[Pp]rivate|PRIVATE|[Aa]uth|AUTH|[Ee]ncryption|ENCRYPTION)[_-]?(?:[Kk]ey|KEY)"
    r"|[Ss]ecret|SECRET|[Tt]oken|TOKEN|[Pp]assw(?:or)?d|PASSW(?:OR)?D|[Cc]redentials?|CREDENTIALS?)"
)
RULES: dict[str, re.Pattern[str]] = {
    "private_key": re.compile(
        r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----(?:"
        r"(?:[A-Za-z0-9+/=:,. \t\r\n-]|\\[nrt]){0,20000}?-----END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----"
        r"|(?:(?:[\r\n]|\\[nr]){1,4}[A-Za-z0-9+/=]{16,})*)"
    ),
    "aws_key": re.compile(_B + r"A(?:KIA|SIA)[0-9A-Z]{16}(?![0-9A-Za-z])"),
    "github_token": re.compile(_B + r"(?:gh[pousr]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{30,})"),
    "gitlab_token": re.compile(_B + r"glpat-[A-Za-z0-9_-]{20,}"),
    "slack_token": re.compile(_B + r"xox[abprs]-[A-Za-z0-9-]{10,}"),
    "api_key": re.compile(_B + r"(?:sk-[A-Za-z0-9_-]{20,}|[sr]k_(?:live|test)_[A-Za-z0-9]{16,})"),
    "google_key": re.compile(_B + r"AIza[0-9A-Za-z_-]{35}"),
    "hub_token": re.compile(_B + r"(?:hf_[A-Za-z0-9]{30,}|npm_[A-Za-z0-9]{36}|pypi-[A-Za-z0-9_-]{50,})"),
    "sendgrid_key": re.compile(_B + r"SG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}"),
    "jwt": re.compile(_B + r"eyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}"),
    "bearer": re.compile(r"(?:[Bb]earer|BEARER|[Bb]asic)[ \t]{1,4}" + _VALUE),
    "url_password": re.compile(
        r"://[^\s/@:\"'\\<>]{0,200}:(?!\[redacted:)(?P<secret>[^\s/@\"'\\<>]{1,400})@"
    ),
    "assignment": re.compile(_NAME + r"(?:\\?[\"'])?\s{0,4}[:=]\s{0,4}(?:\\?[\"'])?" + _VALUE),
}
"""By kind of secret, in the order of use. The group ``secret`` is replaced, or the whole match without one."""

_MAYBE = (
    r"PRIVATE KEY-|PRIVATE KEY BLOCK-|A(?:KIA|SIA)[0-9A-Z]{8}|gh[pousr]_[A-Za-z0-9]{8}|github_pat_|glpat-"
    r"|xox[abprs]-|sk-[A-Za-z0-9_-]{8}|[sr]k_(?:live|test)_|AIza|hf_[A-Za-z0-9]{8}|npm_[A-Za-z0-9]{8}|pypi-"
    r"|SG\.[A-Za-z0-9_-]{8}|eyJ[A-Za-z0-9_-]{8}|(?:[Bb]earer|BEARER|[Bb]asic)[ \t]+[A-Za-z0-9+/_.\-]{8}"
    r"|://[^\s/@:\"'\\<>]*:[^\s/@\"'\\<>]+@"
    r"|(?:[Kk]ey|KEY|ecret|ECRET|oken|OKEN|assw(?:or)?d|ASSW(?:OR)?D|redentials?|REDENTIALS?)"
    r"(?:\\?[\"'])?\s*[:=]\s*(?:\\?[\"'])?[A-Za-z0-9+/_.\-]{16}"
)
"""What every match of a rule contains: a cheap superset, without look-around, which RE2 does not have."""


def redact(text: str, found: Counter[str]) -> str:
    """``text`` without secrets; ``found`` counts them by kind. The same text when there are none."""
    for kind, rule in RULES.items():
        text, count = rule.subn(_replacer(kind), text)
        if count:
            found[kind] += count
    return text


def redact_trace(trace: Trace, found: Counter[str]) -> Trace:
    """A trace whose texts, arguments and results are redacted; ``found`` counts by kind."""
    suspicious = _suspicious([text for text in _texts(trace) if text])
    if not suspicious:
        return trace

    def clean(text: str) -> str:
        return redact(text, found) if text in suspicious else text

    return replace(trace, messages=tuple(_message(message, clean) for message in trace.messages))


def _suspicious(texts: Sequence[str]) -> set[str]:
    try:
        found = pc.match_substring_regex(pa.array(texts, pa.large_string()), _MAYBE).to_pylist()
    except UnicodeEncodeError:  # half of a surrogate pair, which Arrow does not take
        return set(texts)
    return set(compress(texts, found))


def _texts(trace: Trace) -> Iterator[str]:
    for message in trace.messages:
        yield message.text
        yield message.thinking
        for call in message.calls:
            yield call.arguments
            if call.result is not None:
                yield call.result.text
                yield _told(call.result.failure)
        yield _told(message.failure)


def _told(failure: Failure | None) -> str:
    return "" if failure is None else failure.message


def _message(message: Message, clean: Callable[[str], str]) -> Message:
    text, thinking = clean(message.text), clean(message.thinking)
    calls = tuple(_call(call, clean) for call in message.calls)
    failure = _failure(message.failure, clean)
    return replace(message, text=text, thinking=thinking, calls=calls, failure=failure)


def _call(call: ToolCall, clean: Callable[[str], str]) -> ToolCall:
    arguments, result = clean(call.arguments), call.result
    if result is not None:
        text = clean(result.text)
        result = replace(result, text=text, failure=_failure(result.failure, clean))
    return replace(call, arguments=arguments, result=result)


def _failure(failure: Failure | None, clean: Callable[[str], str]) -> Failure | None:
    message = clean(_told(failure))
    return None if failure is None else replace(failure, message=message)


def _replacer(kind: str) -> Callable[[re.Match[str]], str]:
    def replaced(match: re.Match[str]) -> str:
        if "secret" not in match.re.groupindex:
            return f"[redacted:{kind}]"
        start, end = (at - match.start() for at in match.span("secret"))
        return f"{match[0][:start]}[redacted:{kind}]{match[0][end:]}"

    return replaced
