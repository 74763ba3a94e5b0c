"""The `vlmrl` command and its subcommands. Only this module prints errors and sets exit codes."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from vlmrl import __version__
from vlmrl.cli.output import describe_interruption, print_error, say
from vlmrl.errors import exit_of
from vlmrl.process import end_on_sigterm, keep_standard_streams, leave

COMMANDS = (
    "prep",
    "check",
    "fetch",
    "try_",
    "sft",
    "train",
    "merge",
    "eval",
    "generate",
    "compare",
    "reward_check",
    "report",
    "runs",
    "recipe",
    "data",
    "launch",
    "init",
    "demo",
)
"""Commands and groups, in the order in which a project uses them. Each module has a function `register(app)`."""


USAGE_ERROR: Any = typer.BadParameter.__base__
"""Error of the parser of the command line, Click's or Typer's own copy of it."""
HERE = {
    "--samples": "--n 4 --sample 1.0",
    "--pass-at": "--n 4 --sample 1.0",
    "--temperature": "--sample 1.0",
    "diff": "`vlmrl compare RUN RUN`",
    "plot": "`vlmrl report RUN`",
}
"""Option or command of other tools -> what a user types here; an option only in commands that have all of these."""
_UNKNOWN = re.compile(r"No such (?:option: (?P<option>\S+)|command '(?P<command>.+)')|\((?P<setting>[\w.]+=\S*)\)$")


def _hint_on(error: Any, groups: Mapping[str, Any]) -> str:
    """Return what to type in place of an option, command or word that does not exist; "" if it is not known.

    Args:
        error: a USAGE_ERROR.
        groups: name -> command or group at the top.
    """
    match, context = _UNKNOWN.search(error.message), error.ctx
    if match is None or context is None:
        return ""
    options = {option for parameter in context.command.params for option in parameter.opts}
    if match["setting"]:
        return "a key of the recipe is set with --set KEY=VALUE" if "--set" in options else ""
    if option := match["option"]:
        words = HERE.get(option, "")
        return words if options.issuperset(word for word in words.split() if word.startswith("--")) else ""
    name = match["command"]
    inner = [f"`vlmrl {group} {name}`" for group, each in groups.items() if name in getattr(each, "commands", ())]
    whole = [f"`vlmrl {name}`"] if name in groups else []
    return HERE.get(name) or " or ".join(whole or inner)


class InLifeOrder(TyperGroup):
    """Group of all commands, listed in the order in which a project uses them."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        order = [name.rstrip("_").replace("_", "-") for name in COMMANDS]
        return sorted(super().list_commands(ctx), key=order.index)  # pyright: ignore[reportArgumentType]

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Store the words that the user typed in `ctx.obj`, because parsing removes them from `args`."""
        return super().make_context(info_name, args, parent, **extra | {"obj": tuple(args)})

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        """Run the command. If it is interrupted, print one line and exit with code 130; Typer would print nothing."""
        try:
            return super().invoke(ctx)
        except USAGE_ERROR as error:
            if hint := _hint_on(error, self.commands):
                error.message += f"\n\nhint: {hint}"
                error.possibilities = None  # of an option: similar names, which mean something else
            raise
        except KeyboardInterrupt as error:
            from vlmrl.dist.world import launched

            if launched():  # in a rank, the launcher prints the line
                raise
            if line := describe_interruption(error, ctx.invoked_subcommand or "vlmrl", ctx.obj):
                say(line)
            raise typer.Exit(130) from None


app = typer.Typer(
    name="vlmrl",
    cls=InLifeOrder,
    help="Reinforcement learning of vision-language models: from a dataset to a model, with a record you can trust.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", help="Print the version and exit.", is_eager=True)) -> None:
    if version:
        print(__version__)
        raise typer.Exit


for _name in COMMANDS:
    if _name not in ("fetch", "sft"):  # of the modules `launch` and `train`
        importlib.import_module(f"vlmrl.cli.{_name}").register(app)


def main() -> None:
    """Run the command line.

    Exit codes: 0 done, 2 a user's mistake, 1 a bug in vlmrl, 130 interrupted (Ctrl-C, SIGTERM), 141 stdout is closed.
    """
    # Let idle OpenMP threads spin for only about 50 us (GNU's default: milliseconds). If other programs run on the
    # machine, spinning threads of small operators take CPU time from each other: measured 20 times slower on 2 busy
    # cores. Without any spinning, an idle machine is a fifth slower. torch reads the variable when it is imported.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    keep_standard_streams()
    end_on_sigterm()
    if "VLMRL_LAUNCH_DIR" in os.environ:
        from vlmrl.dist import world

        world.run(partial(app, sys.argv[1:]))
    try:
        try:
            app(sys.argv[1:], standalone_mode=True)
        finally:
            sys.stdout.flush()  # so that a failed write is reported here, not when the interpreter exits
    except (Exception, KeyboardInterrupt) as error:
        code, text = exit_of(error)
        print_error(text)
        sys.exit(code)


def command() -> NoReturn:
    """Run the command line as the only work of this process, and end it with the exit code of `main`."""
    code = 0
    try:
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    # A library that has just lacked memory may crash (SIGSEGV) while the interpreter is torn down.
    leave(code)
