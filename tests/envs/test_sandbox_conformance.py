"""What every kind of sandbox must withstand: one file, run on each implementation that this machine has.

Each test is a fault that has broken a sandbox of some project. What only one implementation promises has its own
file.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest

from hintloop.envs.sandbox.base import (
    Changes,
    ExecResult,
    Sandbox,
    SandboxDead,
    SandboxProvider,
    SandboxSpec,
    Status,
)
from hintloop.envs.sandbox.layout import VERIFIER, WORKSPACE_NAMES
from hintloop.envs.sandbox.limits import DISK, MEMORY, MiB

from .kinds import KINDS, open_or_skip


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return cast(str, request.param)


@pytest.fixture(scope="module")
def provider(kind: str) -> Iterator[SandboxProvider]:
    made = open_or_skip(kind)
    yield made
    made.close()


@pytest.fixture
def box(provider: SandboxProvider) -> Iterator[Sandbox]:
    sandbox = provider.start({"solution.py": "def square(x):\n    return x * x\n"})
    yield sandbox
    sandbox.close()


def run(box: Sandbox, command: str, timeout: float = 20.0) -> str:
    return box.exec(command, timeout=timeout).output


@pytest.fixture
def not_in_gvisor(request: pytest.FixtureRequest, kind: str) -> Callable[[str], None]:
    """For a known gap of gVisor's kernel, which no flag of ours closes: there the test has to fail."""

    def expect_failure(reason: str) -> None:
        if kind == "docker+gvisor":
            request.applymarker(pytest.mark.xfail(reason=reason, strict=True))

    return expect_failure


def quickly(box: Sandbox, command: str) -> ExecResult:
    """Run what must end by itself, and not by the deadline."""
    result = box.exec(command, timeout=40)
    assert result.status is not Status.TIMEOUT
    return result


def program(box: Sandbox, source: str, timeout: float = 30.0) -> ExecResult:
    """Run a Python program in the sandbox."""
    box.write("program.py", source.encode())
    return box.exec("python3 program.py", timeout=timeout)


def commands_alive(box: Sandbox) -> list[str]:
    """Names of all processes but the runner's and the shell that asks."""
    listing = run(
        box, "cd /proc; for p in [0-9]*; do [ $p = 1 ] || [ $p = $$ ] || cat $p/comm; done 2>/dev/null"
    )
    return [name for name in listing.split() if name != "cat"]


def soon(condition: Callable[[], bool], seconds: float = 15.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return condition()


# Nothing outlives a command, and nothing that it leaves behind blocks it


def test_a_timeout_ends_the_process_and_not_only_the_wait(box: Sandbox) -> None:
    result = box.exec("sleep 60", timeout=0.5)
    assert (result.status, result.exit_code) == (Status.TIMEOUT, None)
    assert result.seconds < 30
    assert commands_alive(box) == []


def test_a_timeout_ends_what_ignores_signals_and_has_left_its_session(box: Sandbox) -> None:
    source = "import os, signal, time\nfor n in (1, 2, 3, 15): signal.signal(n, signal.SIG_IGN)\n"
    source += "os.fork() or os.setsid()\nprint('up', flush=True)\ntime.sleep(60)\n"
    assert program(box, source, timeout=2.0).status is Status.TIMEOUT
    assert commands_alive(box) == []


def test_a_child_with_a_session_of_its_own_is_dead_afterwards(box: Sandbox) -> None:
    assert quickly(box, "setsid sleep 60 & nohup sleep 61 >/dev/null 2>&1 & echo hi").output == "hi\n"
    assert commands_alive(box) == []


def test_a_background_child_that_holds_the_output_does_not_block(box: Sandbox) -> None:
    assert quickly(box, "sleep 60 & echo hi").output == "hi\n"
    assert quickly(box, "(sleep 60; echo late) & echo hi").output == "hi\n"


def test_what_outlives_a_command_is_told_if_asked(box: Sandbox) -> None:
    assert not box.exec("sleep 60 & true", timeout=20).left_running
    assert box.exec("setsid sleep 60 & true", timeout=20, grace=0.1).left_running
    assert not box.exec("sleep 0.2 & (exit 3)", timeout=20, grace=3.0).left_running
    assert box.exec("sleep 0.2 & (exit 3)", timeout=20, grace=3.0).exit_code == 3
    assert commands_alive(box) == []


def test_output_before_a_timeout_is_kept(box: Sandbox) -> None:
    result = box.exec("echo early; sleep 60; echo late", timeout=5.0)
    assert (result.status, result.output) == (Status.TIMEOUT, "early\n")


def test_the_status_of_a_background_child_can_be_waited_for(box: Sandbox) -> None:
    assert quickly(box, "(exit 7) & wait $!; echo $?").output == "7\n"


def test_a_daemon_cannot_write_into_a_later_command(box: Sandbox) -> None:
    quickly(box, "(setsid sh -c 'sleep 0.3; echo forged >> result' &) ; echo 0 > result")
    time.sleep(0.6)
    assert box.read("result") == b"0\n"


# Input


def test_reading_input_meets_its_end(box: Sandbox) -> None:
    assert quickly(box, "cat; echo done").output == "done\n"
    assert "EOFError" in quickly(box, "python3 -c 'input()'").output
    assert quickly(box, "read line").status is Status.NONZERO


def test_there_is_no_terminal_to_wait_on(box: Sandbox) -> None:
    assert quickly(box, "cat < /dev/tty").status is Status.NONZERO
    assert quickly(box, "python3 -c 'import getpass; getpass.getpass()'").status is Status.NONZERO
    environment = dict(line.split("=", 1) for line in run(box, "env").splitlines())
    assert (environment["PAGER"], environment["GIT_PAGER"], environment["GIT_TERMINAL_PROMPT"]) == (
        "cat",
        "cat",
        "0",
    )


def test_input_comes_whole_and_unchanged(box: Sandbox) -> None:
    data = bytes(range(256)) * 4000
    assert box.exec("wc -c; true", timeout=20, stdin=data).output.strip() == str(len(data))
    assert box.exec("cat > copy", timeout=20, stdin=b"a\nEOF\n$(touch x)\n\0").status is Status.OK
    assert box.read("copy") == b"a\nEOF\n$(touch x)\n\0"


# Output


def test_endless_output_is_stopped(box: Sandbox) -> None:
    result = box.exec("yes", timeout=60)
    assert result.status is Status.OUTPUT_CAPPED
    assert len(result.output) < 100_000


def test_long_output_keeps_head_and_tail(box: Sandbox) -> None:
    result = box.exec("echo first; seq 100000; echo last", timeout=30)
    assert (result.status, result.exit_code) == (Status.OUTPUT_CAPPED, 0)
    assert result.output.startswith("first\n")
    assert result.output.endswith("last\n")
    assert "bytes left out" in result.output


def test_output_that_is_no_text_is_replaced(box: Sandbox) -> None:
    assert run(box, r"printf 'a\377b\303'") == "a\ufffdb\ufffd"
    assert len(run(box, "head -c 3000 /dev/urandom")) > 0


def test_a_character_that_comes_in_pieces_is_one(box: Sandbox) -> None:
    source = "import sys, time\nfor byte in 'ü€🐍'.encode():\n"
    source += "    sys.stdout.buffer.write(bytes([byte])); sys.stdout.flush(); time.sleep(0.02)\n"
    assert program(box, source).output == "ü€🐍"


def test_output_and_errors_come_in_order(box: Sandbox) -> None:
    assert run(box, "echo 1; echo 2 >&2; echo 3; echo 4 >&2") == "1\n2\n3\n4\n"


# Commands and contents are data


@pytest.mark.parametrize(
    ("command", "output"),
    [
        ("""printf '%s' 'it'"'"'s "quoted"'""", 'it\'s "quoted"'),
        ("echo \"$(echo 'a b')\" '$HOME' \\$x `echo c`", "a b $HOME $x c\n"),
        ("cat <<'EOF'\n$(false)\nEOF\necho after", "$(false)\nafter\n"),
        ("echo a # comment", "a\n"),
        ("printf '%s' 'ü\t\\n'", "ü\t\\n"),
        ("echo one;\n\necho two\n", "one\ntwo\n"),
    ],
)
def test_a_command_is_run_as_it_is_written(box: Sandbox, command: str, output: str) -> None:
    assert run(box, command) == output


def test_a_syntax_error_in_a_command_is_its_own(box: Sandbox) -> None:
    for command in ("echo '", "}", "if", "echo $("):
        assert quickly(box, command).status is Status.NONZERO
    assert run(box, "echo well") == "well\n"


def test_written_content_is_never_run(box: Sandbox) -> None:
    content = b"first\nEOF\ntouch planted\n$(touch planted)`touch planted`\n'\"\\\0\xff"
    for path in ("notes.txt", "it's $(touch planted).txt", "; touch planted", "-rf"):
        box.write(path, content)
        assert box.read(path) == content
    assert "planted" not in box.list_files()


def test_requests_that_make_no_sense_are_results_without_a_traceback(box: Sandbox) -> None:
    for command in ("a\0b", "x" * 300_000, "\ud800"):
        result = quickly(box, command)
        assert result.status is Status.NONZERO
        assert "Traceback" not in result.output
    assert run(box, "echo well") == "well\n"


@pytest.mark.parametrize("code", [1, 124, 126, 127, 137, 143, 255])
def test_an_exit_code_is_told_as_it_is(box: Sandbox, code: int) -> None:
    result = box.exec(f"exit {code}", timeout=20)
    assert (result.status, result.exit_code) == (Status.NONZERO, code)


def test_a_command_that_kills_itself_is_neither_late_nor_out_of_memory(box: Sandbox) -> None:
    result = box.exec("kill -9 $$", timeout=20)
    assert (result.status, result.exit_code) == (Status.NONZERO, 137)


# Files stay inside


def test_paths_do_not_leave_the_working_directory(box: Sandbox) -> None:
    for path in ("/etc/passwd", "../x", "a/../../x", "", ".", "a\0b", "solution.py/x", "n" * 300):
        with pytest.raises((PermissionError, FileNotFoundError)):
            box.read(path)
        with pytest.raises(PermissionError):
            box.write(path, b"x")
    assert box.list_files() == ["solution.py"]


def test_planted_links_lead_nowhere(box: Sandbox) -> None:
    run(box, "ln -s /etc/passwd secret; ln -s /tmp/new dangling; ln -s / root; ln -s loop loop; mkdir d")
    run(box, "ln -s ../../etc/passwd d/up")
    for path in ("secret", "root/etc/passwd", "loop", "d/up"):
        with pytest.raises(PermissionError):
            box.read(path)
    for path in ("secret", "dangling", "root/tmp/new", "loop", "d/up"):
        with pytest.raises(PermissionError):
            box.write(path, b"x")
    assert run(box, "ls -A /tmp") == ""
    assert box.list_files() == ["solution.py"]


def test_what_is_no_regular_file_is_refused_at_once(box: Sandbox) -> None:
    run(box, "mkfifo pipe; mkdir folder; ln -s /dev/zero zero; head -c 2M /dev/zero > large")
    for path in ("pipe", "folder", "zero", "large"):
        with pytest.raises(PermissionError):
            box.read(path)


def test_listing_survives_a_hostile_tree(box: Sandbox) -> None:
    source = "import os\nfor n in range(1200): open(f'f{n}', 'w').close()\nos.mkdir('closed', 0)\n"
    source += "open(b'\\xff\\n', 'w').close()\nfor n in range(1500):\n    os.mkdir('d'); os.chdir('d')\n"
    assert program(box, source).status is Status.OK
    files = box.list_files()
    assert len(files) == 1000
    assert files == sorted(files)


def test_the_system_cannot_be_changed(box: Sandbox) -> None:
    for path in ("/x", "/usr/x", "/etc/passwd", "/usr/bin/python3", "/var/x", "/proc/sys/kernel/hostname"):
        assert box.exec(f"echo x >> {path}", timeout=20).status is Status.NONZERO


@pytest.mark.parametrize("root", VERIFIER)
def test_the_folders_for_who_grades_are_there_and_no_way_out(box: Sandbox, root: str) -> None:
    assert run(box, f"ls -A {root}; stat -c %a {root}") == "700\n"
    box.write(f"{root}/a/b.sh", b"#!/bin/sh\necho ran $PWD\n")
    assert run(box, f"cd /; {root}/a/b.sh") == "ran /\n"
    assert run(box, f"echo 1 > {root}/c; cp {root}/c .; cat c") == "1\n"
    assert box.read(f"{root}/c") == b"1\n"
    run(
        box,
        f"ln -s {root}/c {root}/near; ln -s /etc/passwd {root}/far; ln -s /etc {root}/etc; mkfifo {root}/pipe",
    )
    for name in ("near", "far", "etc/passwd", "pipe", "a", "../etc/passwd", "a/../../etc/passwd", "", "."):
        with pytest.raises((PermissionError, FileNotFoundError)):
            box.read(f"{root}/{name}")
        with pytest.raises(PermissionError):
            box.write(f"{root}/{name}", b"x")
    assert box.list_files() == ["c", "solution.py"]
    assert box.exec(f"rmdir {root}; mv {root} /tmp/x", timeout=20).status is Status.NONZERO


def test_the_folders_for_who_grades_are_of_limited_size_and_not_forked(box: Sandbox) -> None:
    assert box.exec("head -c 100M /dev/zero > /tests/big", timeout=60).status is Status.NONZERO
    assert quickly(box, "echo x > room && rm /tests/big && echo x > /tests/room").status is Status.OK
    other = box.fork()
    assert run(other, "ls -A /tests /logs /solution").split() == ["/logs:", "/solution:", "/tests:"]
    other.close()


def test_common_names_lead_to_the_working_directory(box: Sandbox) -> None:
    for name in WORKSPACE_NAMES:
        assert run(box, f"cat {name}/solution.py").startswith("def square")
        assert box.read(f"{name}/solution.py").startswith(b"def square")
        box.write(f"{name}/made", b"x")
        with pytest.raises(PermissionError):
            box.read(f"{name}/../etc/passwd")
    assert box.list_files() == ["made", "solution.py"]


def test_a_change_right_after_the_start_is_told(provider: SandboxProvider) -> None:
    for _ in range(5):
        box = provider.start({"a": "1", "b": "1"})
        box.write("a", b"2")
        box.write("b", b"1")
        changed = box.changes().changed
        box.close()
        assert set(changed) <= {"a", "b"}
        assert "a" in changed


def test_a_new_file_that_names_its_interpreter_can_be_run(box: Sandbox) -> None:
    box.write("tool", b"#!/bin/sh\necho ran\n")
    box.write("data", b"echo ran\n")
    assert run(box, "./tool") == "ran\n"
    assert box.exec("./data", timeout=20).exit_code == 126


def test_what_changed_since_the_start_is_told(provider: SandboxProvider) -> None:
    box = provider.start({"same": "1", "edited": "1", "removed": "1", "d/touched": "1", "d/swapped": "1"})
    assert box.changes() == Changes([], [], 0)
    back = (
        "touch -d 2020-02-02 edited; mv d/swapped d/x; cp d/x d/swapped; rm d/x; ln -s same link; mkfifo pipe"
    )
    run(box, f"sed -i s/1/2/ edited; rm removed; touch d/touched; mkdir e; echo 1 > e/new; {back}")
    expected = Changes(["d/swapped", "d/touched", "e/new", "edited"], ["removed"], 0)
    assert box.changes() == expected
    other = box.fork()
    assert other.changes() == expected
    run(other, "echo 2 > same; echo 1 > removed; rm e/new")
    assert other.changes() == Changes(["d/swapped", "d/touched", "edited", "removed", "same"], ["e/new"], 0)
    other.close()
    assert box.changes() == expected
    run(box, "for n in $(seq 2100); do echo > e/$n; done", timeout=60)
    assert box.changes().left_out == 2104 - 2000
    box.close()


# Secrets and neighbours


def test_no_secret_of_the_server_is_in_the_environment(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "secret-4711")
    with contextlib.closing(open_or_skip(kind, pool=0)) as fresh:
        sandbox = fresh.start({})
        everything = run(sandbox, "env; cat /proc/*/environ /proc/*/cmdline 2>/dev/null")
        sandbox.close()
    assert "secret-4711" not in everything


def test_the_runner_cannot_be_looked_into(box: Sandbox, not_in_gvisor: Callable[[str], None]) -> None:
    not_in_gvisor("one user may look at another's process, whatever its dumpable flag")
    assert "well" not in run(box, "cat /proc/1/environ && echo well")
    assert run(box, "ls /proc/1/fd 2>/dev/null") == ""
    assert quickly(box, "head -c 1 /proc/1/mem").status is Status.NONZERO


def test_the_runner_survives_every_signal(box: Sandbox, not_in_gvisor: Callable[[str], None]) -> None:
    not_in_gvisor("process 1 can be killed by its own user; the sandbox is then dead, and not scored")
    run(box, "for n in $(seq 1 64); do kill -$n 1; done 2>/dev/null; kill -9 -1")
    assert run(box, "echo well") == "well\n"


def test_the_limits_of_the_runner_cannot_be_changed(box: Sandbox) -> None:
    attack = "import resource as r\nfor n in range(16):\n    try: r.prlimit(1, n, (0, 0))\n"
    attack += "    except (OSError, ValueError): pass\n"
    assert program(box, attack).status is Status.OK
    assert run(box, "echo well") == "well\n"
    box.write("a", b"x")


def test_nothing_of_the_server_is_visible(box: Sandbox) -> None:
    project = Path(__file__).resolve().parents[2]
    assert (
        run(box, f"ls -d {project} {Path.home()}/.ssh /var/run/docker.sock /run/docker.sock 2>/dev/null")
        == ""
    )
    assert str(project) not in run(box, "cat /proc/1/cmdline /proc/self/mountinfo 2>/dev/null")


def test_sandboxes_do_not_see_each_other(provider: SandboxProvider, box: Sandbox) -> None:
    assert (
        quickly(box, "echo x > /tmp/planted; echo x > /dev/shm/planted; echo x > planted").status is Status.OK
    )
    other = provider.start({})
    assert "planted" not in run(other, "ls -A /tmp /dev/shm .")
    pids = [int(name) for name in run(other, "ls /proc").split() if name.isdigit()]
    other.close()
    assert 1 in pids
    assert len(pids) < 6


def test_there_is_no_network(box: Sandbox) -> None:
    source = (
        "import socket\ntry: socket.create_connection(('192.0.2.1', 80), 2)\nexcept OSError as e: print(e)\n"
    )
    output = program(box, source).output
    assert "unreachable" in output or "No route" in output
    names = [line.split(":")[0].strip() for line in run(box, "cat /proc/net/dev").splitlines()[2:]]
    assert names in (["lo"], [])


def test_there_is_no_privilege_and_none_to_gain(box: Sandbox) -> None:
    fields = dict(
        line.split(":\t", 1) for line in run(box, "cat /proc/self/status").splitlines() if ":\t" in line
    )
    assert {fields[name].lstrip("0") for name in ("CapInh", "CapPrm", "CapEff")} == {""}
    assert "0" not in run(box, "id -u; id -g").split()
    for command in ("mount -t tmpfs x /tmp", "chown 0 solution.py", "unshare -m true", "hostname x"):
        assert quickly(box, command).status is Status.NONZERO
    assert (
        quickly(box, "find / -xdev -perm -4000 -type f 2>/dev/null -exec {} \\; ; id -u").output.strip()
        != "0"
    )


def test_the_clock_is_right_and_cannot_be_set(box: Sandbox) -> None:
    run(box, "date -s 2001-01-01; python3 -c 'import time; time.clock_settime(0, 0)'")
    assert abs(int(run(box, "date +%s")) - time.time()) < 60
    assert time.time() > 1.7e9


def test_a_planted_start_up_file_runs_in_no_function_call(box: Sandbox) -> None:
    plant = "import pathlib; pathlib.Path('/tmp/ran').touch()\n"
    version = "python" + run(box, "python3 -c 'import sys; print(\"%d.%d\" % sys.version_info[:2])'").strip()
    site = f".local/lib/{version}/site-packages"
    for path in ("sitecustomize.py", "usercustomize.py", f"{site}/usercustomize.py", "json.py", "os.py"):
        box.write(path, plant.encode())
    box.write(f"{site}/evil.pth", plant.encode())
    assert (
        box.exec(f"echo '{plant.strip()}' > /usr/lib/{version}/sitecustomize.py", timeout=20).status
        is Status.NONZERO
    )
    assert box.call_function("solution.py", "square", [[3]], timeout=20)[0].value == 9
    assert run(box, "ls -A /tmp") == ""


def test_a_variable_is_for_one_command_or_for_all(provider: SandboxProvider) -> None:
    box = provider.start({}, SandboxSpec(env={"ALL": "it's $x", "PAGER": "more"}))
    assert (
        box.exec("echo $ALL $ONE $PAGER", timeout=20, env={"ONE": "ü 1", "ALL": "other"}).output
        == "other ü 1 more\n"
    )
    assert run(box, "echo $ALL $ONE") == "it's $x\n"
    other = box.fork()
    assert run(other, "echo $ALL") == "it's $x\n"
    assert box.exec("true", timeout=20, env={"a\0b": "1"}).status is Status.NONZERO
    box.close()
    other.close()


def test_pytest_is_there_without_a_network(box: Sandbox) -> None:
    box.write("/tests/test_it.py", b"from solution import square\ndef test(): assert square(3) == 9\n")
    result = box.exec("python -m pytest -q /tests/test_it.py && cd / && pytest --version", timeout=60)
    assert (result.status, "1 passed" in result.output) == (Status.OK, True), result.output
    box.write("solution.py", b"def square(x): return 1\n")
    assert "1 failed" in run(box, "python -m pytest -q /tests/test_it.py", timeout=60)


# Limits


def test_a_task_may_have_other_limits(provider: SandboxProvider) -> None:
    small = provider.start({"a": "b"}, SandboxSpec(memory=MEMORY // 2, disk=DISK // 4, cpus=0.5))
    assert small.read("a") == b"b"
    assert program(small, f"x = bytearray({MEMORY * 3 // 4})\n").status is Status.OOM
    fill = "head -c {0} /dev/zero > big; wc -c < big; head -c {0} /dev/zero > /tmp/big; wc -c < /tmp/big"
    written = run(small, fill.format(DISK // 2) + " 2>&1", timeout=60).split()
    assert max(int(word) for word in written if word.isdigit()) <= DISK // 4
    other = small.fork()
    assert program(other, f"x = bytearray({MEMORY * 3 // 4})\n").status is Status.OOM
    other.close()
    small.close()
    large = provider.start({}, SandboxSpec(memory=MEMORY * 2, disk=DISK * 2))
    assert program(large, f"x = bytearray({MEMORY * 5 // 4})\n").status is Status.OK
    assert quickly(large, f"head -c {DISK * 3 // 2} /dev/zero > big").status is Status.OK
    large.close()


def test_one_process_that_wants_too_much_memory_is_told(box: Sandbox) -> None:
    assert program(box, f"x = bytearray({2 * MEMORY})\n").status is Status.OOM
    assert run(box, "echo well") == "well\n"


def test_memory_of_the_whole_tree_is_limited(box: Sandbox) -> None:
    source = "import os, time\nos.fork(); os.fork()\nx = bytearray(b'x') * (400 << 20)\ntime.sleep(20)\n"
    assert program(box, source, timeout=60).status is Status.OOM
    assert run(box, "echo well") == "well\n"


def test_a_fork_bomb_is_contained(box: Sandbox) -> None:
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass\n"
    assert program(box, bomb, timeout=1.0).status in (Status.TIMEOUT, Status.NONZERO)
    assert quickly(box, "echo well").output == "well\n"
    assert commands_alive(box) == []


def test_the_disk_can_be_filled_without_harm(box: Sandbox) -> None:
    fill = f"head -c {DISK} /dev/zero > big; head -c {DISK} /dev/zero > /tmp/big; echo x > more"
    assert box.exec(fill, timeout=60).status is Status.NONZERO
    with pytest.raises(PermissionError, match="No space"):
        box.write("other", b"x" * MiB)
    assert run(box, "rm big; echo well") == "well\n"
    box.write("other", b"x")


def test_names_can_be_used_up_without_harm(box: Sandbox, not_in_gvisor: Callable[[str], None]) -> None:
    not_in_gvisor("its tmpfs has no limit of inodes")
    source = "n = 0\ntry:\n    while n < 20_000: open(f'f{n}', 'w').close(); n += 1\nexcept OSError: print('full')\n"
    assert program(box, source, timeout=60).output == "full\n"
    assert run(box, "find . -name 'f*' -delete; echo well") == "well\n"


def test_deep_recursion_is_an_error_of_the_program(box: Sandbox) -> None:
    deep = "import sys\nsys.setrecursionlimit(10**9)\nclass A:\n    def __getattr__(s, n): return getattr(s, n + 'x')\n"
    assert program(box, deep + "A().x\n", timeout=30).status in (Status.NONZERO, Status.OOM)
    box.write("m.py", deep.encode() + b"def f(x): return A().x\ndef g(x): return g(x)\n")
    assert box.call_function("m.py", "f", [[1]], timeout=30)[0].error is not None
    assert run(box, "echo well") == "well\n"


def test_open_files_are_limited(box: Sandbox) -> None:
    source = "held = []\ntry:\n    while len(held) < 5000: held.append(open('/dev/null'))\n"
    source += "except OSError: print('full')\n"
    assert program(box, source).output == "full\n"


# Function calls


def call(box: Sandbox, source: str, *arguments: Any, timeout: float = 20.0) -> list[tuple[Any, str | None]]:
    box.write("m.py", source.encode())
    results = box.call_function("m.py", "f", [[argument] for argument in arguments], timeout=timeout)
    return [(result.value, result.error) for result in results]


def test_values_come_back_with_exact_types(box: Sandbox) -> None:
    values = [None, True, 1, 1.0, "ü\ud800\n", [[1, "a"], {"k": [False]}], 10**400]
    results = [value for value, _ in call(box, "def f(x):\n    return x\n", *values)]
    assert results == values
    assert [type(value) for value in results] == [type(value) for value in values]


def test_calls_that_hang_or_die_are_told(box: Sandbox) -> None:
    assert call(box, "def f(x):\n    while x: pass\n    return x\n", 0, 1, timeout=5.0) == [
        (0, None),
        (None, "Timeout"),
    ]
    assert call(box, "import os\ndef f(x): os.kill(os.getpid(), 9)\n", 1) == [(None, "Killed: SIGKILL")]
    ((_, error),) = call(box, "import os\ndef f(x): os._exit(0)\n", 1)
    assert error is not None
    assert error.startswith("Exited")


def test_a_call_leaves_nothing_running_and_reads_no_input(box: Sandbox) -> None:
    source = "import os, time\ndef f(x):\n    if os.fork() == 0:\n        os.setsid()\n"
    source += "        time.sleep(60)\n    return x\n"
    assert call(box, source, 1) == [(1, None)]
    assert commands_alive(box) == []
    assert call(box, "def f(x): return input()\n", 1)[0][1] == "EOFError: EOF when reading a line"


def test_a_call_cannot_answer_in_the_place_of_the_runner(box: Sandbox) -> None:
    source = "import os\ndef f(x):\n    for fd in range(300):\n        try: os.write(fd, b'\\0' * 64)\n"
    source += "        except OSError: pass\n    return x\n"
    assert call(box, source, 1)[0][0] is None
    assert run(box, "echo well") == "well\n"


# A second sandbox in the same state


def test_a_fork_has_the_same_files_and_goes_its_own_way(box: Sandbox) -> None:
    run(
        box,
        "mkdir -p a/b closed; echo 1 > a/b/n; ln -s a/b link; echo s > closed/s; chmod 750 a; chmod 0 closed",
    )
    run(box, "printf '#!/bin/sh\\necho ran' > tool; chmod 755 tool; touch -d 2020-02-02 tool; chmod 0 a/b/n")
    other = box.fork()
    look = "chmod 700 closed; stat -c '%n %a %s %F' a a/b a/b/n link tool closed/s; stat -c %Y tool; ./tool"
    assert run(other, look) == run(box, look)
    assert other.read("solution.py") == box.read("solution.py")
    other.write("solution.py", b"changed")
    run(box, "rm -r a")
    assert box.read("solution.py") != b"changed"
    assert "a/b/n" in other.list_files()
    box.close()
    assert run(other, "echo well") == "well\n"
    other.close()


def test_a_fork_copies_what_is_large_or_many(box: Sandbox) -> None:
    run(box, "head -c 20M /dev/urandom > big; for n in $(seq 3000); do echo $n > f$n; done", timeout=60)
    other = box.fork()
    digest = "cat big f* | sha256sum"
    assert run(other, digest, timeout=60) == run(box, digest, timeout=60)
    other.close()


def test_a_closed_sandbox_has_no_fork(provider: SandboxProvider) -> None:
    sandbox = provider.start({})
    sandbox.close()
    with pytest.raises(SandboxDead):
        sandbox.fork()


# Life and death


def all_pids(parent: int) -> list[int]:
    try:
        text = Path(f"/proc/{parent}/task/{parent}/children").read_text()
    except OSError:
        return []
    return [pid for child in text.split() for pid in (int(child), *all_pids(int(child)))]


def kill_from_outside(provider: Any) -> None:
    """What an operator or the kernel may do at any time: kill every sandbox."""
    if provider.isolation.startswith("docker"):
        for container in containers(provider.run_id):
            subprocess.run(["docker", "kill", container], capture_output=True, timeout=60, check=False)
    else:
        for pid in all_pids(provider.zygote_pid):
            with contextlib.suppress(ProcessLookupError):  # it died with its runner
                os.kill(pid, signal.SIGKILL)


def containers(run_id: str) -> list[str]:
    command = ["docker", "ps", "--all", "--quiet", "--filter", f"label=hintloop.sandbox.run={run_id}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.split()


def exists(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_killed_sandbox_is_dead_and_its_error_is_no_output(kind: str) -> None:
    provider: Any = open_or_skip(kind, pool=1)
    with contextlib.closing(provider) as fresh:
        sandbox = fresh.start({})
        # one that is killed while it starts is another failure
        assert kind == "local" or soon(lambda: fresh.num_ready() == 1, 60)
        killer = threading.Timer(0.5, kill_from_outside, [fresh])
        killer.start()
        with pytest.raises(SandboxDead):
            sandbox.exec("echo out; sleep 60", timeout=30)
        killer.join()
        for action in (
            sandbox.list_files,
            lambda: sandbox.exec("true", timeout=5),
            lambda: sandbox.read("x"),
        ):
            with pytest.raises(SandboxDead):
                action()
        again = fresh.start({"a": "b"})
        assert again.read("a") == b"b"
        again.close()


def test_closing_during_a_command_ends_it_and_closing_twice_is_fine(provider: SandboxProvider) -> None:
    sandbox = provider.start({})
    closers = [threading.Timer(0.5, sandbox.close) for _ in range(3)]
    for closer in closers:
        closer.start()
    with pytest.raises(SandboxDead):
        sandbox.exec("setsid sleep 60 & sleep 60", timeout=30)
    for closer in closers:
        closer.join()
    sandbox.close()
    with pytest.raises(SandboxDead):
        sandbox.list_files()


def test_closing_the_provider_during_starts_leaves_nothing(kind: str) -> None:
    fresh: Any = open_or_skip(kind, pool=1)
    outcomes: list[str] = []

    def start() -> None:
        try:
            fresh.start({"a": "b"})
            outcomes.append("started")
        except SandboxDead:
            outcomes.append("dead")

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    family = [] if kind != "local" else [fresh.zygote_pid, *all_pids(fresh.zygote_pid)]
    fresh.close()
    for thread in threads:
        thread.join(60)
    assert len(outcomes) == 4
    assert not any(map(exists, family))
    assert kind == "local" or containers(fresh.run_id) == []
    with pytest.raises(SandboxDead):
        fresh.start({})


def test_sixteen_start_at_once(provider: SandboxProvider) -> None:
    def one(number: int) -> tuple[Any, str]:
        sandbox = provider.start({"solution.py": "def square(x):\n    return x * x\n"})
        value = sandbox.call_function("solution.py", "square", [[number]], timeout=60)[0].value
        output = run(sandbox, f"echo {number}", timeout=60)
        sandbox.close()
        return value, output

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(one, range(16))) == [(n * n, f"{n}\n") for n in range(16)]


def test_nothing_outlives_a_killed_server(kind: str) -> None:
    open_or_skip(kind, pool=0).close()
    source = (
        "import sys, threading, time\n"
        "from hintloop.envs.sandbox.providers import open_provider\n"
        "provider = open_provider(sys.argv[1], pool=1)\n"
        "box = provider.start({})\n"
        "run = lambda: box.exec('setsid sleep 60 & sleep 60', timeout=60)\n"
        "threading.Thread(target=run, daemon=True).start()\n"
        "time.sleep(0.5)\n"
        "print(getattr(provider, 'run_id', None) or provider.zygote_pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", source, kind], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        name = server.stdout.readline().strip()
        assert kind != "local" or soon(lambda: len(all_pids(int(name))) >= 3)  # now the command runs
        family = [int(name), *all_pids(int(name))] if kind == "local" else []
        assert family or containers(name)
        server.kill()
    assert soon(lambda: not any(map(exists, family)))
    assert kind == "local" or soon(lambda: containers(name) == [], 60)


def test_files_that_do_not_fit_are_refused(provider: SandboxProvider) -> None:
    for files in ({"../x": ""}, {"a": "", "a/b": ""}, {"big": "x" * (17 << 20)}):
        with pytest.raises(ValueError, match=r"files|large"):
            provider.start(files)
