"""Harbor task directories: what becomes of each part, and that nothing of them is ignored silently."""

from __future__ import annotations

from pathlib import Path

import pytest

from hintloop.envs.harbor import load_task, load_taskset_folder
from hintloop.envs.registry import is_held_out
from hintloop.envs.sandbox.base import SandboxSpec
from hintloop.envs.sandbox.limits import MiB
from hintloop.envs.task import RepositoryTests, Script

FULL = """
schema_version = "1.4"
artifacts = ["a.py", { source = "/app/out" }, "/app/sub/../b"]
source = "somewhere"

[task]
name = "org/one"
version = "1.2"
description = "d"
authors = [{ name = "n" }]
keywords = ["k"]

[metadata]
difficulty = "easy"
tags = ["x", "y"]

[metadata.hintloop]
visible_tests = "python a.py"
max_turns = 5

[agent]
timeout_sec = 120.0

[verifier]
timeout_sec = 30
environment_mode = "shared"
env = { MODE = "hidden" }

[environment]
cpus = 2
memory_mb = 256
storage_mb = 16
network_mode = "no-network"
env = { B = "2" }

[solution]
env = { S = "1" }
"""
FILES = {
    "task.toml": FULL,
    "instruction.md": "Do it.\n\n",
    "environment/Dockerfile": "FROM python:3.11 AS base\n# a comment\nWORKDIR /app\n"
    'ENV A=1 C="two words"\nCOPY a.py \\\n  data ./\n',
    "environment/a.py": "x = 1\n",
    "environment/data/d.txt": "d",
    "tests/test.sh": "#!/bin/sh\n",
    "tests/deep/check.py": "pass\n",
    "solution/solve.sh": "echo solved\n",
}


def write(folder: Path, **changes: str) -> Path:
    """The task directory of ``FILES``, with other content for some; ``__`` stands for ``/``."""
    files = {**FILES, **{path.replace("__", "/"): text for path, text in changes.items()}}
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, "utf-8")
    return folder


def manifest(text: str) -> dict[str, str]:
    return {"task.toml": text}


def test_every_part_has_its_place(tmp_path: Path) -> None:
    task = load_task(write(tmp_path / "one"), task_id="set/one")
    assert (task.task_id, task.instruction, task.max_turns) == ("set/one", "Do it.", 5)
    assert task.files == {"a.py": "x = 1\n", "d.txt": "d"}
    assert task.sandbox == SandboxSpec(
        env={"A": "1", "C": "two words", "B": "2"}, memory=256 * MiB, disk=16 * MiB, cpus=2.0
    )
    script = Script(
        {"test.sh": "#!/bin/sh\n", "deep/check.py": "pass\n"}, "/tests/test.sh", 30.0, {"MODE": "hidden"}
    )
    assert task.tests == RepositoryTests(script, ("a.py", "out", "b"), "python a.py")
    assert task.solution == Script(
        {"solve.sh": "echo solved\n"}, "bash /solution/solve.sh", 120.0, {"S": "1"}
    )
    assert task.metadata == {
        "name": "org/one",
        "version": "1.2",
        "network": "none",
        "agent_timeout_sec": "120",
        "difficulty": "easy",
        "tags": '["x", "y"]',
    }


def test_little_is_needed(tmp_path: Path) -> None:
    folder = write(tmp_path / "one", **manifest('version = "1.0"\n'))
    (folder / "solution/solve.sh").unlink()
    (folder / "solution").rmdir()
    task = load_task(folder, task_id="set/one")
    assert task.solution == {}
    assert isinstance(task.tests, RepositoryTests)
    assert (task.tests.artifacts, task.tests.visible, task.tests.script.timeout) == ((), None, 600.0)
    assert task.sandbox == SandboxSpec(env={"A": "1", "C": "two words"})
    assert task.metadata == {"network": "asks for public, gets none"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("surprise = 1", "surprise: unknown key"),
        ("[environment]\nmemory = '2G'", "environment.memory: unknown key"),
        ("[metadata.hintloop]\nturns = 3", "turns: unknown key"),
        ("[verifier]\ntimeout_sec = -1", "verifier.timeout_sec: .*greater than 0"),
        ("schema_version = '2.0'", "schema_version '2.0' is not supported"),
        ("[[steps]]\nname = 'a'", "steps is not supported"),
        ("[environment]\ngpus = 1", "environment.gpus is not supported"),
        ("[environment]\nos = 'windows'", "environment.os 'windows' is not supported"),
        ("[environment]\nhealthcheck = { command = 'x' }", "environment.healthcheck is not supported"),
        ("[environment]\nmcp_servers = [{ name = 'x' }]", "environment.mcp_servers is not supported"),
        (
            "[environment]\nnetwork_mode = 'allowlist'",
            "environment.network_mode 'allowlist' is not supported",
        ),
        ("[agent]\nallowed_hosts = ['example.org']", "agent.allowed_hosts is not supported"),
        ("[agent]\nuser = 'root'", "agent.user is not supported"),
        ("[verifier.environment]\ncpus = 1", "verifier.environment is not supported"),
        ("[[verifier.collect]]\ncommand = 'x'", "verifier.collect is not supported"),
        ("[verifier]\nenv = { KEY = '${KEY}' }", "a variable of the server in verifier.env is not supported"),
        ("artifacts = [{ source = 'a', exclude = ['b'] }]", "artifacts.exclude is not supported"),
        ("artifacts = ['/etc/passwd']", "'/etc/passwd' is not in the working directory"),
        ("artifacts = ['../x']", "'../x' is not in the working directory"),
        ("not toml", "task.toml: "),
    ],
)
def test_what_is_not_known_or_not_here_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^task one: .*{message}") as caught:
        load_task(write(tmp_path / "one", **manifest(text)), task_id="set/one")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["instruction.md", "task.toml", "environment/Dockerfile", "tests/test.sh"])
def test_a_missing_part_is_named(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path / "one")
    (folder / name).unlink()
    with pytest.raises(ValueError, match=f"task one: there is no {Path(name).name}"):
        load_task(folder, task_id="set/one")


def test_links_and_compose_files_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "one")
    (folder / "tests/passwd").symlink_to("/etc/passwd")
    with pytest.raises(ValueError, match="tests/passwd is a link"):
        load_task(folder, task_id="set/one")
    (folder / "tests/passwd").unlink()
    (folder / "environment/docker-compose.yaml").write_text("")
    with pytest.raises(ValueError, match="several containers are not supported"):
        load_task(folder, task_id="set/one")


@pytest.mark.parametrize(
    ("lines", "files"),
    [
        ("WORKDIR /app\nCOPY . .", {"Dockerfile", "a.py", "data/d.txt"}),
        ("WORKDIR /app\nCOPY a.py b.py", {"b.py"}),
        ("WORKDIR /app\nCOPY --chown=1:1 *.py src/", {"src/a.py"}),
        ('WORKDIR /app\nCOPY ["a.py", "data", "/app/x/"]', {"x/a.py", "x/d.txt"}),
        ("COPY data /testbed/data\nWORKDIR /testbed", {"data/d.txt"}),
        ("WORKDIR /repo\nADD data sub\nENV OLD style value", {"sub/d.txt"}),
        ("WORKDIR /workspace", set()),
    ],
)
def test_a_dockerfile_that_only_copies_needs_no_image(tmp_path: Path, lines: str, files: set[str]) -> None:
    folder = write(tmp_path / "one", environment__Dockerfile=f"FROM x\n{lines}\n", **manifest(""))
    task = load_task(folder, task_id="set/one")
    assert set(task.files) == files
    assert task.sandbox.image is None


@pytest.mark.parametrize(
    "lines",
    [
        "WORKDIR /app\nRUN pip install x",
        "WORKDIR /app\nCOPY a.py /etc/",
        "WORKDIR /srv/own\nCOPY a.py .",
        "COPY a.py /app/",
        "ARG X=/app\nWORKDIR $X",
        "WORKDIR /app\nADD https://example.org/x .",
        "WORKDIR /app\nUSER nobody",
        "WORKDIR /app\nFROM y\nWORKDIR /app",
        "WORKDIR /app\nCOPY --from=0 /a .",
    ],
)
def test_any_other_dockerfile_needs_an_image_that_is_named_by_its_content(tmp_path: Path, lines: str) -> None:
    tasks = [
        load_task(
            write(
                tmp_path / name,
                environment__Dockerfile=f"FROM x\n{lines}\n",
                environment__more=more,
                **manifest(""),
            ),
            task_id="set/one",
        )
        for name, more in (("one", "1"), ("two", "1"), ("three", "2"))
    ]
    images = [task.sandbox.image for task in tasks]
    assert tasks[0].files == {}
    assert tasks[0].sandbox.context == str(tmp_path / "one/environment")
    assert images[0] is not None
    assert images[0] == images[1] != images[2]


def test_a_ready_image_is_taken_as_it_is(tmp_path: Path) -> None:
    text = "artifacts = ['/app/x', 'y']\n[environment]\ndocker_image = 'org/image:1'"
    task = load_task(write(tmp_path / "one", **manifest(text)), task_id="set/one")
    assert (task.sandbox.image, task.sandbox.context, task.files) == ("org/image:1", None, {})
    assert isinstance(task.tests, RepositoryTests)
    assert task.tests.artifacts == ("x", "y")


def test_bytes_that_are_no_text_survive(tmp_path: Path) -> None:
    folder = write(tmp_path / "one")
    (folder / "environment/a.py").write_bytes(b"\xff\x00")
    assert (
        load_task(folder, task_id="set/one").files["a.py"].encode("utf-8", "surrogateescape") == b"\xff\x00"
    )


# Sets


def test_a_folder_of_tasks_is_a_set(tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        write(tmp_path / "mine" / name)
    (tmp_path / "mine/notes").mkdir()
    found = load_taskset_folder(tmp_path / "mine")
    ids = ["mine/one", "mine/three", "mine/two"]
    assert found.name == "mine"
    assert found.splits() == {
        "train": tuple(each for each in ids if not is_held_out(each)),
        "heldout": tuple(each for each in ids if is_held_out(each)),
    }
    assert found.get("mine/two").task_id == "mine/two"
    assert found.get("mine/two") is found.get("mine/two")
    with pytest.raises(KeyError, match="no such task"):
        found.get("mine/four")


def test_one_task_directory_is_a_set_of_one(tmp_path: Path) -> None:
    found = load_taskset_folder(write(tmp_path / "one"))
    assert [task for tasks in found.splits().values() for task in tasks] == ["one/one"]
    assert found.get("one/one").instruction == "Do it."


def test_splits_are_as_their_file_says(tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        write(tmp_path / "mine" / name)
    file = tmp_path / "mine/splits.toml"
    file.write_text('train = ["two", "three"]\nheldout = ["one"]\n')
    found = load_taskset_folder(tmp_path / "mine").splits()
    assert found == {"train": ["mine/two", "mine/three"], "heldout": ["mine/one"]}
    for text, message in (
        ('train = ["four"]', "names 'four', and there is no such task"),
        ('train = ["one"]\nheldout = ["one"]', "'one' is named twice"),
        ('train = "one"', "must be a list"),
        ('train = ["one"]', "no split has 'three'"),
        ("train", "splits.toml: "),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            load_taskset_folder(tmp_path / "mine")


def test_a_folder_without_tasks_or_with_odd_names_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no task"):
        load_taskset_folder(tmp_path)
    write(tmp_path / "mine" / "odd name")
    with pytest.raises(ValueError, match="not 'odd name'"):
        load_taskset_folder(tmp_path / "mine")
