"""`poseidon doctor`: can this machine run Poseidon, and what is to be done if not?"""

from collections.abc import Iterator

import click

from poseidon.cli.api import Api
from poseidon.cli.checks import Finding, Level, fine, general, loaded, sandboxes
from poseidon.cli.failures import FAILED, CommandFailed, printable
from poseidon.cli.output import ask
from poseidon.cli.target import Options, configuration


@click.command()
@click.pass_obj
def doctor(options: Options) -> int:
    """Look at what Poseidon needs of this machine. Nothing is changed.

    Each line is ok, warn (it works, with less) or FAIL (it doesn't work), with a remedy. Run it as the user that runs
    the daemon. Exit code 1 if anything is FAIL.
    """
    findings = list(examine(options))
    for finding in findings:
        print("\n".join(lines(finding)))
    return FAILED if any(finding.level is Level.FAIL for finding in findings) else 0


def lines(finding: Finding) -> Iterator[str]:
    """The finding, and below it the remedy."""
    yield f"{finding.level:<4}  {finding.name:<16}  {printable(finding.text)}"
    if finding.remedy:
        yield f"{'':<24}→ {printable(finding.remedy)}"


def examine(options: Options) -> Iterator[Finding]:
    """All checks that make sense here."""
    config, about = loaded(lambda: configuration(options.config))
    yield from about
    if config is None:
        return
    for finding in general(config):
        is_taken = finding.name == "port" and finding.level is Level.FAIL
        yield (running_daemon() or finding) if is_taken else finding
    if config.local.enabled:
        yield from sandboxes(config)


def running_daemon() -> Finding | None:
    """Whether it is our own daemon that has the port."""

    async def look(api: Api) -> Finding:
        health = await api.health()
        text = f"Poseidon runs at {api.target.url}"
        return Finding("port", Level.WARN, f"{text}: {health}", "see poseidon status") if health else fine("port", text)

    try:
        return ask(look)
    except CommandFailed:
        return None
