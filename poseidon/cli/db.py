"""`poseidon db`: upgrade, check and copy the database, and make it forget a lost cluster."""

import os
from pathlib import Path

import click

from poseidon.cli.failures import FAILED, complain, printable
from poseidon.cli.main import FILE
from poseidon.cli.target import Options, configuration
from poseidon.store.backup import backup as copy_file
from poseidon.store.backup import check as check_file
from poseidon.store.faults import store_errors
from poseidon.store.forget import forget as forget_cluster_of
from poseidon.store.lock import take_lock
from poseidon.store.schema import REVISION
from poseidon.store.upgrade import upgrade as upgrade_file

CONFIG = click.option("--config", type=FILE, help="Configuration that says where the database is.")


@click.group()
def db() -> None:
    """Look after the database.

    It is where the configuration says (store.path), else in the state folder: $STATE_DIRECTORY/poseidon.db, for root
    /var/lib/poseidon/poseidon.db, for others ~/.local/state/poseidon/poseidon.db. To look into it, use the sqlite3
    program while the daemon runs.
    """


@db.command()
@CONFIG
@click.pass_obj
def upgrade(options: Options, config: Path | None) -> None:
    """Bring the database to the schema of this program, as `serve` does when it starts.

    A database that isn't there is made. A copy of an older one is kept beside it. The daemon must not run.
    """
    path = configuration(config or options.config).database
    with store_errors(path):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = take_lock(path)
    try:
        copy = upgrade_file(path)
    finally:
        os.close(lock)
    print(f"{path} has schema {REVISION}" + (f"; as it was before: {copy}" if copy else ""))


@db.command()
@CONFIG
@click.pass_obj
def check(options: Options, config: Path | None) -> int:
    """Read all of the database and look for damage. The daemon may run.

    Exit code 0 if it is fine, else 1, with a line for each problem.
    """
    path = configuration(config or options.config).database
    found = check_file(path)
    for problem in found.problems:
        complain(printable(problem))
    if found.problems:
        return FAILED
    hint = "" if found.revision == REVISION else f"; this program has {REVISION} (see poseidon db upgrade --help)"
    print(f"{path} is fine, with schema {found.revision or 'none yet'}{hint}")
    return 0


@db.command()
@click.argument("target", type=FILE)
@CONFIG
@click.pass_obj
def backup(options: Options, target: Path, config: Path | None) -> None:
    """Copy the database, as it is at this moment, to the file TARGET. The daemon may run; it isn't held up."""
    path = configuration(config or options.config).database
    copy_file(path, target)
    print(f"{path} copied to {target}")


@db.command("forget-cluster")
@CONFIG
@click.pass_obj
def forget_cluster(options: Options, config: Path | None) -> None:
    """Give up all runners of the Nomad cluster: it has lost them, or is another one on purpose.

    Poseidon does nothing in a cluster in which it finds none of its jobs: nomad.address may be wrong. If it is right,
    this makes the next start believe the cluster. The ids of lost runners answer 410; should their jobs turn up again
    after all, they are stopped. Environments stay. The daemon must not run.
    """
    path = configuration(config or options.config).database
    found = forget_cluster_of(path, "nomad")
    print(f"{path}: {found.runners} runners of {found.jobs} jobs given up")
