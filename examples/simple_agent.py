"""An agent program in its simplest form: ask the model, make the call that it wrote, tell it the result, again.

    hintloop rollout --env-url URL --agent "python3 $PWD/examples/simple_agent.py"

Standard library only; it plays as the built-in agent does, so the bundled student knows its part.
"""

from __future__ import annotations

import json
import os
import re
import urllib.request
from typing import Any

CALL = re.compile(r"<tool_call>\n(.*)\n</tool_call>", re.S)


def request(url: str, body: dict[str, Any] | None = None) -> Any:
    headers = {"Authorization": "Bearer " + os.environ["HINTLOOP_TOKEN"], "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, headers)) as answer:
        return json.load(answer)


def ask(messages: list[dict[str, str]]) -> str:
    """The model's answer, as any OpenAI client would get it."""
    body = {"model": os.environ["HINTLOOP_MODEL"], "messages": messages}
    answer = request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
    return str(answer["choices"][0]["message"]["content"])


def call(said: str) -> dict[str, Any]:
    """What the call in the model's answer gave: ``output``, ``exit_code``, ``error``, ``done``."""
    found = CALL.search(said)
    try:
        made = json.loads(found[1]) if found else {"malformed": said}
        body = {"name": str(made["name"]), "arguments": dict(made["arguments"])} if found else made
    except (ValueError, KeyError, TypeError):
        body = {"malformed": said}
    result: dict[str, Any] = request(os.environ["HINTLOOP_SANDBOX_URL"] + "/call", body)
    return result


def main() -> None:
    task = request(os.environ["HINTLOOP_SANDBOX_URL"] + "/task")
    messages = [
        {"role": "system", "content": "Tools: " + task["tool_prompt"]},
        {"role": "user", "content": task["instruction"]},
    ]
    while True:
        said = ask(messages)
        result = call(said)
        if result["done"]:  # submitted, or out of turns
            return
        messages += [{"role": "assistant", "content": said}, {"role": "tool", "content": result["output"]}]


if __name__ == "__main__":
    main()
