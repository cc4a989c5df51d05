"""Where the nodes of a cluster are, to open executions there directly. Looked up once in a while."""

from dataclasses import dataclass

import trio

from poseidon.core.model import Allocation
from poseidon.errors import ExecutorError
from poseidon.executors.nomad.client import NODE, Client, path_of

MOST_NODES = 10_000


@dataclass(frozen=True, slots=True)
class _Known:
    address: str | None
    until: float


class Nodes:
    """A node whose address isn't told (no right to read nodes, for instance) has none for a while."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._settings = client.settings
        self._known: dict[str, _Known] = {}

    async def address(self, allocation: Allocation) -> str | None:
        """The URL of the node's own API; None: go through the server."""
        if not self._settings.direct_exec or not allocation.node_id:
            return None
        known = self._known.get(allocation.node_id)
        if known is None or known.until < trio.current_time():
            known = _Known(
                await self._look_up(allocation.node_id), trio.current_time() + self._settings.node_address_ttl
            )
            if len(self._known) >= MOST_NODES:
                self._known.clear()
            self._known[allocation.node_id] = known
        return known.address

    async def _look_up(self, node: str) -> str | None:
        try:
            found = (await self._client.get(path_of("node", node), NODE)).body
        except ExecutorError:
            return None
        return f"{'https' if found.tls_enabled else 'http'}://{found.http_addr}" if found.http_addr else None
