"""`poseidon token`: makes tokens. They aren't stored anywhere; the configuration only needs their hash."""

import re
import secrets
from typing import get_args

import click

from poseidon.cli.failures import complain
from poseidon.config_access import TOKEN_NAME, Role, hashed

LENGTH = 32
"""Bytes of chance: nobody guesses them, so a plain SHA-256 of them is as good as a slow hash."""


def _checked(_context: click.Context, _parameter: click.Parameter, name: str) -> str:
    if not re.fullmatch(TOKEN_NAME, name):
        raise click.BadParameter("a name has letters, digits, - and _")
    return name


@click.group()
def token() -> None:
    """Make tokens for clients."""


@token.command()
@click.option("--name", callback=_checked, default="client", show_default=True, help="What it is called in the log.")
@click.option("--role", type=click.Choice(get_args(Role)), default="client", show_default=True, help="What it allows.")
def new(name: str, role: Role) -> None:
    """Make a token. It is shown once, on stdout; what belongs into the configuration is told on stderr.

    client: runners, their files and executions. read-only: how things are. admin: everything; a learning platform
    that creates environments (CodeOcean does) needs it.
    """
    made = secrets.token_urlsafe(LENGTH)
    print(made)
    complain("this token is shown only now; for the daemon, put this into poseidon.toml and reload it:")
    for line in ("", f"[server.tokens.{name}]", f'role = "{role}"', f'token = "{hashed(made)}"'):
        click.echo(line, err=True)
