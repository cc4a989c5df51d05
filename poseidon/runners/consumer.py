"""Keeps the dispatcher in step with its executor, for ever: subscribe, then list, then apply the stream.

It must not decide anything, and never waits for those who handle what it applies.
"""

import structlog
import trio

from poseidon.errors import ExecutorUnreachable
from poseidon.runners.delays import Delays
from poseidon.runners.dispatcher import Dispatcher

log = structlog.get_logger(__name__)

LIST_WITHIN = 300.0
"""Seconds that a full listing may take."""


async def follow(dispatcher: Dispatcher, *, task_status: trio.TaskStatus[None]) -> None:
    """The service. It is ready at once: health tells whether the executor is reachable."""
    task_status.started()
    delays = Delays(first=0.5, most=30)
    while True:
        try:
            await _follow_once(dispatcher, delays)
        except* ExecutorUnreachable as lost:
            dispatcher.trouble = _first(lost).message
        dispatcher.reachable = False
        dispatcher.recognition.lose(dispatcher.trouble or "")
        log.warning("event stream lost", executor=dispatcher.executor.name, error=dispatcher.trouble)
        await trio.sleep(delays.next())


async def _follow_once(dispatcher: Dispatcher, delays: Delays) -> None:
    position = dispatcher.fleet.position.stream or None
    async with dispatcher.executor.follow(position) as batches, trio.open_nursery() as nursery:
        await dispatcher.recognition.begin()
        nursery.start_soon(_list_again_and_again, dispatcher, delays)
        async for batch in batches:
            dispatcher.apply(batch)
        raise ExecutorUnreachable("the stream has ended")


async def _list_again_and_again(dispatcher: Dispatcher, delays: Delays) -> None:
    """The stream is not to be trusted alone: it doesn't say what it has lost."""
    take = dispatcher.list_all
    while True:
        try:
            with trio.fail_after(LIST_WITHIN):
                await take()
        except trio.TooSlowError:
            raise ExecutorUnreachable(f"no listing within {LIST_WITHIN:g} seconds") from None
        dispatcher.reachable, dispatcher.trouble = True, None
        delays.made = 0
        take = dispatcher.compare
        await dispatcher.comparison_due()


def _first(group: BaseExceptionGroup[ExecutorUnreachable]) -> ExecutorUnreachable:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
