"""Each part of the loop fails, for a while or for ever: the run goes on, or ends with one clear message.

Nothing here may hang: every play has a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs
from websockets.asyncio.server import ServerConnection, serve

from hintloop.agent.conversation import RenderError
from hintloop.agent.engine import EngineError, Sampling
from hintloop.agent.episode import Environment, Player
from hintloop.envs.client import EnvironmentLost, Refused, step_result
from hintloop.envs.errors import tool_error
from hintloop.envs.models import CodingState, ToolCall, ToolResult
from hintloop.envs.pool import EnvPool
from hintloop.envs.tools import failure
from hintloop.replay import patience
from hintloop.replay.episode import Episode
from hintloop.replay.patience import StorageFailed
from hintloop.rollout.asking import AskRule
from hintloop.rollout.config import TeacherSpec
from hintloop.rollout.manager import GroupRule, Manager, TooManyLost, group_id
from hintloop.rollout.pacing import Pacer
from hintloop.rollout.status import Board
from hintloop.rollout.teachers import Teacher
from hintloop.rollout.teaching import Asking
from hintloop.rollout.watchdog import Watchdog

DEADLINE_S = 120.0
FULL = OSError(errno.ENOSPC, "No space left on device")
Reply = Callable[[httpx.Request], Awaitable[httpx.Response]]


@dataclass
class Loop:
    """A manager and what surrounds it; ``play`` ends when enough groups are in the journal."""

    player: Player
    open_environment: Any
    folder: Path
    append: Callable[[Sequence[Episode]], object] | None = None
    asking: Asking | None = None
    rule: dict[str, Any] = field(default_factory=dict)
    wanted: int = 3
    board: Board = field(default_factory=Board)
    watchdog: Watchdog = field(default_factory=lambda: Watchdog(0.1))
    journal: list[list[Episode]] = field(default_factory=list)
    seen: list[Any] = field(default_factory=list)

    async def play(self) -> None:
        settings: dict[str, Any] = {
            "group_size": 2,
            "episodes_in_flight": 4,
            "tries_per_episode": 2,
            "max_groups_lost": 3,
            "idle_timeout_s": 20.0,
            "turn_s": 10.0,
            "storage_timeout_s": 20.0,
            **self.rule,
        }
        pacer = Pacer(groups_per_step=self.wanted, max_staleness=0, journalled=0, version=0)
        manager = Manager(
            player=self.player,
            sampling=Sampling(1.0, 400),
            open_environment=self.open_environment,
            task_of=lambda index, attempt=0: f"bugfix/t{index}.{attempt}",
            append=self.append or self.journal.append,  # type: ignore[arg-type]
            pacer=pacer,
            rule=GroupRule(**settings),
            board=self.board,
            metrics=self.folder / "metrics" / "rollout.jsonl",
            asking=self.asking,
            observe=self.seen.append,
            watchdog=self.watchdog,
        )
        async with asyncio.timeout(DEADLINE_S):
            playing = asyncio.create_task(manager.run(set()))
            while pacer.journalled < self.wanted and not playing.done():  # noqa: ASYNC110 - nothing announces it
                await asyncio.sleep(0.005)
            if not playing.done():
                playing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await playing


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "FIRST_PAUSE_S", 0.01)


@pytest.fixture
def loop(make_player: Any, world: Any, tmp_path: Path) -> Callable[..., Loop]:
    def make(*, script: Any = None, tiny: Any = None, **changes: Any) -> Loop:
        player = make_player() if script is None else make_player(script)
        return Loop(player, (tiny or world()).session, tmp_path, **changes)

    return make


# Parts that an episode needs


class Odd:
    """An environment whose first steps or resets end as given, for one episode in two."""

    def __init__(
        self, env: Environment, reset: Exception | None, step: Exception | ToolResult | None
    ) -> None:
        self.env, self.at_reset, self.at_step = env, reset, step
        self.strikes = False

    async def reset(self, **kwargs: Any) -> Any:
        self.strikes = kwargs["episode_id"].endswith("-1")
        if self.strikes and self.at_reset is not None:
            raise self.at_reset
        return await self.env.reset(**kwargs)

    async def step(self, action: Any) -> Any:
        if self.strikes and isinstance(self.at_step, Exception):
            raise self.at_step
        done = await self.env.step(action)
        if self.strikes and isinstance(self.at_step, ToolResult):
            return step_result(self.at_step)
        return done


@pytest.mark.parametrize(
    ("part", "reset", "step"),
    [
        ("environment", EnvironmentLost("refused"), None),
        ("environment", None, EnvironmentLost("the socket was closed")),
        ("sandbox", None, failure(tool_error("connection_error", "the sandbox is gone"))),
        ("task", Refused("no task of that name"), None),
        ("task", None, ToolResult(output="submitted", done=True)),
        ("model", None, RenderError("the template")),
        ("engine", None, EngineError("a server that is none")),
        ("bug", None, KeyError("x")),
        ("bug", ZeroDivisionError(), None),
    ],
    ids=lambda each: type(each).__name__ if each is not None and not isinstance(each, str) else str(each),
)
def test_one_failing_episode_ends_alone_and_is_counted_by_its_class(
    loop: Any, world: Any, part: str, reset: Any, step: Any
) -> None:
    tiny = world()

    @contextlib.asynccontextmanager
    async def session() -> AsyncIterator[Odd]:
        async with tiny.session() as env:
            yield Odd(env, reset, step)

    made = loop()
    made.open_environment = session
    asyncio.run(made.play())
    ids = {episode.episode_id for group in made.journal for episode in group}
    assert len(ids) == 6
    assert {each.removesuffix(".1") for each in ids if each.endswith(".1")} == {
        f"{group[0].group_id}-1" for group in made.journal
    }
    assert set(made.board.failures) == {part}
    assert made.board.failures[part] >= 3
    assert sum(made.board.lost.values()) == made.board.failures[part]


@pytest.mark.parametrize("place", ["open", "engine"])
def test_a_part_that_never_answers_loses_the_episode_at_its_deadline_and_is_named_before(
    loop: Any, make_player: Any, world: Any, place: str
) -> None:
    never = asyncio.Event

    made = loop(rule={"turn_s": 3.0}, wanted=1)
    if place == "engine":
        engine = made.player.engine
        generate = engine.generate

        async def hang(prompt: Any, sampling: Any, *, session: str) -> Any:
            if session.endswith("-0"):
                await never().wait()
            return await generate(prompt, sampling, session=session)

        engine.generate = hang
    else:
        calls = iter(range(10**6))
        tiny = world()

        @contextlib.asynccontextmanager
        async def session() -> AsyncIterator[Any]:
            if next(calls) == 0:
                try:
                    async with asyncio.timeout(2.0):
                        await never().wait()
                except TimeoutError:
                    raise EnvironmentLost("no session within 2 s: full") from None
            async with tiny.session() as env:
                yield env

        made.open_environment = session

    async def run() -> None:
        looking = asyncio.create_task(made.watchdog.run())
        await made.play()
        looking.cancel()

    with capture_logs() as logs:
        asyncio.run(run())
    assert dict(made.board.failures) == {"engine" if place == "engine" else "environment": 1}
    named = [log["waits_for"] for log in logs if log["event"] == "stands_still" and log["who"] == "episode"]
    assert {"engine": "engine", "open": "a free environment server"}[place] in named


def test_a_step_that_is_never_answered_loses_the_episode_and_its_session(loop: Any, world: Any) -> None:
    tiny, steps = world(), iter(range(10**6))
    made = loop(wanted=1)

    async def talk(ws: ServerConnection) -> None:
        """The wire format of an environment server, which answers all but the very first step."""
        async with tiny.session() as env:
            async for text in ws:
                message = json.loads(text)
                kind, data = message["type"], message.get("data", {})
                if kind == "state":
                    state = CodingState().model_dump(mode="json")
                    await ws.send(json.dumps({"type": "state", "data": state}))
                    continue
                if kind == "step" and next(steps) == 0:
                    await ws.wait_closed()
                    return
                done = await (env.reset(**data) if kind == "reset" else env.step(ToolCall(**data)))
                observed = done.observation.model_dump(mode="json")
                data = {"observation": observed, "reward": done.reward, "done": done.done}
                await ws.send(json.dumps({"type": "observation", "data": data}))

    async def run() -> None:
        looking = asyncio.create_task(made.watchdog.run())
        async with asyncio.timeout(DEADLINE_S), serve(talk, "127.0.0.1", 0) as server:
            port = next(iter(server.sockets)).getsockname()[1]
            pool = EnvPool(f"ws://127.0.0.1:{port}", size=4, message_timeout_s=3.0)
            made.open_environment = pool.session
            await made.play()
            await pool.close()
        looking.cancel()

    with capture_logs() as logs:
        asyncio.run(run())
    assert dict(made.board.failures) == {"environment": 1}
    assert [len(group) for group in made.journal] == [2]
    (lost,) = [log["detail"] for log in logs if log["event"] == "episode_lost"]
    assert "no answer in time" in lost
    named = [log["waits_for"] for log in logs if log["event"] == "stands_still" and log["who"] == "episode"]
    assert "environment server" in named
    assert tiny.open == 0


def test_a_part_that_is_broken_for_good_ends_the_run_with_the_reason(loop: Any) -> None:
    def broken(session: str, turn: int) -> str:
        raise EngineError("the engine is gone")

    with pytest.raises(TooManyLost, match=r"3 groups in a row were lost; .*: engine \d+"):
        asyncio.run(loop(script=broken).play())


# Storage


def fails(
    journal: list[list[Episode]], times: int, error: Exception
) -> Callable[[Sequence[Episode]], object]:
    left = iter(range(times))

    def append(episodes: Sequence[Episode]) -> object:
        if next(left, None) is not None:
            raise error
        return journal.append(list(episodes))

    return append


@pytest.mark.parametrize("error", [FULL, OSError("the store does not answer"), TimeoutError("late")])
def test_a_journal_that_fails_for_a_while_loses_and_repeats_nothing(loop: Any, error: Exception) -> None:
    made = loop()
    made.append = fails(made.journal, 8, error)
    asyncio.run(made.play())
    ids = [episode.episode_id for group in made.journal for episode in group]
    assert len(ids) == len(set(ids)) == 6
    assert dict(made.board.failures) == {"storage": 8}
    assert not made.board.lost


def test_a_full_disk_ends_the_run_with_one_message(loop: Any) -> None:
    made = loop(rule={"storage_timeout_s": 2.0})
    made.append = fails(made.journal, 10**6, FULL)
    with pytest.raises(StorageFailed, match=r"journal failed for 2 s: No space left on device"):
        asyncio.run(made.play())
    assert made.journal == []


def test_a_journal_that_never_answers_is_named_and_ends_the_run(loop: Any) -> None:
    for_ever = threading.Event()
    made = loop(rule={"storage_timeout_s": 1.0}, append=lambda episodes: for_ever.wait())

    async def run() -> None:
        looking = asyncio.create_task(made.watchdog.run())
        try:
            await made.play()
        finally:
            looking.cancel()

    with capture_logs() as logs, pytest.raises(StorageFailed, match="it does not answer"):
        asyncio.run(run())
    for_ever.set()
    assert "the journal's storage" in [log.get("waits_for") for log in logs]


def test_metrics_that_cannot_be_written_cost_nothing_but_themselves(loop: Any, tmp_path: Path) -> None:
    (tmp_path / "metrics").write_text("a file where the folder should be")
    made = loop()
    asyncio.run(made.play())
    assert len(made.journal) == 3
    assert dict(made.board.failures) == {"storage": 3}


# Teachers


async def garbage(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, text="<html>no JSON at all")


async def odd(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, json={"choices": [{"message": {"tool_calls": [{"function": None}]}}]})


async def too_many(request: httpx.Request) -> httpx.Response:
    return httpx.Response(429, headers={"Retry-After": "3600"})


async def refusing(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("connection refused")


async def never(request: httpx.Request) -> httpx.Response:
    await asyncio.Event().wait()
    raise AssertionError


def bug(request: httpx.Request) -> Any:
    raise ZeroDivisionError


@pytest.mark.parametrize("reply", [garbage, odd, too_many, refusing, never, bug])
def test_no_teacher_however_bad_keeps_an_episode_from_the_journal(loop: Any, reply: Reply) -> None:
    async def run() -> Loop:
        async with httpx.AsyncClient(transport=httpx.MockTransport(reply)) as client:
            spec = TeacherSpec(name="one", base_url="http://one/v1", model="m")
            teacher = Teacher(spec, client, timeout_s=0.5, attempts=3, in_flight=4)
            made: Loop = loop(asking=Asking([teacher], AskRule(1, 1.0, 2, 0.3)))
            await made.play()
            return made

    made = asyncio.run(run())
    episodes = [episode for group in made.journal for episode in group]
    assert len(episodes) == 6
    assert not any(episode.pairs for episode in episodes)
    assert not made.board.lost
    if reply is bug:
        assert made.board.failures["teacher"] >= 3


@pytest.mark.parametrize("where", ["on_turn", "pairs", "cancel"])
def test_a_bug_in_what_asks_the_teachers_costs_pairs_only(
    loop: Any, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    from hintloop.rollout.pairs import PairMaker

    def broken(*args: Any) -> Any:
        raise ZeroDivisionError

    async def run() -> Loop:
        async with httpx.AsyncClient(transport=httpx.MockTransport(garbage)) as client:
            spec = TeacherSpec(name="one", base_url="http://one/v1", model="m")
            teacher = Teacher(spec, client, timeout_s=0.5, attempts=1, in_flight=4)
            made: Loop = loop(asking=Asking([teacher], AskRule(1, 0.0, 2, 0.3)))
            monkeypatch.setattr(PairMaker, where, broken)
            await made.play()
            return made

    made = asyncio.run(run())
    assert len(made.journal) == 3
    assert not made.board.lost
    assert set(made.board.failures) == {"teacher"}


# Groups whose rewards are all equal


def test_a_group_with_equal_rewards_is_played_anew_with_another_task_and_counted(
    loop: Any, world: Any, tmp_path: Path
) -> None:
    tiny = world(reward=lambda episode_id: float("r2" in episode_id and episode_id.endswith("-0")))
    made = loop(tiny=tiny, rule={"resample_equal": 3})
    asyncio.run(made.play())
    assert sorted(group[0].group_id for group in made.journal) == [group_id(number) for number in range(3)]
    for group in made.journal:
        number = int(group[0].group_id[1:])
        assert {episode.task_id for episode in group} == {f"bugfix/t{number}.2"}
        assert sorted(episode.reward or 0.0 for episode in group) == [0.0, 1.0]
    assert (made.board.groups_resampled, made.board.groups_equal) == (6, 0)
    assert len(made.seen) == 9, "the sampler hears of all"
    lines = [json.loads(line) for line in (tmp_path / "metrics" / "resampled.jsonl").read_text().splitlines()]
    assert sorted((line["group"], line["attempt"]) for line in lines) == [
        (group_id(number), attempt) for number in range(3) for attempt in range(2)
    ]


def test_the_last_attempt_is_taken_as_it_is(loop: Any) -> None:
    made = loop(rule={"resample_equal": 2})
    asyncio.run(made.play())
    assert len(made.journal) == 3
    assert (made.board.groups_resampled, made.board.groups_equal) == (6, 3)


def test_a_group_played_anew_keeps_its_place_and_starts_with_the_newest_weights() -> None:
    async def run() -> None:
        pacer = Pacer(groups_per_step=1, max_staleness=1, journalled=0, version=0)
        assert [await pacer.start(1.0), await pacer.start(1.0)] == [0, 0]
        assert not pacer.open
        pacer.loaded(1)
        assert await pacer.start(1.0) == 1
        assert not pacer.open
        assert pacer.restart(0) == 1
        assert (pacer.playing, pacer.open) == (3, False)
        await pacer.reserve(0)  # the other one of version 0
        pacer.appended()
        for _ in range(2):
            await pacer.reserve(1)
            pacer.appended()
        assert (pacer.playing, pacer.journalled) == (0, 3)

    asyncio.run(run())
