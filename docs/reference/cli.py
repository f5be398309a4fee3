"""Write the page of all commands from their help: `python docs/reference/cli.py`"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

PAGE = Path(__file__).with_suffix(".md")


def page() -> str:
    from oneflare.cli.main import app

    lines = ["# Command line", "", "Made from the commands' own help; `oneflare COMMAND --help` prints the same.", ""]
    lines += [" ".join(str(app.info.epilog).split()), ""]
    lines += [
        "Before any command: `--plugin MODULE` imports parts of your own, `--version`. Before or after it: `--quiet` "
        "(no progress, no remarks), `--verbose` (where an error was raised). `oneflare --install-completion` lets the "
        "shell complete commands, options and the names of methods, fusions, data sets and studies.",
        "",
    ]
    root = typer.main.get_command(app)
    lines += _commands(root, "oneflare")
    return "\n".join(lines).rstrip() + "\n"


def _commands(group: Any, prefix: str) -> list[str]:
    lines: list[str] = []
    for name, command in sorted(group.commands.items()):
        full = f"{prefix} {name}"
        if hasattr(command, "commands"):
            lines += _commands(command, full)
            continue
        text = (command.help or "").replace("[bold]", "**").replace("[/bold]", "**")
        head, *rest = text.split("**Example")
        lines += [f"## `{full}`", "", " ".join(head.split()), ""]
        if rest:
            examples = rest[0].partition("**")[2]
            lines += ["```bash", *(line.strip() for line in examples.splitlines() if line.strip()), "```", ""]
        rows = [
            f"| {_words(p)} | {' '.join((getattr(p, 'help', '') or '').split()).replace('|', chr(92) + '|')} |"
            for p in command.params
            if p.name not in ("help", "verbose")
        ]
        lines += ["| | |", "|---|---|", *rows, ""] if rows else []
    return lines


def _words(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{(parameter.metavar or parameter.name.upper())}`".replace("|", "\\|")
    return ", ".join(f"`{option}`" for option in parameter.opts)


if __name__ == "__main__":
    PAGE.write_text(page())
