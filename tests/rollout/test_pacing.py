"""The staleness bound, whatever order things happen in."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hintloop.rollout.pacing import LearnerSilent, Pacer

events = st.lists(
    st.tuples(
        st.sampled_from(["start", "start", "journal", "journal", "drop", "learn", "learn"]), st.integers(0, 9)
    ),
    max_size=120,
)


@given(st.integers(1, 3), st.integers(0, 2), st.integers(0, 6), events)
@settings(deadline=None)
def test_no_group_is_ever_trained_on_more_versions_late_than_allowed(
    per_step: int, staleness: int, resumed_versions: int, script: list[tuple[str, int]]
) -> None:
    """Groups finish in any order; taken in the order of the journal, none is ever too old."""

    async def run() -> None:
        pacer = Pacer(
            groups_per_step=per_step,
            max_staleness=staleness,
            journalled=resumed_versions * per_step,
            version=resumed_versions,
        )
        playing: list[int] = []
        journal: list[int] = [resumed_versions] * pacer.journalled
        for event, which in script:
            if event == "start" and pacer.open:
                playing.append(await pacer.start(timeout_s=1))
            elif event == "journal" and playing:
                version = playing[which % len(playing)]
                if pacer.may_journal(version):
                    playing.remove(version)
                    await pacer.reserve(version)
                    pacer.appended()
                    journal.append(version)
                assert not playing or any(pacer.may_journal(each) for each in playing)
            elif event == "drop" and playing:
                pacer.drop(playing.pop(which % len(playing)))
            elif event == "learn" and len(journal) >= (pacer.version + 1) * per_step:
                batch = journal[pacer.version * per_step : (pacer.version + 1) * per_step]
                assert all(pacer.version - started <= staleness for started in batch)
                pacer.loaded(pacer.version + 1)
            assert pacer.journalled + pacer.playing <= pacer.limit
            assert (pacer.journalled, pacer.playing) == (len(journal), len(playing))

    asyncio.run(run())


def test_a_group_is_held_back_while_its_place_is_needed_for_an_older_one() -> None:
    async def run() -> list[str]:
        pacer = Pacer(groups_per_step=1, max_staleness=1, journalled=0, version=0)
        order: list[str] = []

        async def finish(name: str, version: int) -> None:
            await pacer.reserve(version)
            pacer.appended()
            order.append(name)

        slow, quick = await pacer.start(1), await pacer.start(1)
        await finish("quick", quick)
        pacer.loaded(1)
        held = asyncio.create_task(finish("held", await pacer.start(1)))
        await asyncio.sleep(0.01)
        assert (pacer.held, order) == (1, ["quick"])
        await finish("slow", slow)
        await asyncio.wait_for(held, 1)
        return order

    assert asyncio.run(run()) == ["quick", "slow", "held"]


def test_a_dropped_group_makes_room_for_another_so_that_the_learner_never_starves() -> None:
    async def run() -> bool:
        pacer = Pacer(groups_per_step=1, max_staleness=0, journalled=0, version=0)
        version = await pacer.start(timeout_s=1)
        assert not pacer.open
        pacer.drop(version)
        return pacer.open

    assert asyncio.run(run())


def test_a_waiting_group_starts_when_new_weights_come() -> None:
    async def run() -> float:
        pacer = Pacer(groups_per_step=1, max_staleness=0, journalled=1, version=0)
        asyncio.get_running_loop().call_later(0.05, pacer.loaded, 1)
        await pacer.start(timeout_s=5)
        assert pacer.playing == 1
        return pacer.waited_s

    assert 0.04 <= asyncio.run(run()) < 2


def test_a_silent_learner_ends_the_wait_with_a_message() -> None:
    async def run() -> None:
        pacer = Pacer(groups_per_step=2, max_staleness=0, journalled=2, version=0)
        await pacer.start(timeout_s=0.05)

    with pytest.raises(LearnerSilent, match=r"after version 0 .* 2 groups"):
        asyncio.run(run())


def test_ones_own_groups_still_being_played_are_not_the_learners_silence() -> None:
    async def run() -> None:
        pacer = Pacer(groups_per_step=2, max_staleness=0, journalled=0, version=0)
        first = await pacer.start(timeout_s=1)
        await pacer.start(timeout_s=1)
        loop = asyncio.get_running_loop()
        finishing = loop.call_later(0.3, lambda: asyncio.ensure_future(pacer.reserve(first)))
        loop.call_later(0.6, pacer.loaded, 1)
        await pacer.start(timeout_s=0.5)
        assert finishing.when() < loop.time()
        assert pacer.playing == 2

    asyncio.run(run())


def test_slow_groups_and_whoever_looks_away_are_not_the_learners_silence() -> None:
    async def run() -> None:
        pacer = Pacer(groups_per_step=1, max_staleness=0, journalled=0, version=0)
        said: list[bool] = []
        first = await pacer.start(timeout_s=0.05)
        waiting = asyncio.create_task(pacer.start(0.05, lambda: said.append(pacer.learner_is_next)))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        with pacer.not_looking():
            await pacer.reserve(first)
            pacer.appended()
            await asyncio.sleep(0.3)
            assert not waiting.done()
        with pytest.raises(LearnerSilent):
            await waiting
        assert (said[0], said[-1]) == (False, True)

    asyncio.run(run())
