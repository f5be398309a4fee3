"""`oneflare`: the entry point, the handling of errors and the list of commands."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import Annotated

import click
import typer

from oneflare._version import __version__
from oneflare.cli import (
    client,
    commands,
    doctor,
    evaluating,
    flower,
    fusing,
    keys,
    laboratory,
    manners,
    masked,
    models,
    paper,
    parts,
    rehearsing,
    reporting,
    study,
    thresholds,
    trust,
    versions,
)
from oneflare.core.frames import own_lines
from oneflare.core.plain import plain
from oneflare.core.plugins import name_plugins
from oneflare.core.stopping import what_is_kept
from oneflare.errors import OneFlareError

SERVER = (
    *("init", "admit", "roster", "missing", "fuse", "scores", "thresholds", "versions", "rollback"),
    *("log", "rotate", "revoke"),
)
CLIENT = ("keygen", "rehearse", "join", "train", "release", "budget", "rotate")
"""commands of a federation in the order in which they are used, as --help lists them"""
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143

app = typer.Typer(
    name="oneflare",
    help="One-shot federated learning: organisations train alone, upload one file once, and share one classifier.",
    epilog="Exit codes: 0 done, 1 a check was missed or work failed, 2 something you can put right, 130 interrupted, "
    "143 terminated. Every command has examples: oneflare COMMAND --help.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"oneflare {__version__}")
        raise typer.Exit


manners.keep_argument_help()


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    plugin: Annotated[
        list[str] | None,
        typer.Option(
            "--plugin",
            metavar="MODULE",
            help="Import a module or file, such as rule.py, with parts of your own; may be repeated.",
        ),
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print no progress and no remarks. May also follow the command.")
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", "-v", help="Show where in the code an error was raised. May also follow the command."
        ),
    ] = False,
) -> None:
    del version
    if quiet:
        manners.set_quiet()
    if verbose:
        manners.set_verbose()
    name_plugins(plugin or [])


app.command("run", rich_help_panel="Work")(commands.run)
app.command("compare", rich_help_panel="Work")(commands.compare)
app.command("fuse", rich_help_panel="Work")(fusing.fuse)
app.command("study", rich_help_panel="Work")(study.study)
app.command("bench", rich_help_panel="Work")(commands.bench)
app.command("attacks", rich_help_panel="Work")(trust.attacks)
app.command("report", rich_help_panel="Look")(reporting.report)
app.command("paper", rich_help_panel="Look")(paper.paper)
app.command("audit", rich_help_panel="Look")(trust.audit)
app.command("methods", rich_help_panel="Look")(parts.methods)
app.command("doctor", rich_help_panel="Look")(doctor.doctor)
app.command("explain", rich_help_panel="Look")(laboratory.explain)
app.command("schedule", rich_help_panel="Look")(laboratory.schedule)
app.command("lambda", rich_help_panel="Look")(laboratory.lambda_picture)
app.command("evaluate", rich_help_panel="Use a model")(evaluating.evaluate)
app.command("predict", rich_help_panel="Use a model")(models.predict)
app.command("serve", rich_help_panel="Use a model")(models.serve)
app.command("export", rich_help_panel="Use a model")(models.export)
keys.server.command("roster")(masked.roster)
keys.server.command("missing")(masked.missing)
keys.server.command("scores")(versions.scores)
keys.server.command("thresholds")(thresholds.thresholds)
keys.server.command("versions")(versions.versions)
keys.server.command("rollback")(versions.rollback)
keys.client.command("rehearse")(rehearsing.rehearse)
keys.client.command("join")(masked.join)
keys.client.command("release")(masked.release)
manners.in_order(keys.server, SERVER)
manners.in_order(keys.client, CLIENT)
app.add_typer(keys.server, name="server", rich_help_panel="Federate")
app.add_typer(keys.client, name="client", rich_help_panel="Federate")
app.add_typer(client.upload, name="upload", rich_help_panel="Federate")
app.add_typer(flower.flower, name="flower", rich_help_panel="Federate")
manners.apply(app)


class Terminated(BaseException):
    """SIGTERM, as an exception, so that locks and workers are released."""


def _terminate(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise Terminated


def main() -> None:
    """Run a command; a user's error is one line and exit code 2, an interruption says how to go on."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        code = app(prog_name="oneflare", standalone_mode=False)
        sys.stdout.flush()
        if code == EXIT_INTERRUPTED:
            raise KeyboardInterrupt
        sys.exit(code if isinstance(code, int) else 0)
    except click.exceptions.NoArgsIsHelpError as help_page:
        help_page.show()
        sys.exit(EXIT_USER_ERROR)
    except click.ClickException as error:
        _complain(manners.usage_line(error), error.exit_code)
    except OneFlareError as error:
        _complain(str(error), error.exit_code)
    except (KeyboardInterrupt, click.Abort, Terminated) as stop:
        kept = what_is_kept()
        print(f"stopped; {kept}" if kept else "stopped", file=sys.stderr)
        sys.exit(EXIT_TERMINATED if isinstance(stop, Terminated) else EXIT_INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        place = "" if error.filename is None else f"{error.filename}: "
        _complain(f"{place}{error.strerror or error}", EXIT_USER_ERROR)
    except Exception as error:
        lines = own_lines(error)
        if not lines:
            raise
        name = type(error).__name__
        text = f"{error}" if str(error).startswith(f"{name}: ") else f"{name}: {error}"
        _complain(f"your own code failed with {text}", EXIT_USER_ERROR, lines)


def _complain(text: str, code: int, places: Sequence[str] = ()) -> None:
    """One line that says what is wrong; places: lines of the user's own code where it went wrong."""
    if manners.is_verbose():
        traceback.print_exc()
    for line in (f"error: {plain(text)}", *(f"  {plain(place)}" for place in places)):
        print(line, file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
