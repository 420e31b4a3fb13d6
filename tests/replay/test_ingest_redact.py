"""No secret is stored, and nothing else changes."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hintloop.replay.ingest.redact import RULES, redact, redact_trace
from hintloop.replay.ingest.trace import Failure, Message, ToolCall, ToolResult, Trace

ALNUM = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


def token(length: int, letters: str = ALNUM) -> st.SearchStrategy[str]:
    return st.text(letters, min_size=length, max_size=length).map(lambda text: f"a1{text[2:]}")


KEY_LINES = st.lists(token(64), min_size=1, max_size=4).map("\n".join)
SECRETS: dict[str, st.SearchStrategy[tuple[str, str]]] = {
    "private_key": KEY_LINES.map(
        lambda k: (f"-----BEGIN RSA PRIVATE KEY-----\n{k}\n-----END RSA PRIVATE KEY-----", k)
    ),
    "aws_key": token(16, "ABCDEFGHIJKLMNOP234567").map(lambda k: (f"AKIA{k.upper()}", k.upper())),
    "github_token": token(36).map(lambda k: (f"ghp_{k}", k)),
    "gitlab_token": token(20).map(lambda k: (f"glpat-{k}", k)),
    "slack_token": token(24).map(lambda k: (f"xoxb-{k}", k)),
    "api_key": token(40).map(lambda k: (f"sk-ant-api03-{k}", k)),
    "google_key": token(35).map(lambda k: (f"AIza{k}", k)),
    "hub_token": token(34).map(lambda k: (f"hf_{k}", k)),
    "sendgrid_key": token(22).map(lambda k: (f"SG.{k}.{k}", k)),
    "jwt": token(20).map(lambda k: (f"eyJ{k}.eyJ{k}.{k}", k)),
    "bearer": token(24).map(lambda k: (f"Authorization: Bearer {k}", k)),
    "url_password": token(12).map(lambda k: (f"postgres://user:{k}@db.local/x", k)),
    "assignment": token(20).map(lambda k: (f'API_KEY="{k}"', k)),
}
AROUND = st.text(st.characters(exclude_categories=["Cs"]), max_size=40).map(lambda text: f" {text} ")


def trace_of(text: str, arguments: str) -> Trace:
    call = ToolCall("c", "Bash", arguments, ToolResult(text))
    return Trace("t", "s", "b", (Message("user", text), Message("assistant", text, (call,), thinking=text)))


def test_every_rule_is_tested() -> None:
    assert SECRETS.keys() == RULES.keys()


@pytest.mark.parametrize("kind", RULES)
def test_a_secret_never_gets_through(kind: str) -> None:
    @given(SECRETS[kind], AROUND, AROUND)
    def holds(secret: tuple[str, str], before: str, after: str) -> None:
        whole, core = secret
        text = before + whole + after
        found: Counter[str] = Counter()
        cleaned = redact_trace(trace_of(text, json.dumps({"command": text})), found)
        assert core not in str(cleaned)
        assert sum(found.values()) >= 4
        arguments = json.loads(cleaned.messages[1].calls[0].arguments)
        assert core.replace("\n", "\\n") not in arguments["command"]
        assert redact(cleaned.messages[0].text, Counter()) == cleaned.messages[0].text

    holds()


@given(st.text(max_size=200))
def test_json_stays_json_with_the_same_keys(text: str) -> None:
    arguments = json.dumps({"command": f"token = '{text}abcdef0123456789' {text}", "path": text})
    cleaned = redact(arguments, Counter())
    assert json.loads(cleaned).keys() == {"command", "path"}


@pytest.mark.parametrize(
    "text",
    [
        "task-list-with-many-words-in-it-and-more",
        "token = get_token()",
        "def f(password: str) -> None: ...",
        "max_tokens: 4096",
        "http://localhost:3000/path?x=1",
        "git@github.com:owner/name.git",
        "sha256: 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        "see -----BEGIN CERTIFICATE-----",
        "Basic knowledge of Bearer tokens is assumed",
    ],
)
def test_plain_text_is_left_alone(text: str) -> None:
    found: Counter[str] = Counter()
    trace = trace_of(text, json.dumps({"a": text}))
    assert redact_trace(trace, found) == trace
    assert redact(text, found) == text
    assert not found


def test_a_key_that_was_cut_off_is_redacted_too() -> None:
    text = "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkqhkiG9w0BAQ\nEFAASCBKcwggSjAgEAAoIBAQ"
    assert redact(text, Counter()) == "[redacted:private_key]"


@pytest.mark.parametrize("place", range(6))
def test_a_secret_is_found_wherever_it_is_alone(place: int) -> None:
    secret, found = "ghp_" + "a1" * 18, Counter[str]()
    texts = [secret if at == place else "plain" for at in range(6)]
    told = [Failure("runtime_error", "model", text) for text in texts[:2]]
    call = ToolCall("c", "Bash", json.dumps({"command": texts[2]}), ToolResult(texts[3], failure=told[0]))
    message = Message("assistant", texts[4], (call,), thinking=texts[5], failure=told[1])
    cleaned = str(redact_trace(Trace("t", "s", "b", (message,)), found))
    assert secret not in cleaned
    assert (cleaned.count("[redacted:github_token]"), found["github_token"]) == (1, 1)


def test_halves_of_surrogate_pairs_do_not_hide_a_secret() -> None:
    found: Counter[str] = Counter()
    secret = "ghp_" + "a1" * 18
    assert secret not in str(redact_trace(trace_of(f"\ud83d {secret}", "{}"), found))
