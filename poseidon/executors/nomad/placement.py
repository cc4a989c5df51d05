"""Whether a registration found room: its evaluation, followed by event and by look-up, bounded in time."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import trio

from poseidon.errors import ExecutorUnreachable
from poseidon.executors.nomad import wire
from poseidon.executors.nomad.client import EVALUATION, Client, NotFound, path_of

MISSING_DRIVERS = "missing drivers"
STATUS_FINAL = ("complete", "failed", "canceled")


@dataclass(frozen=True, slots=True)
class NoRoom:
    """Why a job wasn't placed. *drivers*: a node was refused for its driver's health, which may return."""

    why: str
    drivers: bool = False


@dataclass(slots=True, eq=False)
class Expectation:
    """The evaluations of one job that were heard of since it began. An event may come before the API's answer."""

    heard: dict[str, wire.Evaluation] = field(default_factory=dict)
    news: trio.Event = field(default_factory=trio.Event)

    def note(self, evaluation: wire.Evaluation) -> None:
        self.heard[evaluation.id] = evaluation
        self.news.set()
        self.news = trio.Event()


class Evaluations:
    """Those that somebody waits for."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._expected: dict[str, list[Expectation]] = {}

    def note(self, evaluation: wire.Evaluation) -> None:
        """The stream tells of one."""
        for expectation in self._expected.get(evaluation.job_id, ()):
            expectation.note(evaluation)

    @contextmanager
    def expect(self, job: str) -> Iterator[Expectation]:
        """To be entered before anything is asked for."""
        expectation = Expectation()
        expectations = self._expected.setdefault(job, [])
        expectations.append(expectation)
        try:
            yield expectation
        finally:
            expectations.remove(expectation)
            if not expectations:
                del self._expected[job]

    async def outcome(self, expectation: Expectation, evaluation: str) -> NoRoom | None:
        """How *evaluation* ended; None if all is placed, or if it takes too long to tell: the job exists anyway."""
        with trio.move_on_after(self._client.settings.evaluation_timeout):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._look_up, expectation, evaluation)
                while (found := _final(expectation, evaluation)) is None:
                    await expectation.news.wait()
                nursery.cancel_scope.cancel(reason="the evaluation has ended")
            return no_room(found)
        return None

    async def _look_up(self, expectation: Expectation, evaluation: str) -> None:
        delay = self._client.settings.evaluation_look_ups
        while True:
            await trio.sleep(delay)
            delay *= 2
            try:
                answer = await self._client.get(path_of("evaluation", evaluation), EVALUATION)
            except (ExecutorUnreachable, NotFound):
                continue  # the next one, or the event, or the bound of time
            expectation.note(answer.body)


def _final(expectation: Expectation, evaluation: str) -> wire.Evaluation | None:
    heard = expectation.heard.get(evaluation)
    return heard if heard is not None and heard.status in STATUS_FINAL else None


def no_room(evaluation: wire.Evaluation) -> NoRoom | None:
    """What a final evaluation says about room."""
    failed = evaluation.failed_groups
    if not failed:
        return NoRoom("nomad has blocked the job") if evaluation.blocked_eval else None
    metrics = list(failed.values())
    drivers = any(MISSING_DRIVERS in (metric.constraint_filtered or {}) for metric in metrics)
    return NoRoom("; ".join(dict.fromkeys(reason for metric in metrics for reason in _reasons(metric))), drivers)


def _reasons(metric: wire.Metric) -> Iterator[str]:
    """The most telling reason first."""
    yield from (f"{what} exhausted on {_nodes(count)}" for what, count in _items(metric.dimension_exhausted))
    yield from (f"quota exhausted: {quota}" for quota in metric.quota_exhausted or ())
    yield from (f"{what} ({_nodes(count)} filtered)" for what, count in _items(metric.constraint_filtered))
    if not metric.nodes_evaluated and not any((metric.nodes_available or {}).values()):
        yield f"no eligible node in {', '.join(metric.nodes_available or {}) or 'the datacentre'}"
    elif not metric.dimension_exhausted and not metric.constraint_filtered:
        yield f"no node fits ({metric.nodes_filtered} of {_nodes(metric.nodes_evaluated)} filtered)"


def _items(counts: Mapping[str, int] | None) -> list[tuple[str, int]]:
    return sorted((counts or {}).items(), key=lambda item: (-item[1], item[0]))


def _nodes(count: int) -> str:
    return f"{count} node" if count == 1 else f"{count} nodes"
