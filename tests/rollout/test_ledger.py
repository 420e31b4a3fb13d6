"""The ledger: whatever happens in whatever order, no more than the cap is ever spent or set aside."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from hintloop.rollout import ledger as module
from hintloop.rollout.ledger import NANO, Ledger, LedgerFailed, OverBudget, Reservation

from .full_disk import full_disk

CAP, EPISODE_CAP = 10.0, 4.0
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
AMOUNTS = st.integers(0, 5 * NANO).map(lambda nano: nano / NANO)


class Spending(RuleBasedStateMachine):
    """Reserve, settle, crash and start again, with what was really paid kept apart from the ledger."""

    reservations = Bundle("reservations")

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir=MEMORY))
        self.generation = 0
        self.paid: dict[str, int] = {}
        self.open: dict[tuple[int, int], Reservation] = {}
        self.ledger = self.start()

    def start(self) -> Ledger:
        path = self.folder / str(self.generation) / "ledger.jsonl"
        return Ledger(path, budget_usd=CAP, episode_budget_usd=EPISODE_CAP)

    @rule(target=reservations, episode=st.sampled_from("abc"), usd=AMOUNTS)
    def reserve(self, episode: str, usd: float) -> tuple[int, Reservation] | None:
        try:
            made = self.ledger.reserve(episode, usd)
        except OverBudget:
            return None
        if made.nano_usd:
            self.open[self.generation, made.number] = made
        return self.generation, made

    @rule(held=consumes(reservations), share=st.floats(0, 1))
    def settle(self, held: tuple[int, Reservation] | None, share: float) -> None:
        if held is None or held[0] != self.generation:
            return  # the process that made the call is dead
        made = held[1]
        cost = int(made.nano_usd * share) / NANO
        self.ledger.settle(made, cost)
        self.open.pop((self.generation, made.number), None)
        self.paid[made.episode] = self.paid.get(made.episode, 0) + int(made.nano_usd * share)

    @rule(torn=st.integers(0, 40))
    def crash(self, torn: int) -> None:
        """The next process finds what the dead one had written, and half of what it was about to write."""
        old = self.ledger.path
        self.generation += 1
        new = self.folder / str(self.generation) / old.name
        new.parent.mkdir()
        shutil.copy(old, new)
        with new.open("ab") as file:
            file.write(b'{"open": 99999, "episode": "a", "nusd": 1}'[:torn])
        self.ledger.close()
        for made in self.open.values():  # nobody knows what became of these calls
            self.paid[made.episode] = self.paid.get(made.episode, 0) + made.nano_usd
        self.open.clear()
        self.ledger = self.start()

    @invariant()
    def caps_hold(self) -> None:
        held = sum(made.nano_usd for made in self.open.values())
        paid = sum(self.paid.values())
        booked = round((self.ledger.spent_usd + self.ledger.reserved_usd) * NANO)
        assert paid + held <= booked <= CAP * NANO
        for episode in "abc":
            own = sum(made.nano_usd for made in self.open.values() if made.episode == episode)
            assert self.paid.get(episode, 0) + own <= EPISODE_CAP * NANO

    def teardown(self) -> None:
        self.ledger.close()
        shutil.rmtree(self.folder)


TestSpending = Spending.TestCase
TestSpending.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "teachers" / "ledger.jsonl"


def test_the_worst_case_is_held_and_the_real_cost_is_booked(path: Path) -> None:
    ledger = Ledger(path, budget_usd=1.0)
    first = ledger.reserve("e", 0.9)
    with pytest.raises(OverBudget, match="more than is left of the budget"):
        ledger.reserve("e", 0.2)
    ledger.settle(first, 0.1)
    assert ledger.snapshot() == {
        "spent_usd": 0.1,
        "reserved_usd": 0.0,
        "left_usd": 0.9,
        "overruns": 0,
        "unwritten": 0,
    }
    ledger.settle(ledger.reserve("e", 0.9), 0.9)
    with pytest.raises(OverBudget):
        ledger.reserve("e", 1e-9)


def test_an_episode_has_a_cap_of_its_own(path: Path) -> None:
    ledger = Ledger(path, episode_budget_usd=0.5)
    ledger.settle(ledger.reserve("one", 0.4), 0.4)
    with pytest.raises(OverBudget, match="episode"):
        ledger.reserve("one", 0.2)
    ledger.reserve("two", 0.5)
    ledger.close()
    with pytest.raises(OverBudget, match="episode"):
        Ledger(path, episode_budget_usd=0.5).reserve("two", 0.1)


def test_what_costs_nothing_leaves_no_line(path: Path) -> None:
    ledger = Ledger(path, budget_usd=0.0)
    before = path.read_bytes()
    ledger.settle(ledger.reserve("e", 0.0), 0.0)
    assert path.read_bytes() == before


def test_a_call_dearer_than_its_worst_case_is_booked_in_full_and_counted(path: Path) -> None:
    ledger = Ledger(path, budget_usd=1.0)
    ledger.settle(ledger.reserve("e", 0.5), 2.0)
    assert (ledger.spent_usd, ledger.overruns) == (2.0, 1)
    with pytest.raises(OverBudget):
        ledger.reserve("e", 0.1)
    ledger.close()
    assert Ledger(path).spent_usd == 2.0


def test_only_one_process_has_a_ledger(path: Path) -> None:
    ledger = Ledger(path)
    with pytest.raises(LedgerFailed, match=r"another process holds the ledger .*ledger\.jsonl"):
        Ledger(path)
    ledger.close()
    Ledger(path).close()


def test_what_was_open_at_a_sigkill_is_spent(path: Path) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path; from hintloop.rollout.ledger import Ledger\n"
        "ledger = Ledger(Path(sys.argv[1]), budget_usd=1.0)\n"
        "ledger.settle(ledger.reserve('e', 0.3), 0.1); ledger.reserve('e', 0.4)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(path)], check=False, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    ledger = Ledger(path, budget_usd=1.0)
    assert ledger.spent_usd == pytest.approx(0.5)
    with pytest.raises(OverBudget):
        ledger.reserve("e", 0.6)
    ledger.reserve("e", 0.5)


def test_only_the_newest_episodes_are_remembered(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NUM_EPISODES", 2)
    ledger = Ledger(path, episode_budget_usd=1.0)
    for name in "abc":
        ledger.settle(ledger.reserve(name, 1.0), 1.0)
    ledger.reserve("a", 1.0)
    with pytest.raises(OverBudget):
        ledger.reserve("c", 1.0)
    assert ledger.spent_usd == 3.0


@pytest.mark.parametrize("room", [0, 5, 30])
def test_a_disk_that_is_full_is_one_clear_error_and_costs_no_line(path: Path, room: int) -> None:
    ledger = Ledger(path, budget_usd=1.0)
    kept = ledger.reserve("e", 0.1)
    size = path.stat().st_size
    with (
        full_disk(size + room),
        pytest.raises(LedgerFailed, match=r"cannot write the ledger .*ledger\.jsonl: "),
    ):
        ledger.reserve("e", 0.1)
    assert path.stat().st_size == size
    assert ledger.reserved_usd == pytest.approx(0.1)
    ledger.settle(kept, 0.05)
    ledger.reserve("e", 0.1)
    ledger.close()
    assert Ledger(path).spent_usd == pytest.approx(0.15)


def test_a_cost_that_cannot_be_written_counts_as_the_worst_case_after_a_restart(path: Path) -> None:
    ledger = Ledger(path)
    held = ledger.reserve("e", 0.5)
    with full_disk(path.stat().st_size):
        ledger.settle(held, 0.1)
        ledger.close()
    assert (ledger.spent_usd, ledger.unwritten) == (0.1, 1)
    assert Ledger(path).spent_usd == 0.5


@contextmanager
def stalled_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Nothing reaches the disk meanwhile; the event says that somebody waits for it."""
    waits, goes_on, fsync = threading.Event(), threading.Event(), os.fsync

    def stall(file: int) -> None:
        waits.set()
        assert goes_on.wait(60)
        fsync(file)

    monkeypatch.setattr("hintloop.rollout.ledger.os.fsync", stall)
    try:
        yield waits
    finally:
        goes_on.set()


def test_a_disk_that_hangs_keeps_nobody_but_who_reserves(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(path, budget_usd=1.0, episode_budget_usd=0.9)
    early = ledger.reserve("e", 0.2)
    with stalled_disk(monkeypatch) as waits:
        first = ledger.hold("e", 0.5)
        assert waits.wait(60)
        second = ledger.hold("f", 0.3)
        assert ledger.reserved_usd == 1.0
        with pytest.raises(OverBudget):
            ledger.hold("f", 0.1)
        ledger.settle(early, 0.1)
        assert (ledger.snapshot()["spent_usd"], ledger.snapshot()["left_usd"]) == (0.1, 0.1)
        assert not first.done()
        assert not second.done()
    ledger.settle(first.result(60), 0.5)
    ledger.settle(second.result(60), 0.3)
    ledger.close()
    assert Ledger(path).spent_usd == pytest.approx(0.9)


def test_a_disk_that_fails_to_keep_what_it_took_is_an_error_and_books_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(path, budget_usd=1.0)
    held = ledger.reserve("e", 0.1)

    def fail(file: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("hintloop.rollout.ledger.os.fsync", fail)
        with pytest.raises(LedgerFailed, match="Input/output error"):
            ledger.reserve("e", 0.2)
    assert ledger.reserved_usd == 0.1
    ledger.settle(held, 0.05)
    ledger.settle(ledger.reserve("e", 0.9), 0.9)
    ledger.close()
    assert Ledger(path).spent_usd == pytest.approx(0.95)


def test_what_is_settled_as_its_reservation_comes_is_written_also_when_the_ledger_closes(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(path)
    with stalled_disk(monkeypatch) as waits:
        held = ledger.hold("e", 0.5)
        held.add_done_callback(lambda done: ledger.settle(done.result(), 0.0))
        assert waits.wait(60)
        closing = threading.Thread(target=ledger.close)
        closing.start()
    closing.join(60)
    with pytest.raises(LedgerFailed, match="is closed"):
        ledger.hold("e", 0.5)
    assert (ledger.unwritten, Ledger(path).spent_usd) == (0, 0)


def test_a_place_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LedgerFailed, match=r"cannot write the ledger .*: (Not a directory|File exists)"):
        Ledger(tmp_path / "file" / "ledger.jsonl")
    with full_disk(4), pytest.raises(LedgerFailed, match=r"cannot write the ledger .*: File too large"):
        Ledger(tmp_path / "ledger.jsonl")


def test_a_damaged_line_is_refused_and_not_guessed_at(path: Path) -> None:
    ledger = Ledger(path)
    ledger.reserve("e", 0.5)
    ledger.close()
    path.write_bytes(path.read_bytes().replace(b'"nusd": 5', b'"nusd": x'))
    with pytest.raises(LedgerFailed, match=r"line 2 of the ledger .* is damaged"):
        Ledger(path)
    os.truncate(path, path.stat().st_size - 1)  # without its end it was never made
    assert Ledger(path).spent_usd == 0


@pytest.mark.parametrize("usd", [-1.0, float("nan"), float("inf")])
def test_what_is_no_amount_is_refused(path: Path, usd: float) -> None:
    with pytest.raises(ValueError, match="no amount of money"):
        Ledger(path).reserve("e", usd)
