"""The command ``hintloop-sandbox`` of an agent program: what it is given runs in the sandbox of the episode.

* ``hintloop-sandbox exec COMMAND`` or ``hintloop-sandbox -c COMMAND`` (so it can stand in for a shell) runs a shell
  command; its output is printed, and its exit status is that of the command.
* ``hintloop-sandbox call TOOL [JSON]`` makes any call of the environment's tools; ``-`` reads the JSON.
* ``hintloop-sandbox task`` prints the task and its tools as JSON.

Where and as whom is in the environment variables HINTLOOP_SANDBOX_URL and HINTLOOP_TOKEN. Run as a file, this
imports nothing of ours, so any Python 3 can run it.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request
from typing import Any

TIMEOUT_S = 3600.0
"""The environment has its own, shorter limits for each tool."""
EXIT_BROKEN = 125
"""The command could not be run at all."""
USAGE = "usage: hintloop-sandbox exec COMMAND | -c COMMAND | call TOOL [JSON|-] | task"


def request(path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """An answer of the sandbox. Raises ``OSError`` when there is none."""
    url, token = os.environ["HINTLOOP_SANDBOX_URL"], os.environ["HINTLOOP_TOKEN"]
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": "Bearer " + token, "Content-Type": "application/json"}
    asked = urllib.request.Request(url + path, data, headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # it is on this machine
    with opener.open(asked, timeout=TIMEOUT_S) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """One call of a tool: ``output``, ``exit_code``, ``error`` (its kind, or None) and ``done``."""
    return request("/call", {"name": name, "arguments": arguments})


def exit_status(result: dict[str, Any]) -> int:
    """What a shell would say."""
    if result["exit_code"] is not None:
        return int(result["exit_code"]) & 0xFF
    return {None: 0, "timeout": 124}.get(result["error"], 1)


def run(arguments: list[str]) -> int:
    """Run the command line; its exit status."""
    if arguments == ["task"]:
        print(json.dumps(request("/task")))
        return 0
    if len(arguments) >= 2 and arguments[0] in ("exec", "-c"):
        command = arguments[1] if arguments[0] == "-c" else " ".join(arguments[1:])
        result = call("bash", {"command": command})
    elif arguments[:1] == ["call"] and len(arguments) in (2, 3):
        text = arguments[2] if len(arguments) == 3 else "{}"
        result = call(arguments[1], json.loads(sys.stdin.read() if text == "-" else text))
    else:
        print(USAGE, file=sys.stderr)
        return EXIT_BROKEN
    sys.stdout.write(result["output"])
    return exit_status(result)


def main() -> None:
    """The command."""
    try:
        sys.exit(run(sys.argv[1:]))
    except (OSError, KeyError, ValueError) as error:
        told = (
            error.read().decode(errors="replace")
            if isinstance(error, urllib.error.HTTPError)
            else repr(error)
        )
        print("hintloop-sandbox: " + told, file=sys.stderr)
        sys.exit(EXIT_BROKEN)


if __name__ == "__main__":
    main()
