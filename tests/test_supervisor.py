"""The supervisor: services come back after a crash, alone, and the daemon ends when that doesn't help."""

from collections.abc import Awaitable, Callable
from functools import partial

import pytest
import structlog
import trio
import trio.testing

from poseidon.errors import ConfigError, ServiceKeepsCrashing
from poseidon.supervisor import Supervisor, open_supervisor

Body = Callable[[int], Awaitable[None]]
Crash = structlog.typing.EventDict


class Played:
    """A service that does *body* in each of its runs, and remembers when they began."""

    def __init__(self, body: Body) -> None:
        self.body = body
        self.began: list[float] = []

    async def __call__(self, *, task_status: trio.TaskStatus[None]) -> None:
        self.began.append(trio.current_time())
        task_status.started()
        await self.body(len(self.began))


async def forever(_run: int) -> None:
    await trio.sleep_forever()


async def crash_once(run: int) -> None:
    if run == 1:
        raise KeyError("lost\nline")
    await trio.sleep_forever()


async def crash_always(_run: int, *, after: float = 0.0) -> None:
    await trio.sleep(after)
    raise ValueError("broken")


def status_of(supervisor: Supervisor, name: str) -> tuple[str, int, str | None]:
    (found,) = [status for status in supervisor.status() if status.name == name]
    return found.state, found.crashes, found.error


def crashes(events: list[Crash]) -> list[Crash]:
    return [event for event in events if event["event"] == "service crashed"]


async def test_a_crashed_service_runs_again_and_the_others_dont_notice(autojump_clock: trio.testing.MockClock) -> None:
    frail, steady = Played(crash_once), Played(forever)
    with trio.fail_after(60), structlog.testing.capture_logs() as events:
        async with open_supervisor() as supervisor:
            supervisor.add("frail", frail)
            supervisor.add("steady", steady)
            await trio.sleep(5)
            assert status_of(supervisor, "frail") == ("running", 1, "KeyError: 'lost\\nline'")
            assert status_of(supervisor, "steady") == ("running", 0, None)
    assert len(frail.began) == 2 and len(steady.began) == 1
    (crash,) = crashes(events)
    assert crash["log_level"] == "error" and crash["service"] == "frail" and isinstance(crash["exc_info"], KeyError)


async def test_five_crashes_within_a_minute_end_the_daemon(autojump_clock: trio.testing.MockClock) -> None:
    frail, began = Played(crash_always), trio.current_time()
    with trio.fail_after(120), pytest.RaisesGroup(pytest.RaisesExc(ServiceKeepsCrashing, match="'frail'.*broken")):
        async with open_supervisor() as supervisor:
            supervisor.add("frail", frail)
            await trio.sleep_forever()
    assert len(frail.began) == 5
    assert trio.current_time() - began < 12


async def test_each_restart_waits_longer(autojump_clock: trio.testing.MockClock) -> None:
    frail = Played(crash_always)
    with trio.fail_after(120), pytest.RaisesGroup(ServiceKeepsCrashing):
        async with open_supervisor() as supervisor:
            supervisor.add("frail", frail)
            await trio.sleep_forever()
    waits = [later - earlier for earlier, later in zip(frail.began, frail.began[1:], strict=False)]
    assert all(
        low <= wait <= high for wait, low, high in zip(waits, (0.4, 0.8, 1.6, 3.2), (0.6, 1.2, 2.4, 4.8), strict=True)
    )


async def test_rare_crashes_never_end_the_daemon(autojump_clock: trio.testing.MockClock) -> None:
    frail = Played(partial(crash_always, after=20))
    with trio.fail_after(3000), structlog.testing.capture_logs():
        async with open_supervisor() as supervisor:
            supervisor.add("frail", frail)
            await trio.sleep(500)
            assert supervisor.status()[0].crashes > 15
    assert max(later - earlier for earlier, later in zip(frail.began, frail.began[1:], strict=False)) < 25


async def test_two_frail_services_are_counted_apart(autojump_clock: trio.testing.MockClock) -> None:
    async def crash_thrice(run: int) -> None:
        if run <= 3:
            raise ValueError
        await trio.sleep_forever()

    with trio.fail_after(120):
        async with open_supervisor() as supervisor:
            for name in ("a", "b", "c"):
                supervisor.add(name, Played(crash_thrice))
            await trio.sleep(30)
            assert [status.state for status in supervisor.status()] == ["running"] * 3


async def test_start_returns_when_the_service_is_ready(autojump_clock: trio.testing.MockClock) -> None:
    async def slow(*, task_status: trio.TaskStatus[None]) -> None:
        await trio.sleep(3)
        task_status.started()
        await trio.sleep_forever()

    with trio.fail_after(60):
        async with open_supervisor() as supervisor:
            began = trio.current_time()
            supervisor.add("waiting", slow)
            await trio.testing.wait_all_tasks_blocked()
            assert status_of(supervisor, "waiting")[0] == "starting"
            await supervisor.start("slow", slow)
            assert trio.current_time() - began == pytest.approx(3)
            assert status_of(supervisor, "slow")[0] == "running"


async def test_start_waits_through_crashes(autojump_clock: trio.testing.MockClock) -> None:
    runs: list[None] = []

    async def late(*, task_status: trio.TaskStatus[None]) -> None:
        runs.append(None)
        if len(runs) < 3:
            raise ValueError
        task_status.started()
        await trio.sleep_forever()

    with trio.fail_after(60):
        async with open_supervisor() as supervisor:
            await supervisor.start("late", late)
            assert status_of(supervisor, "late")[:2] == ("running", 2)


async def test_start_tells_when_readiness_will_never_come(autojump_clock: trio.testing.MockClock) -> None:
    async def never(*, task_status: trio.TaskStatus[None]) -> None:
        await trio.sleep_forever()

    with trio.fail_after(60):
        async with open_supervisor() as supervisor, trio.open_nursery() as nursery:
            nursery.start_soon(partial(stop_soon, supervisor, "never"))
            with pytest.raises(ServiceKeepsCrashing, match="before it was ready"):
                await supervisor.start("never", never)


async def stop_soon(supervisor: Supervisor, name: str) -> None:
    await trio.testing.wait_all_tasks_blocked()
    await supervisor.stop(name)


async def test_a_service_that_may_end_is_done(autojump_clock: trio.testing.MockClock) -> None:
    async def brief(*, task_status: trio.TaskStatus[None]) -> None:
        await trio.sleep(1)

    with trio.fail_after(60):
        async with open_supervisor() as supervisor:
            await supervisor.start("brief", brief, may_end=True)
            assert status_of(supervisor, "brief") == ("stopped", 0, None)
            supervisor.add("brief", brief, may_end=True)


async def test_a_service_that_ends_without_leave_has_crashed(autojump_clock: trio.testing.MockClock) -> None:
    async def end_once(run: int) -> None:
        if run > 1:
            await trio.sleep_forever()

    with trio.fail_after(60):
        async with open_supervisor() as supervisor:
            supervisor.add("brief", Played(end_once))
            await trio.sleep(5)
            state, count, error = status_of(supervisor, "brief")
            assert (state, count) == ("running", 1) and "ended" in str(error)


async def test_a_stopped_service_has_cleaned_up_and_is_forgotten(autojump_clock: trio.testing.MockClock) -> None:
    cleaned: list[str] = []

    async def careful(_run: int) -> None:
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(1)
            cleaned.append("yes")

    with trio.fail_after(60):
        async with open_supervisor() as supervisor:
            supervisor.add("refresher 1", Played(careful))
            supervisor.add("refresher 2", Played(forever))
            await trio.testing.wait_all_tasks_blocked()
            await supervisor.stop("refresher 1")
            assert cleaned == ["yes"]
            assert [status.name for status in supervisor.status()] == ["refresher 2"]
            await supervisor.stop("refresher 1")
            supervisor.add("refresher 1", Played(forever))


async def test_a_service_can_be_stopped_while_it_backs_off(autojump_clock: trio.testing.MockClock) -> None:
    frail = Played(crash_always)
    with trio.fail_after(60):
        async with open_supervisor() as supervisor:
            supervisor.add("frail", frail)
            await trio.testing.wait_all_tasks_blocked()
            assert status_of(supervisor, "frail")[0] == "backing off"
            await supervisor.stop("frail")
            await trio.sleep(20)
    assert len(frail.began) == 1


async def test_two_services_cant_have_one_name() -> None:
    with trio.fail_after(30):
        async with open_supervisor() as supervisor:
            supervisor.add("x", Played(forever))
            try:
                supervisor.add("x", Played(forever))
            except ValueError as error:
                assert "'x' runs already" in str(error)
            else:
                pytest.fail("a second service of the same name was taken")


async def test_a_wrong_setting_is_not_retried(autojump_clock: trio.testing.MockClock) -> None:
    async def misconfigured(_run: int) -> None:
        raise ConfigError("port in use")

    service = Played(misconfigured)
    with trio.fail_after(60), pytest.RaisesGroup(ConfigError, flatten_subgroups=True):
        async with open_supervisor() as supervisor:
            supervisor.add("api", service)
            await trio.sleep_forever()
    assert len(service.began) == 1


async def test_the_crash_in_a_group_is_told_as_itself(autojump_clock: trio.testing.MockClock) -> None:
    async def nested(run: int) -> None:
        if run == 1:
            raise ExceptionGroup("outer", [ExceptionGroup("inner", [OSError("inside")])])
        await trio.sleep_forever()

    with trio.fail_after(60), structlog.testing.capture_logs() as events:
        async with open_supervisor() as supervisor:
            supervisor.add("nested", Played(nested))
            await trio.sleep(3)
            assert status_of(supervisor, "nested")[2] == "OSError: inside"
    assert isinstance(crashes(events)[0]["exc_info"], OSError)


async def test_a_crash_during_the_stop_is_told_and_the_stop_goes_on() -> None:
    async def fail_late() -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise ValueError("in clean-up")

    async def clumsy(_run: int) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail_late)
            nursery.start_soon(trio.sleep_forever)

    service = Played(clumsy)
    with trio.fail_after(30), structlog.testing.capture_logs() as events:
        async with open_supervisor() as supervisor:
            supervisor.add("clumsy", service)
            await trio.testing.wait_all_tasks_blocked()
    assert len(service.began) == 1
    assert [str(crash["exc_info"]) for crash in crashes(events)] == ["in clean-up"]


async def test_status_tells_since_when() -> None:
    now = [100.0]
    with trio.fail_after(30):
        async with open_supervisor(now=lambda: now[0]) as supervisor:
            await supervisor.start("x", Played(forever))
            now[0] = 200.0
            assert supervisor.status()[0].since == 100.0


async def test_events_of_a_service_carry_its_name() -> None:
    seen: list[object] = []

    async def look(_run: int) -> None:
        seen.append(structlog.contextvars.get_contextvars().get("service"))
        await trio.sleep_forever()

    with trio.fail_after(30):
        async with open_supervisor() as supervisor:
            await supervisor.start("x", Played(look))
            await trio.testing.wait_all_tasks_blocked()
    assert seen == ["x"]
