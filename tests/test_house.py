"""How the source is kept: functions with few parameters, files that fit in one's head."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import typer

import oneflare

SOURCE = Path(oneflare.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
PARAMETERS = 7
LINES = 400


def commands(app: typer.Typer) -> Iterator[tuple[str, str]]:
    """Module and name of every command: their parameters are the options that users read in --help."""
    for command in app.registered_commands:
        assert command.callback is not None
        yield command.callback.__module__, command.callback.__name__
    for group in app.registered_groups:
        assert group.typer_instance is not None
        yield from commands(group.typer_instance)


def functions(tree: ast.AST) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, bool]]:
    """Every function in a file, and whether it is a method."""
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield child, isinstance(node, ast.ClassDef)


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef, method: bool) -> int:
    """How many parameters a caller may give; the object or class that a method belongs to is none."""
    names = function.args
    static = any(isinstance(word, ast.Name) and word.id == "staticmethod" for word in function.decorator_list)
    listed = [*names.posonlyargs, *names.args, *names.kwonlyargs, names.vararg, names.kwarg]
    return sum(name is not None for name in listed) - (method and not static)


def module(path: Path) -> str:
    return ".".join(("oneflare", *path.relative_to(SOURCE).with_suffix("").parts))


def test_the_counting_is_right():
    source = "class A:\n def a(self, b, /, c, *d, e, **f): ...\n @staticmethod\n def g(h): ...\ndef i(j): ...\n"
    assert [parameters(*found) for found in functions(ast.parse(source))] == [1, 5, 1]


def test_no_function_takes_more_than_seven_parameters():
    from oneflare.cli.main import app

    exempt = set(commands(app))
    assert len(exempt) > 20
    found = [
        f"{path.relative_to(SOURCE)}:{function.lineno} {function.name} takes {count}"
        for path in FILES
        for function, method in functions(ast.parse(path.read_text()))
        if (count := parameters(function, method)) > PARAMETERS and (module(path), function.name) not in exempt
    ]
    assert not found, found


def test_no_file_is_longer_than_400_lines():
    found = {str(path.relative_to(SOURCE)): len(path.read_text().splitlines()) for path in FILES}
    assert not {name: lines for name, lines in found.items() if lines > LINES}
