"""Runs the replicas of a learner from start to end: launches them, passes on what they write, leaves none behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from hintloop.learner.executors.protocol import (
    ExecutorError,
    ReplicaHandle,
    ReplicaResult,
    ReplicaSpec,
    ReplicaState,
    ServerlessExecutor,
    Unreachable,
)

COLLECT_S = 120.0
"""How long replicas may take to be over once they have been cancelled."""
_LOGS_S = 15.0
"""How long the end of their logs may take to come; it is short."""


def run_replicas(
    executor: ServerlessExecutor,
    specs: Sequence[ReplicaSpec],
    *,
    timeout_s: float,
    together: bool,
    say: Callable[[str], None],
    stopped: Callable[[], bool] = lambda: False,
) -> tuple[ReplicaResult, ...]:
    """Run until all are over, ``stopped`` says so, or for ``timeout_s``; then what still runs is cancelled.

    ``together``: none can go on without the others, so they are cancelled when one fails. ``say`` gets each line of
    theirs, and is called from several threads. Raises ``ExecutorError`` when they cannot be started or cancelled.
    """
    deadline = time.monotonic() + timeout_s
    readers: list[threading.Thread] = []
    handles = executor.launch_replicas(specs)
    try:
        try:
            for handle in handles:  # as daemons: one that waits for a service must not keep this process
                arguments = (executor, handle, timeout_s, say)
                readers.append(threading.Thread(target=_pass_on, args=arguments, daemon=True))
                readers[-1].start()
            _wait(executor, handles, deadline, together, stopped)
        finally:
            executor.cancel(handles)
        return executor.collect(handles, timeout_s=COLLECT_S)
    finally:  # after Ctrl-C, too, they have last words
        for reader in readers:
            reader.join(_LOGS_S)


def _wait(
    executor: ServerlessExecutor,
    handles: Sequence[ReplicaHandle],
    deadline: float,
    together: bool,
    stopped: Callable[[], bool],
) -> None:
    states = dict.fromkeys(handles, ReplicaState.QUEUED)
    while time.monotonic() < deadline and not stopped():
        for handle, before in states.items():
            if not before.over:
                states[handle] = _state(executor, handle, before)
        failed = any(s.over and s is not ReplicaState.SUCCEEDED for s in states.values())
        if all(state.over for state in states.values()) or (failed and together):
            return
        time.sleep(executor.poll_s)


def _state(executor: ServerlessExecutor, handle: ReplicaHandle, before: ReplicaState) -> ReplicaState:
    try:
        return executor.poll(handle)
    except Unreachable:  # it may be back before the deadline
        return before


def _pass_on(
    executor: ServerlessExecutor, handle: ReplicaHandle, timeout_s: float, say: Callable[[str], None]
) -> None:
    try:
        for line in executor.stream_logs(handle, timeout_s=timeout_s):
            say(f"replica {handle.index} | {line}")
    except ExecutorError as error:
        say(f"replica {handle.index} | (no more of its log: {error})")
