"""The measurements that take real sandboxes and a real daemon, all with the same one."""

from bench.bare import open_bare
from bench.context import Bench, Measurement
from bench.cycles import measure_cycles, measure_starts
from bench.daemons import open_clients, open_daemon
from bench.executions import measure_commands, measure_idle
from bench.files import measure_files
from bench.hostile import measure_hostile
from bench.outputs import measure_output
from bench.site import Part, Site

PARTS: tuple[tuple[tuple[str, ...], Part], ...] = (
    (("idle.cpu", "websocket.memory"), measure_idle),  # first: memory that others have left behind would hide some
    (("runner.ready", "runner.stopped", "claim.empty"), measure_starts),
    (
        (
            "execution.tty",
            "execution.pipes",
            "execution.overhead",
            "execution.created",
            "executor.tty",
            "executor.pipes",
        ),
        measure_commands,
    ),
    (("output.pipes", "output.tty", "output.memory", "output.slow"), measure_output),
    (
        (
            "files.list",
            "files.download",
            "files.download.memory",
            "files.copy",
            "files.copy.memory",
            "files.copy.health",
        ),
        measure_files,
    ),
    (
        ("cycle.one", "cycle.one.rate", "cycle.ten", "cycle.ten.rate", "cycle.fifty", "cycle.fifty.rate"),
        measure_cycles,
    ),
    (("hostile.health", "hostile.health.p99", "hostile.memory"), measure_hostile),
)


async def measure(bench: Bench) -> None:
    """All that are wanted; one that fails doesn't keep the others from being measured."""
    async with (
        open_bare(bench.folder / "bare") as bare,
        open_daemon(bench.folder / "executions") as daemon,
        open_clients(daemon) as (client,),
    ):
        for names, part in PARTS:
            if any(bench.wants(name) for name in names):
                bench.report.progress(f"{', '.join(names)} …")
                await part(Site(bench, daemon, client, bare))


MEASUREMENTS = (Measurement(tuple(name for names, _ in PARTS for name in names), measure),)
