"""`poseidon import-config`: an original's configuration.yaml becomes a poseidon.toml."""

import os
import secrets
import tomllib
from contextlib import suppress
from pathlib import Path

import click

from poseidon.cli.failures import CommandFailed, complain, printable
from poseidon.cli.main import FILE
from poseidon.cli.original import LARGEST, Translation, translate
from poseidon.config import Settings
from poseidon.config_sources import Sources, validated
from poseidon.errors import ConfigError


@click.command("import-config")
@click.argument("source", metavar="CONFIGURATION.YAML", type=FILE)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, allow_dash=True),
    default="poseidon.toml",
    show_default=True,
    metavar="FILE",
    help="- is stdout.",
)
@click.option("--force", is_flag=True, help="Overwrite the file.")
def import_config(source: Path, output: str, force: bool) -> None:
    """Turn a configuration of the original Poseidon into one of this.

    What can't be taken over is told on stderr, a line each. The new file can be read by you alone, since it may hold
    tokens. Variables POSEIDON_… of the original need no import, they work as they are.
    """
    found = _translated(source)
    text = f"# From {printable(str(source))}. Every setting is explained in the poseidon.toml that Poseidon brings.\n\n"
    text += found.as_toml()
    _check(text, source)
    if output == "-":
        print(text, end="")
    else:
        _write(Path(output), text, overwrite=force)
    for remark in found.remarks:
        complain(printable(remark))
    if output != "-":
        complain(f"wrote {printable(output)}; `poseidon check-config {printable(output)}` looks at it again")


def _translated(source: Path) -> Translation:
    try:
        with source.open("rb") as file:
            raw = file.read(LARGEST + 1)
        if len(raw) > LARGEST:
            raise CommandFailed(f"{source}: is larger than {LARGEST} bytes, that is no configuration")
        found = translate(raw.decode("utf-8-sig"), source.absolute().parent)
    except OSError as error:
        raise CommandFailed(f"{source}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CommandFailed(f"{source}: isn't UTF-8 text (byte {error.start})") from error
    except ConfigError as error:
        raise CommandFailed(f"{source}: {error.message}") from error
    if found.problems:
        raise ConfigError("\n".join(f"{source}: {problem}" for problem in found.problems))
    return found


def _check(text: str, source: Path) -> None:
    """What would be written must be a configuration. Raises ConfigError."""
    validated(Settings, Sources(tree=tomllib.loads(text), file=source))


def _write(target: Path, text: str, *, overwrite: bool) -> None:
    """All of it or nothing, for nobody else's eyes."""
    draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
        if overwrite:
            draft.replace(target)
        else:
            target.hardlink_to(draft)
    except FileExistsError as error:
        raise CommandFailed(f"{target} exists already; --force overwrites it") from error
    except OSError as error:
        raise CommandFailed(f"can't write {target}: {error.strerror}") from error
    finally:
        with suppress(OSError):
            draft.unlink()
