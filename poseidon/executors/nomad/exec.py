"""Executions in Nomad's allocations: the command's sessions, opened where they can be and left when it is done."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import trio

from poseidon.core.command import Command
from poseidon.core.model import Allocation
from poseidon.errors import ExecutorUnreachable
from poseidon.executors.base import Process
from poseidon.executors.nomad.exec_process import NeverBegan, NomadProcess
from poseidon.executors.nomad.exec_session import Unconnected, tasks
from poseidon.executors.nomad.exec_target import ExecTarget

__all__ = ["ExecTarget", "open_exec"]

ATTEMPTS = 3
"""Of beginning, where nothing has begun."""


@asynccontextmanager
async def open_exec(target: ExecTarget, allocation: Allocation, command: Command) -> AsyncIterator[Process]:
    """Run *command*: entered once it runs. Leaving closes its connections, which doesn't end it.

    Raises AllocationGone, ExecutorUnreachable, ConnectionLost, LeftRunning, ExecutorError, BadRequest.
    """
    async with AsyncExitStack() as stack:
        yield await _started(stack, target, allocation, command)


async def _started(stack: AsyncExitStack, target: ExecTarget, allocation: Allocation, command: Command) -> NomadProcess:
    *nearer, server = await target.addresses(allocation)
    for address in nearer:
        try:
            return await _started_at(stack, target, allocation, command, address)
        except Unconnected:
            target.avoid(address)
    return await _started_at(stack, target, allocation, command, server)


async def _started_at(
    stack: AsyncExitStack, target: ExecTarget, allocation: Allocation, command: Command, address: str
) -> NomadProcess:
    for _ in range(ATTEMPTS - 1):
        with suppress(NeverBegan):
            return await _started_once(stack, target, allocation, command, address)
    return await _started_once(stack, target, allocation, command, address)


async def _started_once(
    stack: AsyncExitStack, target: ExecTarget, allocation: Allocation, command: Command, address: str
) -> NomadProcess:
    process = NomadProcess(target, allocation, command)
    async with AsyncExitStack() as attempt:
        with trio.move_on_after(target.start_timeout) as waiting:
            await attempt.enter_async_context(target.room(address).take(2 if command.tty else 1))
        if waiting.cancelled_caught:
            raise ExecutorUnreachable("all connections for executions are in use")
        nursery = await attempt.enter_async_context(tasks())
        attempt.callback(process.leave)
        await process.start(nursery, address)
        await stack.enter_async_context(attempt.pop_all())
    return process
