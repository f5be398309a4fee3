"""`oneflare`: entry point, error handling and the list of commands."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from types import FrameType
from typing import Annotated

import typer

from oneflare._version import __version__
from oneflare.cli import commands, doctor, federation, flower, fusing, laboratory, models, reporting, study, trust
from oneflare.errors import OneFlareError
from oneflare.plugins import name_plugins

VERBOSE = "ONEFLARE_VERBOSE"
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143

app = typer.Typer(
    name="oneflare",
    help="One-shot federated learning: organisations train alone, upload one file once, and share one classifier.",
    epilog="Exit codes: 0 done, 1 a target or a check was missed or something unforeseen happened, 2 something you can "
    "put right, 130 interrupted, 143 terminated. Every command has examples: oneflare COMMAND --help.",
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


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    plugin: Annotated[
        list[str] | None,
        typer.Option("--plugin", metavar="MODULE", help="Import a module with parts of your own; repeat for several."),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Where an error stops the work, show where it was raised.")
    ] = False,
) -> None:
    del version
    if verbose:
        os.environ[VERBOSE] = "1"
    name_plugins(plugin or [])


app.command("run", rich_help_panel="Work")(commands.run)
app.command("compare", rich_help_panel="Work")(commands.compare)
app.command("fuse", rich_help_panel="Work")(fusing.fuse)
app.command("study", rich_help_panel="Work")(study.study)
app.command("bench", rich_help_panel="Work")(commands.bench)
app.command("attacks", rich_help_panel="Work")(trust.attacks)
app.command("audit", rich_help_panel="Look")(trust.audit)
app.command("report", rich_help_panel="Look")(reporting.report)
app.command("methods", rich_help_panel="Look")(commands.methods)
app.command("doctor", rich_help_panel="Look")(doctor.doctor)
app.command("explain", rich_help_panel="Look")(laboratory.explain)
app.command("schedule", rich_help_panel="Look")(laboratory.schedule)
app.command("lambda", rich_help_panel="Look")(laboratory.lambda_picture)
app.command("predict", rich_help_panel="Use a model")(models.predict)
app.command("evaluate", rich_help_panel="Use a model")(models.evaluate)
app.command("export", rich_help_panel="Use a model")(models.export)
app.command("serve", rich_help_panel="Use a model")(models.serve)
app.add_typer(federation.server, name="server", rich_help_panel="Federate")
app.add_typer(federation.client, name="client", rich_help_panel="Federate")
app.add_typer(federation.upload, name="upload", rich_help_panel="Federate")
app.add_typer(flower.flower, name="flower", rich_help_panel="Federate")


class Terminated(BaseException):
    """SIGTERM, as an exception, so that locks and workers are released."""


def _terminate(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise Terminated


def main() -> None:
    """Run a command; a user's error is one line and exit code 2, an interruption says how to go on."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        app()
    except OneFlareError as error:
        if os.environ.get(VERBOSE):
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
    except (KeyboardInterrupt, Terminated) as stop:
        print("stopped; run the same command again to go on from the last checkpoint", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED if isinstance(stop, KeyboardInterrupt) else EXIT_TERMINATED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        if error.filename is None:
            raise
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)


if __name__ == "__main__":
    main()
