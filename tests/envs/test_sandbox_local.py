"""The local sandbox keeps what it promises: isolation, limits, time-outs, no leaks, and truth about it."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hintloop.envs.sandbox.base import SandboxDead, Status
from hintloop.envs.sandbox.client import RunnerSandbox
from hintloop.envs.sandbox.limits import PROCESSES, READ
from hintloop.envs.sandbox.local import LocalProvider
from hintloop.envs.sandbox.processes import Capture

SOURCE = "def square(x):\n    return x * x\n"
FULL = "user+pid+mount+net+ipc+uts"


@pytest.fixture(scope="module")
def provider() -> Iterator[LocalProvider]:
    with LocalProvider() as made:
        if made.isolation != FULL:
            pytest.skip(f"this host only allows the isolation {made.isolation}")
        yield made


@pytest.fixture
def box(provider: LocalProvider) -> Iterator[RunnerSandbox]:
    sandbox = provider.start({"solution.py": SOURCE})
    yield sandbox
    sandbox.close()


def run(box: RunnerSandbox, command: str) -> str:
    return box.exec(command, timeout=10).output


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False


def runners(zygote: int) -> list[int]:
    text = Path(f"/proc/{zygote}/task/{zygote}/children").read_text()
    return [int(pid) for pid in text.split() if alive(int(pid))]


def below(pid: int) -> list[int]:
    found = []
    for child in runners(pid):
        found += [child, *below(child)]
    return found


def soon(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


# What a command can see and do


def test_sees_only_its_own_processes(box: RunnerSandbox) -> None:
    pids = {int(name) for name in run(box, "ls /proc").split() if name.isdigit()}
    assert 1 in pids
    assert max(pids) < 20


def test_has_no_network_but_an_idle_loopback(box: RunnerSandbox) -> None:
    devices = [line.split(":")[0].strip() for line in run(box, "cat /proc/net/dev").splitlines()[2:]]
    assert devices == ["lo"]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        result = run(box, f"python -c 'import socket; socket.create_connection((\"127.0.0.1\", {port}), 1)'")
    assert "Network is unreachable" in result or "refused" in result


@pytest.mark.parametrize(
    "path", ["/x", "/usr/x", "/etc/passwd", "/dev/x", "/var/x", "/proc/sys/kernel/hostname"]
)
def test_cannot_write_outside_of_its_folder(box: RunnerSandbox, path: str) -> None:
    result = box.exec(f"echo x >> {path}", timeout=10)
    assert result.status is Status.NONZERO


def test_does_not_see_the_host_files(box: RunnerSandbox) -> None:
    project = Path(__file__).resolve().parents[2]
    probe = f"ls {project} {Path.home()}/.ssh /home /root/.bashrc /var/log /etc/shadow /sys 2>/dev/null"
    assert run(box, probe).strip() == ""
    assert str(project) not in run(box, "cat /proc/1/cmdline /proc/self/mountinfo")


def test_temp_folder_is_private(provider: LocalProvider, box: RunnerSandbox) -> None:
    assert box.exec("echo x > /tmp/planted && echo x > /dev/shm/also", timeout=10).status is Status.OK
    other = provider.start({})
    assert run(other, "ls -A /tmp /var/tmp").split() == ["/tmp:", "/var/tmp:"]
    other.close()
    assert not Path("/tmp/planted").exists()


def test_has_no_privilege_and_can_gain_none(box: RunnerSandbox) -> None:
    status = run(box, "cat /proc/self/status")
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert {fields[name] for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {"0" * 16}
    assert fields["NoNewPrivs"] == "1"
    assert fields["Uid"].split() == ["1000"] * 4
    assert box.exec("unshare -U true", timeout=10).status is Status.NONZERO
    assert box.exec("mount -t tmpfs x /tmp", timeout=10).status is Status.NONZERO


def test_environment_is_fixed_and_holds_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "secret-4711")
    with LocalProvider() as fresh:
        sandbox = fresh.start({})
        environment = dict(line.split("=", 1) for line in run(sandbox, "env").splitlines())
        everything = run(sandbox, "cat /proc/*/environ 2>/dev/null; env")
        sandbox.close()
    assert "secret-4711" not in everything
    assert environment["PAGER"] == "cat"
    assert environment["GIT_TERMINAL_PROMPT"] == "0"
    assert environment["HOME"] == environment["PWD"]


def test_runner_cannot_be_looked_into_or_killed(box: RunnerSandbox) -> None:
    assert "denied" in run(box, "ls /proc/1/fd; cat /proc/1/environ")
    run(box, "kill -9 1; kill -9 -1")
    assert box.read("solution.py") == SOURCE.encode()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has a second group for the runner")
def test_limits_of_the_runner_cannot_be_changed(box: RunnerSandbox) -> None:
    attack = "import resource as r\nfor n in range(16):\n    try: r.prlimit(1, n, (0, 0))\n"
    attack += "    except OSError: pass\n"
    box.write("m.py", (attack + "def f(x):\n    return 1\n").encode())
    assert box.exec("python m.py", timeout=10).status is Status.OK
    assert box.call_function("m.py", "f", [[1]], timeout=10)[0].value == 1
    assert run(box, "echo well") == "well\n"
    box.write("a", b"x")


def test_no_open_file_of_the_runner_leaks(box: RunnerSandbox) -> None:
    kinds = [
        line.split(" -> ")[-1].split(":")[0] for line in run(box, "ls -l /proc/self/fd").splitlines()[1:]
    ]
    assert sorted(kinds)[:2] == ["/dev/null", "/proc/3/fd"]
    assert kinds.count("pipe") == len(kinds) - 2 == 2
    source = "import os\ndef f(x):\n    try: return os.fstat(x).st_mode\n    except OSError: return 0\n"
    modes = [
        stat.S_IFMT(mode) for mode, _ in call(box, source, *range(256)) if isinstance(mode, int) and mode
    ]
    assert modes == [stat.S_IFCHR] * 3 + [stat.S_IFREG]


# Running commands


def test_result_of_a_command(box: RunnerSandbox) -> None:
    result = box.exec("echo out; echo err >&2; exit 3", timeout=10)
    assert (result.status, result.exit_code, result.output) == (Status.NONZERO, 3, "out\nerr\n")
    assert 0 < result.seconds < 10


def test_stdin_is_empty_or_what_was_given(box: RunnerSandbox) -> None:
    assert box.exec("cat", timeout=10).output == ""
    data = bytes(range(256)) * 1000
    assert box.exec("wc -c", timeout=10, stdin=data).output.strip() == str(len(data))


def test_timeout_kills_the_whole_tree(box: RunnerSandbox) -> None:
    result = box.exec("echo early; setsid sleep 60 & (sleep 60 & sleep 60)", timeout=2.0)
    assert (result.status, result.exit_code, result.output) == (Status.TIMEOUT, None, "early\n")
    assert run(box, "ls /proc").split()[0] == "1"
    assert "sleep" not in run(box, "cat /proc/[0-9]*/comm")


def test_background_children_do_not_block_and_do_not_survive(box: RunnerSandbox) -> None:
    result = box.exec("sleep 60 & setsid sleep 61 & nohup sleep 62 & echo hi", timeout=30)
    assert (result.status, result.output) == (Status.OK, "hi\n")
    assert "sleep" not in run(box, "cat /proc/[0-9]*/comm")


def test_output_keeps_head_and_tail(box: RunnerSandbox) -> None:
    result = box.exec("echo first; seq 200000; echo last", timeout=20)
    assert result.status is Status.OUTPUT_CAPPED
    assert result.exit_code == 0
    assert len(result.output) < 70_000
    assert result.output.startswith("first\n")
    assert result.output.endswith("last\n")
    assert "bytes left out" in result.output


def test_endless_output_is_stopped(box: RunnerSandbox) -> None:
    assert box.exec("yes", timeout=20).status is Status.OUTPUT_CAPPED


def test_output_that_is_not_text_is_replaced(box: RunnerSandbox) -> None:
    assert box.exec(r"printf 'a\377b\303'", timeout=10).output == "a\ufffdb\ufffd"


@given(st.lists(st.binary(max_size=40), max_size=20))
@settings(deadline=None, max_examples=100)
def test_capture_keeps_both_ends_however_the_bytes_arrive(parts: list[bytes]) -> None:
    capture = Capture(size=20, flood=300)
    for part in parts:
        capture.keep(part)
    whole = b"".join(parts)
    kept, left_out = capture.result()
    assert capture.flooded == (len(whole) > 300)
    if len(whole) <= 20:
        assert (kept, left_out) == (whole, 0)
    else:
        assert left_out == len(whole) - 20
        assert kept.startswith(whole[:10] + b"\n[")
        assert kept.endswith(b"]\n" + whole[-10:])


def test_commands_that_cannot_be_run_are_results(box: RunnerSandbox) -> None:
    for command in ("a\0b", "x" * 300_000, "\ud800"):
        result = box.exec(command, timeout=10)
        assert result.status is Status.NONZERO
    assert box.exec("", timeout=10).status is Status.OK


def test_memory_is_limited(box: RunnerSandbox) -> None:
    hungry = "python -c 'x = bytearray(1 << 30)'"
    assert box.exec(hungry, timeout=20).status is Status.OOM
    assert box.exec("true", timeout=10).status is Status.OK


def test_memory_of_the_whole_tree_is_limited(box: RunnerSandbox) -> None:
    box.write(
        "eat.py",
        b"import os, time\nos.fork(); os.fork()\nx = bytearray(b'x') * (400 << 20)\ntime.sleep(20)\n",
    )
    assert box.exec("python eat.py", timeout=20).status is Status.OOM


def test_fork_bomb_is_contained(box: RunnerSandbox) -> None:
    box.write(
        "bomb.py", b"import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass\n"
    )
    limit = run(box, "grep 'Max processes' /proc/self/limits").split()[2]
    result = box.exec("python bomb.py", timeout=0.7)
    assert limit == str(PROCESSES)
    assert result.status in (Status.TIMEOUT, Status.NONZERO)
    assert run(box, "echo well") == "well\n"


def test_disk_is_limited(box: RunnerSandbox) -> None:
    assert box.exec("head -c 100M /dev/zero > big; rm big", timeout=20).status is Status.OK
    assert (
        box.exec("for i in 1 2 3; do head -c 40M /dev/zero > big$i || exit 1; done", timeout=20).exit_code
        == 1
    )
    with pytest.raises(PermissionError, match="No space"):
        box.write("more", b"x" * 4_000_000)


# Files


def test_files_are_written_read_and_listed(box: RunnerSandbox) -> None:
    box.write("pkg/deep/a.txt", b"\x00\xff")
    box.write("pkg/deep/a.txt", b"\xff")
    box.write("./b.txt", b"")
    assert box.read("pkg//deep/./a.txt") == b"\xff"
    assert box.list_files() == ["b.txt", "pkg/deep/a.txt", "solution.py"]
    with pytest.raises(FileNotFoundError):
        box.read("nowhere.txt")


BAD_PATHS = [
    "/etc/passwd",
    "../x",
    "a/../../x",
    "",
    ".",
    "a\0b",
    "\ud800",
    "solution.py/x",
    "x" * 5000,
    "n" * 300,
]


@pytest.mark.parametrize("path", BAD_PATHS, ids=range(len(BAD_PATHS)))
def test_bad_paths_are_refused(box: RunnerSandbox, path: str) -> None:
    with pytest.raises((PermissionError, FileNotFoundError)):
        box.read(path)
    with pytest.raises(PermissionError):
        box.write(path, b"x")
    assert box.list_files() == ["solution.py"]


def test_planted_links_lead_nowhere(box: RunnerSandbox) -> None:
    run(box, "ln -s /etc/passwd secret; ln -s /tmp/new dangling; ln -s / root; ln -s . self; ln -s loop loop")
    for path in ("secret", "root/etc/passwd", "loop"):
        with pytest.raises(PermissionError):
            box.read(path)
    for path in ("secret", "dangling", "root/tmp/new", "loop"):
        with pytest.raises(PermissionError):
            box.write(path, b"x")
    assert run(box, "ls /tmp") == ""
    assert box.read("self/solution.py") == SOURCE.encode()
    assert box.list_files() == ["solution.py"]


def test_what_is_no_regular_file_is_refused_at_once(box: RunnerSandbox) -> None:
    run(
        box,
        "mkfifo pipe; mkdir folder; ln -s /dev/zero zero; head -c 2M /dev/zero > large; chmod 0 solution.py",
    )
    for path in ("pipe", "folder", "zero", "large", "solution.py"):
        with pytest.raises(PermissionError):
            box.read(path)
    assert len(box.list_files()) == 2
    assert READ < 2 << 20


def test_listing_survives_a_hostile_tree(box: RunnerSandbox) -> None:
    box.write(
        "plant.py",
        b"import os\n"
        b"for n in range(1500): open(f'f{n}', 'w').close()\n"
        b"os.mkdir('closed', 0)\n"
        b"open(b'\\xff\\n', 'w').close()\n"
        b"for n in range(3000):\n    os.mkdir('d'); os.chdir('d')\n",
    )
    run(box, "python plant.py")
    files = box.list_files()
    assert len(files) == 1000
    assert files == sorted(files)


def test_start_refuses_files_that_do_not_fit(provider: LocalProvider) -> None:
    for files in ({"../x": ""}, {"a": "", "a/b": ""}, {"big": "x" * (17 << 20)}):
        with pytest.raises(ValueError, match=r"files|large"):
            provider.start(files)
    assert soon(lambda: runners(provider.zygote_pid) == [])


# Function calls


def call(
    box: RunnerSandbox, source: str, *arguments: object, timeout: float = 5.0
) -> list[tuple[object, str | None]]:
    box.write("m.py", source.encode())
    results = box.call_function("m.py", "f", [[argument] for argument in arguments], timeout=timeout)
    return [(result.value, result.error) for result in results]


def test_calls_give_values_with_exact_types(box: RunnerSandbox) -> None:
    values = [None, True, 1, 1.0, -0.5, "ü\ud800\n", [], [[1, "a"], {"k": [False]}], {"": None}, 10**400]
    results = call(box, "def f(x):\n    return x\n", *values)
    assert [value for value, _ in results] == values
    assert [type(value) for value, _ in results] == [type(value) for value in values]
    assert [error for _, error in results] == [None] * len(values)


@pytest.mark.parametrize(
    ("expression", "error"),
    [
        ("[object()]", "NotData: unsupported type object"),
        ("{object(): 2}", "NotData: unsupported type object"),
        ("x / 0", "ZeroDivisionError: division by zero"),
        ("int('a\\n' * 500)", "ValueError: invalid literal"),
        ("'x' * 300_000", "NotData: too large"),
        ("10 ** 5000", "NotData: Exceeds the limit"),
        ("f(x)", "RecursionError: maximum recursion depth exceeded"),
        ("bytearray(1 << 30)", "MemoryError"),
        ("exit(0)", "NameError: name 'exit' is not defined"),
        ("__import__('sys').exit(0)", "SystemExit: 0"),
        ("type('int', (int,), {})(1)", "NotData: unsupported type int"),
        ("input()", "EOFError"),
    ],
)
def test_calls_give_errors_in_one_line(box: RunnerSandbox, expression: str, error: str) -> None:
    ((value, told), *_) = call(box, f"def f(x):\n    return {expression}\n", 1)
    assert value is None
    assert told is not None
    assert told.startswith(error)
    assert len(told) <= 200
    assert "\n" not in told


def test_values_nested_too_deeply_or_cyclic_are_errors(box: RunnerSandbox) -> None:
    source = (
        "def f(x):\n    v = []\n    for _ in range(x): v = [v]\n    if not x: v.append(v)\n    return v\n"
    )
    results = call(box, source, 40, 60, 0)
    assert [error for _, error in results] == [None, *["NotData: nested too deeply"] * 2]


def test_a_module_that_does_not_load_fails_every_call(box: RunnerSandbox) -> None:
    assert call(box, "def f(x:\n", 1, 2)[1][1].startswith("SyntaxError: ")  # type: ignore[union-attr]
    assert call(box, "raise OSError('no')\n", 1, 2) == [(None, "OSError: no")] * 2
    assert call(box, "g = 1\n", 1) == [(None, "AttributeError: module 'm' has no attribute 'f'")]
    assert box.call_function("none.py", "f", [[1]], timeout=5)[0].error.startswith("FileNotFoundError")  # type: ignore[union-attr]
    assert box.call_function("none.py", "f", [], timeout=5) == []


def test_modules_of_the_folder_and_of_python_can_be_imported(box: RunnerSandbox) -> None:
    source = "import solution, dataclasses\n@dataclasses.dataclass\nclass A:\n    n: int\n"
    source += "def f(x):\n    return A(solution.square(x)).n\n"
    assert call(box, source, 3) == [(9, None)]


def test_each_call_has_arguments_of_its_own(box: RunnerSandbox) -> None:
    box.write("m.py", b"def f(a, b):\n    a.append(1)\n    return [a, b]\n")
    shared: list[int] = []
    results = box.call_function("m.py", "f", [[shared, shared]] * 2, timeout=5)
    assert [result.value for result in results] == [[[1], []]] * 2
    assert shared == []


def test_timeout_keeps_the_calls_before(box: RunnerSandbox) -> None:
    results = call(box, "def f(x):\n    while x: pass\n    return x\n", 0, 1, 0, timeout=2.0)
    assert results == [(0, None), (None, "Timeout"), (None, "Timeout")]
    assert call(box, "while True: pass\n", 0, timeout=0.3) == [(None, "Timeout")]


def test_a_process_that_ends_badly_has_no_results(box: RunnerSandbox) -> None:
    source = "import os\ndef f(x):\n    if x: os.kill(os.getpid(), 9)\n    return x\n"
    assert call(box, source, 0, 1) == [(None, "Killed: SIGKILL")] * 2
    source = "import os\ndef f(x):\n    if x: os._exit(0)\n    return x\n"
    assert call(box, source, 0, 1) == [(0, None), (None, "Exited: the process ended before the call did")]


# Life and death


def test_closing_ends_every_process(provider: LocalProvider) -> None:
    sandbox = provider.start({})
    runner = max(runners(provider.zygote_pid))
    threading.Timer(0.3, sandbox.close).start()
    with pytest.raises(SandboxDead):
        sandbox.exec("setsid sleep 60 & sleep 60", timeout=30)
    assert soon(lambda: not alive(runner))
    sandbox.close()
    with pytest.raises(SandboxDead):
        sandbox.read("x")


def test_a_stuck_runner_is_dead_and_is_killed(
    provider: LocalProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hintloop.envs.sandbox.client._GRACE", 0.2)
    monkeypatch.setattr("hintloop.envs.sandbox.client._CLOSE", 0.2)
    sandbox = provider.start({})
    runner = max(runners(provider.zygote_pid))
    os.kill(runner, signal.SIGSTOP)
    with pytest.raises(SandboxDead):
        sandbox.read("x")
    assert soon(lambda: not alive(runner))


def test_a_dead_zygote_takes_its_sandboxes_along_and_is_replaced() -> None:
    with LocalProvider() as provider:
        sandbox = provider.start({})
        first = provider.zygote_pid
        family = below(first)
        assert family
        os.kill(first, signal.SIGKILL)
        assert soon(lambda: not any(map(alive, family)))
        with pytest.raises(SandboxDead):
            sandbox.exec("true", timeout=5)
        again = provider.start({"a": "b"})
        assert again.read("a") == b"b"
        assert provider.zygote_pid != first
    with pytest.raises(SandboxDead):
        provider.start({})


def test_closing_the_provider_ends_everything() -> None:
    provider = LocalProvider()
    sandboxes = [provider.start({}) for _ in range(3)]
    family = [provider.zygote_pid, *below(provider.zygote_pid)]
    assert len(family) == 4
    provider.close()
    provider.close()
    assert not any(map(alive, family))
    with pytest.raises(SandboxDead):
        sandboxes[0].read("x")


def test_nothing_outlives_a_killed_server() -> None:
    program = (
        "import json, threading, time\n"
        "from hintloop.envs.sandbox.local import LocalProvider\n"
        "provider = LocalProvider()\n"
        "box = provider.start({})\n"
        "run = lambda: box.exec('setsid sleep 60 & sleep 60', timeout=60)\n"
        "threading.Thread(target=run, daemon=True).start()\n"
        "print(json.dumps(provider.zygote_pid), flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        zygote = json.loads(server.stdout.readline())
        assert soon(lambda: len(below(zygote)) >= 3)  # now the command runs
        family = [zygote, *below(zygote)]
        server.kill()
    assert soon(lambda: not any(map(alive, family)))


def test_sixteen_threads_start_at_once(provider: LocalProvider) -> None:
    def one(number: int) -> object:
        sandbox = provider.start({"solution.py": SOURCE})
        value = sandbox.call_function("solution.py", "square", [[number]], timeout=20)[0].value
        output = sandbox.exec(f"echo {number}", timeout=20).output
        sandbox.close()
        return value, output

    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(one, range(48)))
    assert results == [(n * n, f"{n}\n") for n in range(48)]
    assert soon(lambda: runners(provider.zygote_pid) == [])


def test_weaker_isolation_is_told_and_still_works(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with LocalProvider(namespaces=()) as weak:
        assert weak.isolation == "none"
        assert "weak_sandbox" in capfd.readouterr().out
        sandbox = weak.start({"solution.py": SOURCE})
        runner = max(below(weak.zygote_pid))
        folder = Path(run(sandbox, "pwd").strip())
        assert sandbox.isolation == "none"
        assert folder.is_dir()
        assert sandbox.call_function("solution.py", "square", [[3]], timeout=5)[0].value == 9
        result = sandbox.exec("(setsid sleep 60 &) ; sleep 60", timeout=0.3)
        assert result.status is Status.TIMEOUT
        assert below(runner) == []
        with pytest.raises(PermissionError):
            sandbox.read("/etc/passwd")
        sandbox.close()
        assert soon(lambda: not folder.exists())


def test_some_namespaces_are_better_than_none() -> None:
    with LocalProvider(namespaces=("mount", "pid")) as some:
        assert some.isolation == "pid+mount"
        sandbox = some.start({"solution.py": SOURCE})
        assert sandbox.exec("touch /usr/x", timeout=5).status is Status.NONZERO
        assert sandbox.read("solution.py") == SOURCE.encode()
