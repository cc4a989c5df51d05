"""All figures by name: what is measured, beside what, and what is wanted. The results have exactly these names."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Target:
    """*limit* must hold, *aim* should. *of*: the figure itself, or its ratio to the reference."""

    limit: float
    aim: float | None = None
    sense: Literal["≤", "≥"] = "≤"
    of: Literal["figure", "ratio"] = "figure"

    def verdict(self, figure: float, ratio: float | None) -> str:
        """ok, near (only the aim is missed) or miss."""
        value = figure if self.of == "figure" else ratio
        if value is None or not self._holds(value, self.limit):
            return "miss"
        return "ok" if self.aim is None or self._holds(value, self.aim) else "near"

    def _holds(self, value: float, limit: float) -> bool:
        return value <= limit if self.sense == "≤" else value >= limit

    def __str__(self) -> str:
        text = f"{self.sense} {self.limit:g}" + ("" if self.of == "figure" else " ×")
        return text if self.aim is None else f"{text} (aim {self.aim:g})"


@dataclass(frozen=True, slots=True)
class Figure:
    """*reference* names what is measured beside it, in the same unit; empty: nothing is."""

    name: str
    what: str
    unit: str
    reference: str = ""
    target: Target | None = None


def at_most(limit: float, aim: float | None = None) -> Target:
    """Of the figure itself."""
    return Target(limit, aim)


def at_least(limit: float, aim: float | None = None) -> Target:
    """Of the figure itself."""
    return Target(limit, aim, "≥")


MS, RATE, MB, KIB, CPU = "ms", "/s", "MB", "KiB", "% CPU"
VERSION = "GET /version"

FIGURES = (
    Figure("claim.core", "claim, server side, durable", MS, "bare commit of such rows", at_most(3, 2)),
    Figure("claim.http", "claim by HTTP from a full pool", MS, VERSION),
    Figure("claims.burst", "claims by 50 clients from a full pool", RATE, VERSION, at_least(1000)),
    Figure("claims.sustained", "claims by 50 clients, an instant executor", RATE, VERSION, at_least(1000)),
    Figure("claims.released", "claim and release by 50 clients", RATE, VERSION),
    Figure("runner.ready", "local runner, start() to ready", MS, "bwrap with a bare python", at_most(50)),
    Figure("runner.stopped", "local runner, stop() to proven gone", MS),
    Figure("claim.empty", "claim by HTTP with a pool of size 0", MS, "start() to ready"),
    Figure("execution.tty", "`true`, WebSocket open to exit, terminal", MS, "bare executor", at_most(15, 10)),
    Figure("execution.pipes", "the same without a terminal", MS, "bare executor", at_most(15, 10)),
    Figure("execution.overhead", "what Poseidon adds to the bare executor", MS, "", at_most(3)),
    Figure("execution.created", "POST of an execution, durable", MS, VERSION),
    Figure("executor.tty", "bare executor runs `true`, terminal", MS, "subprocess on the host"),
    Figure("executor.pipes", "the same without a terminal", MS, "subprocess on the host"),
    Figure("start.health", "`poseidon serve`, exec to healthy", MS, "python -c 'import trio'", at_most(1200)),
    Figure("start.fresh", "the same with a new store", MS, "bare python", at_most(1200)),
    Figure("pool.memory", "50 idle runners (PSS), daemon apart", MB, "so many bwrap with python", at_most(400)),
    Figure("pool.cpu", "50 idle runners, daemon apart", CPU, "", at_most(0.5)),
    Figure("pool.daemon.cpu", "the daemon beside them", CPU),
    Figure("pool.daemon.memory", "the daemon beside them (PSS)", MB, "python -c 'import trio'"),
    Figure("pool.filled", "PUT of the environment to 50 idle runners", MS),
    Figure(
        "output.pipes",
        "10 MB of output through the WebSocket",
        "MB/s",
        "bare executor",
        Target(0.5, sense="≥", of="ratio"),
    ),
    Figure("output.tty", "the same through a terminal", "MB/s", "bare executor", Target(0.5, sense="≥", of="ratio")),
    Figure("output.memory", "the daemon's peak rise meanwhile (RSS)", MB),
    Figure("output.slow", "its peak rise with a slow reader (RSS)", MB),
    Figure("idle.cpu", "100 idle executions, daemon and sandboxes", CPU, "", at_most(3)),
    Figure("websocket.memory", "the daemon, for each of them (PSS)", KIB, "", at_most(100)),
    Figure("restart.claim", "restart with 1,000 runners to first claim", MS, "the same with one runner", at_most(1000)),
    Figure("nomad.listing", "1,000 known Nomad runners listed, applied", MS, "the same with one runner", at_most(1000)),
    Figure("runner.memory", "an idle runner in the core", KIB, "", at_most(2)),
    Figure("core.events", "recorded events through the fleet", RATE, "json.loads of their lines", at_least(20_000)),
    Figure("files.list", "listing of 10,000 files", MS, "bare executor: find"),
    Figure("files.download", "raw download of 100 MB", "MB/s", "bare executor: cat"),
    Figure("files.download.memory", "the daemon's peak rise meanwhile (RSS)", MB),
    Figure("files.copy", "PATCH of a body of 60 MB", MS, "bare executor: tar"),
    Figure("files.copy.memory", "the daemon's peak rise meanwhile (RSS)", MB, "", at_most(180)),
    Figure("files.copy.health", "GET /health meanwhile", MS, "the same before"),
    Figure("cycle.one", "claim, 3 files, run, delete: one client", MS, "bare executor: start, run, stop"),
    Figure("cycle.one.rate", "such cycles", RATE),
    Figure("cycle.ten", "the same with 10 clients", MS),
    Figure("cycle.ten.rate", "such cycles", RATE),
    Figure("cycle.fifty", "the same with 50 clients", MS),
    Figure("cycle.fifty.rate", "such cycles", RATE),
    Figure("hostile.health", "GET /health among hostile clients", MS, "before they came"),
    Figure("hostile.health.p99", "its 99th percentile", MS, "before they came", at_most(100)),
    Figure("hostile.memory", "the daemon's peak rise meanwhile (RSS)", MB, "", at_most(150)),
    Figure("http.one", "GET /health, one client", RATE, "plain Hypercorn and Quart"),
    Figure("http.sixteen", "GET /health, 16 clients", RATE, "plain Hypercorn and Quart"),
)
BY_NAME = {figure.name: figure for figure in FIGURES}


def chosen(name: str | None) -> Callable[[str], bool]:
    """Whether a figure is meant by `--only`: its name, or the beginning of it."""
    return lambda figure: name is None or figure == name or figure.startswith(f"{name}.")
