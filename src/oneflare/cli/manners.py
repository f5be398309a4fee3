"""What all commands share: --quiet and --verbose, arguments with their help, usage errors as one line."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

import click
import typer
from typer.core import TyperArgument, TyperCommand, TyperOption

VERBOSE = "ONEFLARE_VERBOSE"
"""a variable, so that worker processes see it"""
COMMON = {
    "quiet": (["--quiet", "-q"], "Print no progress and no remarks, only the results."),
    "verbose": (["--verbose", "-v"], "Show where in the code an error was raised."),
}

_quiet = False


def set_quiet() -> None:
    global _quiet
    _quiet = True


def is_quiet() -> bool:
    return _quiet


def set_verbose() -> None:
    os.environ[VERBOSE] = "1"


def is_verbose() -> bool:
    return bool(os.environ.get(VERBOSE))


class Command(TyperCommand):
    """A command that also takes the common options; a `quiet` of its own follows the one before the command."""

    def __init__(self, *args: Any, params: list[click.Parameter] | None = None, **options: Any) -> None:
        given = list(params or [])
        known = {parameter.name for parameter in given}
        for name, (flags, text) in COMMON.items():
            if name not in known:
                given.append(_option(name, flags, text))
        super().__init__(*args, params=given, **options)

    def invoke(self, ctx: click.Context) -> Any:
        if "quiet" in ctx.params:
            ctx.params["quiet"] = ctx.params["quiet"] or is_quiet()
        return super().invoke(ctx)


def _option(name: str, flags: list[str], text: str) -> TyperOption:
    def chosen(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
        del ctx, parameter
        if value:
            (set_quiet if name == "quiet" else set_verbose)()

    return TyperOption(
        param_decls=[name, *flags], is_flag=True, default=False, expose_value=False, callback=chosen, help=text
    )


def apply(app: typer.Typer) -> None:
    """Give the common options to every command of an app and of the groups in it."""
    for command in app.registered_commands:
        command.cls = Command
    for group in app.registered_groups:
        if group.typer_instance is not None:
            apply(group.typer_instance)


def in_order(group: typer.Typer, names: Sequence[str]) -> None:
    """List the commands of a group in this order; each must be named."""
    group.registered_commands.sort(key=lambda command: names.index(str(command.name)))


def keep_argument_help() -> None:
    """click 8.5 has a `help` of its own for arguments and clears the one that typer has set before."""
    original = TyperArgument.__init__

    def keep(self: TyperArgument, *args: Any, help: str | None = None, **options: Any) -> None:
        original(self, *args, help=help, **options)
        self.help = help

    TyperArgument.__init__ = keep  # type: ignore[method-assign]


def usage_line(error: click.ClickException) -> str:
    """What, where, remedy: a misspelt option or command as one line."""
    text = " ".join(error.format_message().split())
    text = re.sub(r"(Did you mean [^?]*\?)(?: \1)+", r"\1", text)
    context = getattr(error, "ctx", None)
    place = context.command_path if context is not None else "oneflare"
    return f"{text[:1].lower() + text[1:].rstrip('.')} (see {place} --help)"
