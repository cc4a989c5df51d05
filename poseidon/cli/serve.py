"""`poseidon serve`: the daemon."""

from pathlib import Path

import click

from poseidon.cli.main import FILE
from poseidon.cli.target import Options, configuration


@click.command()
@click.option("--config", type=FILE, help="The configuration (default: ./poseidon.toml, /etc/poseidon/poseidon.toml).")
@click.option(
    "--stop-runners", is_flag=True, help="Destroy all runners at the end, instead of leaving them to the next start."
)
@click.pass_obj
def serve(options: Options, config: Path | None, stop_runners: bool) -> int | None:
    """Run the daemon, in the foreground.

    It needs no configuration: then it listens on 127.0.0.1:7200, keeps its data in a folder of yours, and runs programs
    in sandboxes of this machine. SIGTERM or Ctrl-C stop it: running programs may come to their end for a while
    (server.drain_timeout), a second signal hurries. Runners outlive the daemon and are taken over by the next one.

    `poseidon check-config` shows whether a configuration can be used, `poseidon doctor` whether this machine can.
    """
    from poseidon.daemon import main  # only the daemon pays for importing the daemon

    return main(configuration(config or options.config), stop_runners=stop_runners)
