"""A small agent program for tests, as a stranger would write one: standard library only, one JSON call per turn.

``python agent_program.py MODE``; several modes go wrong in the way that their name says.
"""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request

MODE = sys.argv[1]
TOKEN = os.environ["OPENAI_API_KEY"]


def post(url, body):
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60) as answer:
        return json.load(answer)


def ask(messages, tools=None):
    body = {"model": os.environ["HINTLOOP_MODEL"], "messages": messages, "temperature": 0.3, "top_p": 0.5}
    if tools:
        body["tools"] = [{"type": "function", "function": tool} for tool in tools]
    return post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)["choices"][0]["message"]


def call(body):
    return post(os.environ["HINTLOOP_SANDBOX_URL"] + "/call", body)


def tools(task):
    """Also runs a failing command of its own after each turn, which is nobody's mistake."""
    messages = [{"role": "user", "content": task["instruction"]}]
    while True:
        said = ask(messages, task["tools"])
        messages.append(said)
        if not said.get("tool_calls"):
            return
        for made in said["tool_calls"]:
            function = made["function"]
            result = call({"name": function["name"], "arguments": json.loads(function["arguments"])})
            messages.append({"role": "tool", "tool_call_id": made["id"], "content": result["output"]})
            call({"name": "bash", "arguments": {"command": "git diff --no-index /nowhere /neither"}})


def shell(task):
    """Runs what the model says, as it stands, by the command for that; no tools, answers as user messages."""
    messages = [{"role": "user", "content": os.environ["HINTLOOP_TASK"]}]
    while True:
        said = ask(messages)["content"]
        messages.append({"role": "assistant", "content": said})
        if said == "exit":
            return
        ran = subprocess.run(["hintloop-sandbox", "-c", said], capture_output=True, text=True)
        messages.append({"role": "user", "content": f"{ran.returncode}: {ran.stdout}"})


def retry(task):
    """Asks twice at each turn and goes on from the second answer, with a side question before."""
    ask([{"role": "user", "content": "A title, please"}])
    messages = [{"role": "user", "content": task["instruction"]}]
    while True:
        ask(messages, task["tools"])
        said = ask(messages, task["tools"])
        messages.append(said)
        if not said.get("tool_calls"):
            return
        function = said["tool_calls"][0]["function"]
        result = call({"name": function["name"], "arguments": json.loads(function["arguments"])})
        messages.append({"role": "tool", "content": result["output"]})


def rewrite(task):
    """Tells the model another history than there was."""
    messages = [{"role": "user", "content": task["instruction"]}]
    for _ in range(2):
        said = ask(messages)["content"]
        messages.append({"role": "assistant", "content": "It said " + said})
        messages.append({"role": "user", "content": "go on"})


def parts(task):
    """Long messages, each in many parts."""
    part = {"type": "text", "text": "word " * 20}
    ask([{"role": "user", "content": [part] * 200}])


def environment(task):
    """What it is told, for the test to look at."""
    print(json.dumps({**os.environ, "files": os.listdir("."), "cwd": os.getcwd()}))
    sys.exit(3)


def crash(task):
    ask([{"role": "user", "content": "hello"}])
    print("my key is", TOKEN)
    sys.exit("something broke")


def back(task):
    """Goes two turns back, as if they had not been, and on from there."""
    messages = [{"role": "user", "content": task["instruction"]}]
    for keep in (None, None, None, 3, None):
        messages = messages[:keep]
        said = ask(messages, task["tools"])
        messages.append(said)
        function = said["tool_calls"][0]["function"]
        result = call({"name": function["name"], "arguments": json.loads(function["arguments"])})
        messages.append({"role": "tool", "content": result["output"]})


def refused(task):
    """Tells what it is told instead of an answer."""
    try:
        ask([{"role": "user", "content": "hello"}])
    except urllib.error.HTTPError as error:
        sys.exit(f"{error.code}: {error.read().decode()}")


def unasked(task):
    call({"name": "submit"})


def silent(task):
    pass


def hang(task):
    subprocess.Popen(["sleep", "600"])
    time.sleep(600)


def endless(task):
    while True:
        ask([{"role": "user", "content": "hello"}])


if __name__ == "__main__":
    globals()[MODE](post(os.environ["HINTLOOP_SANDBOX_URL"] + "/task", None))
