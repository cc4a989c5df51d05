"""`poseidon`: the options common to all commands, and the last word on errors. Commands are imported when used."""

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from poseidon import __version__
from poseidon.cli.failures import BROKEN_PIPE, FAILED, INTERRUPTED, report
from poseidon.cli.target import Options
from poseidon.cli.terminal import STDOUT, keep_standard_descriptors

COMMANDS = {
    "serve": "poseidon.cli.serve:serve",
    "run": "poseidon.cli.run:run",
    "status": "poseidon.cli.status:status",
    "environments": "poseidon.cli.environments:environments",
    "runners": "poseidon.cli.runners:runners",
    "check-config": "poseidon.cli.check_config:check_config",
    "doctor": "poseidon.cli.doctor:doctor",
    "import-config": "poseidon.cli.import_config:import_config",
    "token": "poseidon.cli.token:token",
    "db": "poseidon.cli.db:db",
}
FILE = click.Path(path_type=Path, dir_okay=False)


class Commands(click.Group):
    """Commands by name, in the order in which one meets them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All of them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the one that is meant."""
        if cmd_name not in COMMANDS:
            return None
        module, name = COMMANDS[cmd_name].split(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def invoke(self, ctx: click.Context) -> object:
        """What click makes of a reader that has gone is an error of ours; it is none."""
        try:
            code = super().invoke(ctx)
            sys.stdout.flush()
            return code
        except BrokenPipeError:
            return silence()


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--url", envvar="POSEIDON_URL", metavar="URL", help="The daemon, e.g. http://127.0.0.1:7200.")
@click.option("--token", envvar="POSEIDON_TOKEN", help="Its token (others on this machine can see it: see next).")
@click.option("--token-file", envvar="POSEIDON_TOKEN_FILE", type=FILE, help="A file that holds its token.")
@click.option("--ca-file", envvar="POSEIDON_CA_FILE", type=FILE, help="Authority that its certificate is checked by.")
@click.option("--config", type=FILE, help="Configuration to read address and token from, if no --url is given.")
@click.version_option(__version__, message="poseidon %(version)s")
@click.pass_context
def cli(
    context: click.Context,
    *,
    url: str | None,
    token: str | None,
    token_file: Path | None,
    ca_file: Path | None,
    config: Path | None,
) -> None:
    """Run code in fresh, isolated runners.

    `poseidon serve` starts the daemon, `poseidon run` runs a program in it; the other commands show and manage what
    it has. Without --url they talk to the daemon of this machine's configuration (poseidon.toml, POSEIDON_SERVER_PORT
    and so on), without any configuration to http://127.0.0.1:7200. URL and token can also be given as POSEIDON_URL,
    POSEIDON_TOKEN and POSEIDON_TOKEN_FILE. The token of the configuration is never sent to another --url.

    Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted; `poseidon run --help` tells its own. An error is one
    line on stderr; POSEIDON_DEBUG=1 adds where in the program it came from.
    """
    context.obj = Options(url=url, token=token, token_file=token_file, config=config, ca_file=ca_file)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code."""
    keep_standard_descriptors()
    try:
        code = cli.main(None if arguments is None else list(arguments), "poseidon", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return error.exit_code
    except Exception as error:  # noqa: BLE001 - the last one who could tell a person
        report(error)
        return int(getattr(error, "exit_code", FAILED))


def silence() -> int:
    """Nobody reads our output: say no more, neither now nor at the interpreter's end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)
    return BROKEN_PIPE
