"""The command line: what it prints, and one clear line for each bad input."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from hintloop.cli import main as command
from hintloop.cli.errors import TRACEBACK, is_expected, one_line
from hintloop.cli.main import run_command
from hintloop.cli.runfolder import RunFolder

COMMANDS = [
    ["play"],
    ["serve", "env"],
    ["serve", "expert"],
    ["rollout"],
    ["learn"],
    ["evaluate"],
    ["tasks", "list"],
    ["tasks", "show"],
    ["tasks", "new"],
    ["tasks", "check"],
    ["journal", "list"],
    ["journal", "check"],
    ["journal", "compact"],
    ["journal", "copy"],
    ["traces", "ingest"],
    ["traces", "tokenize"],
    ["traces", "show"],
    ["traces", "stats"],
    ["traces", "grep"],
    ["traces", "export"],
    ["traces", "push"],
    ["traces", "replay"],
    ["sim-engine"],
    ["view"],
    ["student", "build"],
    ["student", "eval"],
    ["config"],
    ["report"],
    ["status"],
    ["doctor"],
]

Fails = Callable[..., str]


@pytest.fixture
def fails(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Fails:
    """Runs a command that must fail as bad input does, and gives its one line."""
    monkeypatch.delenv(TRACEBACK, raising=False)

    def run(*arguments: object) -> str:
        code = run_command([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        assert code == 2, printed.out + printed.err
        (line,) = printed.err.splitlines()
        assert line.startswith("hintloop: error: ")
        assert printed.out == ""
        return line.removeprefix("hintloop: error: ")

    return run


@pytest.fixture
def no_tokenizer(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "config.json").write_text("{}")
    return folder


def test_unknown_preset(fails: Fails) -> None:
    assert fails("play", "--preset", "lapdog") == "no preset 'lapdog'; there are laptop, model, smoke"


def test_unknown_key(fails: Fails) -> None:
    expected = "unknown key 'rollout.grup_size'; the nearest valid key is 'rollout.group_size'"
    assert fails("play", "--set", "rollout.grup_size=3") == expected


def test_output_folder_that_cannot_be_written(fails: Fails, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    line = fails("play", "--name", "x", "--set", f"run.output={tmp_path / 'file'}")
    assert line == f"cannot write to {tmp_path / 'file' / 'x'}: Not a directory"


def test_model_folder_without_tokenizer(fails: Fails, tmp_path: Path, no_tokenizer: Path) -> None:
    output = tmp_path / "runs"
    line = fails(
        "play", "--name", "x", "--set", f"run.output={output}", "--set", f"student.model={no_tokenizer}"
    )
    assert line == f"model {no_tokenizer}: {no_tokenizer} holds no tokenizer (tokenizer.json)"
    assert not (output / "x").exists()


def test_model_folder_without_weights(fails: Fails, tmp_path: Path) -> None:
    line = fails(
        "learn", "--journal", tmp_path, "--run", tmp_path / "run", "--set", f"student.model={tmp_path}"
    )
    assert line == f"model {tmp_path} has no weights (*.safetensors)"


def test_chat_template_that_renderers_does_not_know(fails: Fails, tmp_path: Path, no_tokenizer: Path) -> None:
    bundled = Path(str(command.__file__)).parent.parent / "agent" / "student" / "student-tiny"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(bundled / name, no_tokenizer / name)
    chosen = [
        "--name",
        "x",
        "--set",
        f"run.output={tmp_path / 'runs'}",
        "--set",
        f"student.model={no_tokenizer}",
    ]
    line = fails("play", *chosen)
    assert line.startswith(
        f"model {no_tokenizer}: `renderers` does not know the chat template of {no_tokenizer}"
    )
    assert "fit" in fails("play", *chosen, "--set", "student.renderer=klingon")


def test_model_that_does_not_exist(fails: Fails, tmp_path: Path) -> None:
    line = fails("evaluate", tmp_path / "nowhere")
    assert line.startswith(f"no model '{tmp_path / 'nowhere'}': give student-tiny, a model folder or")


def test_task_that_does_not_exist(fails: Fails) -> None:
    assert fails("tasks", "show", "bugfix/nope.0.0").startswith("no task 'bugfix/nope.0.0': ")
    assert fails("tasks", "list", "nope").startswith("no task set 'nope'; known: ")
    assert fails("tasks", "list", "bugfix", "--split", "x") == (
        "task set 'bugfix' has no split 'x'; it has train, heldmut, heldfn"
    )


def test_tasks_that_do_not_exist_are_told_before_a_run_is_made(fails: Fails, tmp_path: Path) -> None:
    settings = ["--set", f"run.output={tmp_path}", "--set", "teachers.scripted=false"]
    assert fails("play", "--tasks", "nope", *settings).startswith("no task set 'nope'; known: ")
    assert not list(tmp_path.iterdir())


def test_a_task_of_a_folder_is_shown_by_its_id(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "own-set"
    assert run_command(["tasks", "new", str(folder / "one")]) == 0
    assert run_command(["tasks", "show", "own-set/one", "--tasks", str(folder)]) == 0
    assert "own-set/one" in capsys.readouterr().out.splitlines()


def test_a_task_that_cannot_be_read_fails_its_check_and_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "partly-read"
    for name in ("whole", "torn"):
        assert run_command(["tasks", "new", str(folder / name)]) == 0
    (folder / "torn" / "tests" / "test.sh").unlink()
    capsys.readouterr()
    assert run_command(["tasks", "check", str(folder), "--times", "1", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [row for row in found if not row["passed"]] == [
        {
            "task_id": "partly-read/torn",
            "check": "static.manifest",
            "passed": False,
            "detail": "task torn: there is no test.sh",
        }
    ]
    assert {row["task_id"] for row in found if row["passed"]} == {"partly-read/whole"}


@pytest.mark.parametrize("server", ["env", "expert"])
def test_port_that_is_taken(fails: Fails, server: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = fails("serve", server, "--port", port)
    assert "in use" in line or f"port {port} on 127.0.0.1 is taken" in line


def test_run_that_does_not_exist(fails: Fails, tmp_path: Path) -> None:
    expected = f"{tmp_path} is not the folder of a run (it has no config.toml)"
    assert (
        fails("play", "--resume", tmp_path)
        == fails("report", tmp_path)
        == fails("status", tmp_path)
        == expected
    )


def test_run_that_exists_already(fails: Fails, run: RunFolder) -> None:
    line = fails("play", "--name", run.path.name, "--set", f"run.output={run.path.parent}")
    assert line == f"{run.path} holds a run; go on with it: hintloop play --resume {run.path}"


def test_folder_that_holds_something_else(fails: Fails, tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    line = fails("play", "--name", tmp_path.name, "--set", f"run.output={tmp_path.parent}")
    assert line == f"{tmp_path} is not empty; choose another --name"


def test_run_that_is_at_work(fails: Fails, run: RunFolder) -> None:
    with run.lock():
        assert fails("play", "--resume", run.path) == f"another hintloop play is at work on {run.path}"


def test_resume_takes_the_settings_of_the_run(fails: Fails, run: RunFolder) -> None:
    assert fails("play", "--resume", run.path, "--seed", 0).startswith(
        "--resume goes on with the settings of the run"
    )


def test_wrong_use_of_a_command(fails: Fails) -> None:
    assert fails("tasks", "show") == "Missing argument 'TASK'."
    assert fails("dance").startswith("No such command 'dance'.")
    assert fails("learn") == "give a --journal to learn from, or the --run that has one"


def test_an_error_that_nobody_expects_keeps_its_traceback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "_report", lambda *_, **__: [][0])
    with pytest.raises(IndexError):
        run_command(["report", str(tmp_path)])
    assert not is_expected(IndexError())


def test_processes_of_a_run_log_the_traceback_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(TRACEBACK, "1")
    assert run_command(["tasks", "show", "bugfix/nope.0.0"]) == 2
    *trace, line = capsys.readouterr().err.splitlines()
    assert trace[0].startswith("Traceback")
    assert line.startswith("hintloop: error: no task")


def test_errors_become_one_line() -> None:
    assert one_line(KeyError("no such thing")) == "no such thing"
    assert one_line(FileNotFoundError(2, "No such file or directory", "x")) == "No such file or directory: x"
    assert one_line(ValueError("a\n  b")) == "a b"
    assert one_line(ValueError()) == "ValueError"


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_has_help_with_an_example(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command([*words, "--help"]) == 0
    assert f"Example: hintloop {' '.join(words)}" in " ".join(capsys.readouterr().out.split())


def test_help_imports_nothing_that_takes_long() -> None:
    code = "import sys\nfrom hintloop.cli.main import run_command\nrun_command(['--help'])\n"
    code += (
        "heavy = {'torch', 'transformers', 'openenv', 'pyarrow', 'httpx', 'matplotlib'} & set(sys.modules)\n"
    )
    code += "sys.exit(f'imported {heavy}' if heavy else 0)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_config_is_printed_as_toml_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["config", "--preset", "smoke", "--set", "learner.steps=3"]) == 0
    toml = tomllib.loads(capsys.readouterr().out)
    assert run_command(["config", "--preset", "smoke", "--set", "learner.steps=3", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["learner"]["steps"] == toml["learner"]["steps"] == 3
    assert printed["run"]["name"] is None


def test_tables_can_be_had_as_json(capsys: pytest.CaptureFixture[str], run: RunFolder) -> None:
    assert run_command(["tasks", "list", "--json"]) == 0
    assert {row["split"] for row in json.loads(capsys.readouterr().out)} >= {"train", "heldmut", "heldfn"}
    assert run_command(["status", str(run.path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["part"] for row in told["parts"]] == ["play", "rollout", "learner"]
    assert run_command(["report", str(run.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["episodes"]["played"] == 4


def test_a_task_is_shown_without_what_the_agent_must_not_see(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["tasks", "list", "bugfix", "--split", "heldfn", "--json"]) == 0
    task = json.loads(capsys.readouterr().out)[0]["task"]
    assert run_command(["tasks", "show", task, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["task_id"] == task
    assert "solution" not in shown
    assert run_command(["tasks", "show", task, "--solution"]) == 0
    assert "--- solution.py (solution)" in capsys.readouterr().out


def test_doctor_says_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["doctor", "--json"]) == 0
    verdicts = {row["check"]: row["verdict"] for row in json.loads(capsys.readouterr().out)}
    assert verdicts["python"] == verdicts["torch"] == verdicts["bundled student"] == "ok"
    assert verdicts["sandbox isolation"] in ("ok", "weak")
