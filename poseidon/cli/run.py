"""`poseidon run`: the program's input, output and exit code as if it ran here."""

from pathlib import Path

import click
import trio

from poseidon.cli.api import open_api
from poseidon.cli.failures import RunFailed, complain, explain
from poseidon.cli.program import Program, extras, from_script, from_words, variables
from poseidon.cli.session import Session, Wish
from poseidon.cli.target import Options, Target, find_target
from poseidon.cli.terminal import Terminal
from poseidon.cli.timings import Timings

AFTER_DASHES = "poseidon.after_dashes"


class RunCommand(click.Command):
    """Tells `run SCRIPT ARGS…` from `run -- CMD…`, and fails by a code that is no program's own."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: object
    ) -> click.Context:
        """Wrong usage is a failure of ours as well."""
        try:
            return super().make_context(info_name, args, parent, **extra)
        except click.UsageError as error:
            raise RunFailed(explain(error)) from error

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Cut at the first `--`, unless it belongs to a script's arguments."""
        if "--" in args:
            cut = args.index("--")
            options = click.Command(
                self.name, params=[known for known in self.params if isinstance(known, click.Option)]
            )
            _, words, _ = options.make_parser(ctx).parse_args(args[:cut])
            if not words:
                ctx.meta[AFTER_DASHES] = args[cut + 1 :]
                args = args[:cut]
        return super().parse_args(ctx, args)

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Both ways."""
        formatter.write_usage(ctx.command_path, "[OPTIONS] SCRIPT [ARGS]...")
        formatter.write_usage(ctx.command_path, "[OPTIONS] -- COMMAND...", prefix=" " * len("Usage: "))

    def invoke(self, ctx: click.Context) -> object:
        """Whatever goes wrong here is no exit code of the program."""
        try:
            return super().invoke(ctx)
        except (click.exceptions.Exit, RunFailed):
            raise
        except Exception as error:
            raise RunFailed(explain(error)) from error


@click.command(cls=RunCommand, context_settings={"allow_interspersed_args": False}, no_args_is_help=False)
@click.option("--environment", "-e", type=int, metavar="ID", help="The environment to run in (default: the only one).")
@click.option(
    "--time-limit",
    "-t",
    type=click.IntRange(min=0),
    default=0,
    metavar="SECONDS",
    help="End it after so long (0: never).",
)
@click.option("--privileged", is_flag=True, help="Run it as root of the runner, where the executor can do that.")
@click.option("--env", "entries", multiple=True, metavar="NAME[=VALUE]", help="Set a variable (again for more).")
@click.option(
    "--file", "-f", "files", multiple=True, metavar="PATH[=NAME]", help="Copy a file or folder too (again for more)."
)
@click.option("--timings", is_flag=True, help="Say at the end on stderr how long each step took.")
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def run(  # noqa: PLR0917 - click passes them by name
    context: click.Context,
    words: tuple[str, ...],
    environment: int | None,
    time_limit: int,
    privileged: bool,
    entries: tuple[str, ...],
    files: tuple[str, ...],
    timings: bool,
) -> int:
    """Run a script or a command in a runner of its own.

    SCRIPT is copied into the workspace and run by what its #! line names, else by its suffix (.py, .sh, .js, .rb, .pl,
    .php, .lua, .r, .java). After `--` comes a command instead: a single word is a line for the shell, several words
    are a program and its exact arguments. Options stand before SCRIPT or `--`; all that follows is the program's.

    \b
      poseidon run hello.py
      poseidon run --file data.csv --time-limit 10 count.py data.csv
      echo 1 2 3 | poseidon run -- wc -w
      poseidon run -- 'ls -la | head'
      poseidon run -- bash

    It works as ssh does: output comes as it is written, and what you type or pipe in is the program's input. With a
    terminal at both ends the program gets one as well, in the size of yours, and Ctrl-C goes to the program; Enter ~ .
    leaves at once. Otherwise the program gets pipes; Ctrl-C is passed on to it once, the second one leaves. The runner
    is always destroyed at the end.

    Without --environment it runs in the only one there is; if there is none, `default` is created as number 1. A
    program without time limit may run for a day.

    Exit codes: the program's own; 124 if its time limit was over; 137 if it ran out of memory; 255 if Poseidon failed
    or the command line is wrong (stderr says why); 128 + number if a signal ended us.
    """
    wish = Wish(
        program=with_files(program(context, words), extras(files)),
        environment=environment,
        time_limit=time_limit,
        privileged=privileged,
        variables=variables(entries),
    )
    watch = Timings()
    code = trio.run(perform, find_target(context.find_object(Options) or Options()), wish, watch)
    for line in watch.lines() if timings else ():
        complain(line)
    return code


def program(context: click.Context, words: tuple[str, ...]) -> Program:
    """What to run."""
    command = context.meta.get(AFTER_DASHES, [])
    if words:
        return from_script(Path(words[0]), words[1:])
    if command:
        return from_words(command)
    raise click.UsageError("what to run? Give a SCRIPT, or a COMMAND after --", context)


def with_files(program: Program, more: dict[str, bytes]) -> Program:
    """*program* with all its files."""
    return Program(program.line, more | program.files)


async def perform(target: Target, wish: Wish, timings: Timings) -> int:
    """Run it; the exit code."""
    async with open_api(target) as api:
        return await Session(api, wish, Terminal(), timings).run()
