"""`poseidon check-config`: would the daemon take this configuration?"""

from pathlib import Path

import click

from poseidon.api.tls import open_tls
from poseidon.cli.failures import complain, printable
from poseidon.cli.main import FILE
from poseidon.cli.target import Options, configuration


@click.command("check-config")
@click.argument("file", type=FILE, required=False)
@click.pass_obj
def check_config(options: Options, file: Path | None) -> None:
    """Check the configuration, POSEIDON_* variables included.

    FILE defaults to what the daemon would read: --config, else ./poseidon.toml, else /etc/poseidon/poseidon.toml; no
    file is fine as well. Exit code 0 if it can be used; else 1, with one line for each problem.
    """
    config = configuration(file or options.config)
    open_tls(config.server.tls)
    for caution in config.cautions():
        complain(f"careful: {printable(caution)}")
    print(f"{config.origin or 'no file'}: fine; the daemon listens on {config.server.address}:{config.server.port}")
