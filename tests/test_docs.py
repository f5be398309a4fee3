"""The documentation says what is so: the page of commands, and the script that runs its code blocks."""

from __future__ import annotations

import ast
import importlib.util
import pkgutil
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

ROOT = Path(__file__).resolve().parent.parent


def module(path: str):
    spec = importlib.util.spec_from_file_location(Path(path).stem + "_page", ROOT / path)
    found = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = found
    spec.loader.exec_module(found)
    return found


def test_the_page_of_commands_is_made_from_their_help():
    page = module("docs/reference/cli.py").page()
    kept = (ROOT / "docs" / "reference" / "cli.md").read_text()
    assert kept == page, "run: python docs/reference/cli.py"


@pytest.mark.parametrize(
    ("expected", "printed", "same"),
    [
        ("a 63.2 *", "a  71.9 *", True),
        ("a\n...\nz", "a\nb\nc\nz", True),
        ("a\n...\nz", "a\nb\nc", False),
        ("a\n...\nz", "a\nz", True),
        ("key ...: kept", "key x y: kept", True),
        ("key ...: kept", "key x\ny: kept", False),
        ("...", "", True),
        ("3 clients", "4 clients", False),
        ("│ fafi   │       63.2 * │", "│ fafi │ 8.1 * │", True),
    ],
)
def test_figures_may_differ_and_words_may_not(expected, printed, same):
    assert module("docs/run_blocks.py").agrees(expected, printed) is same


def test_a_page_that_lies_is_told(tmp_path):
    runner = module("docs/run_blocks.py")
    page = tmp_path / "page.md"
    page.write_text('```python title="a.py"\nprint("hello")\n```\n\n```console\n$ python a.py\nhello\n```\n')
    assert runner.run_page(page) == []
    page.write_text("```console\n$ echo one\ntwo\n```\n\n```python\nprint(1 + 1)\n#> 3\n```\n")
    complaints = runner.run_page(page)
    assert len(complaints) == 2
    assert "page.md:1" in complaints[0]


def test_the_pages_name_every_command():
    from oneflare.cli.main import app

    text = (ROOT / "docs" / "reference" / "cli.md").read_text()
    for command in app.registered_commands:
        assert f"## `oneflare {command.name}`" in text


def commands(text: str) -> list[list[str]]:
    """The words after `oneflare` of every such command in a shell script."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        for piece in re.split(r"&&|\|\||\||;|>|\(|\)| #.*| & *$", line):
            if piece.strip().startswith("oneflare "):
                found.append(shlex.split(piece)[1:])
    return found


def typed(block: Any) -> str:
    """What a reader of a block types into a shell."""
    if block.kind == "console":
        return "\n".join(re.findall(r"^\$ ((?:.*\\\n)*.*)", block.text, re.MULTILINE))
    return str(block.text) if block.kind == "bash" else ""


def complaint(words: list[str], command: Any) -> str | None:
    """What is wrong with a command's name or options."""
    given = list(words)
    while hasattr(command, "commands"):
        while given and given[0].startswith("-"):
            option = given.pop(0)
            if not any(option in parameter.opts for parameter in command.params):
                return f"no option {option}"
            if option == "--plugin":
                given.pop(0)
        if not given:
            return None
        name = given.pop(0)
        if name not in command.commands:
            return f"no command {name}"
        command = command.commands[name]
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    wrong = [word for word in given if re.match(r"--?[a-z]", word) and word.partition("=")[0] not in known]
    return f"no option {wrong[0]}" if wrong else None


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("(cd $name && oneflare client keygen --name $name)", None),
        ("oneflare client keygen --nam north", "no option --nam"),
        ("oneflare server fussion x | tee log", "no command fussion"),
        ("oneflare --plugin rule run method=ratio --out x > y", None),
    ],
)
def test_commands_are_found_and_compared_with_their_help(line, wrong):
    from oneflare.cli.main import app

    (words,) = commands(line)
    assert complaint(words, typer.main.get_command(app)) == wrong


def test_all_commands_of_the_pages_exist_with_their_options():
    """The pages themselves are run by `make examples` in minutes; this is what is seen at once."""
    from oneflare.cli.main import app

    runner, root, seen = module("docs/run_blocks.py"), typer.main.get_command(app), 0
    for page in [*PAGES, ROOT / "README.md"]:
        for block in runner.blocks(page):
            for words in commands(typed(block)):
                wrong = complaint(words, root)
                assert wrong is None, f"{page}:{block.line}: oneflare {' '.join(words)}: {wrong}"
                seen += 1
    assert seen > 150


PAGES = sorted((ROOT / "docs").rglob("*.md"))
PICTURE = re.compile(r"!\[[^\]]+\]\(([^)]+\.svg)\)")
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def test_an_output_block_is_compared_with_what_the_block_above_prints(tmp_path):
    runner = module("docs/run_blocks.py")
    page = tmp_path / "page.md"
    machine = '```bash title="north"\necho here > file\nls\n```\n\n```output\nfile\n```\n'
    page.write_text(machine + "\n```bash\nls north\n```\n\n```output\nfi...\n```\n")
    assert runner.run_page(page) == []
    page.write_text(machine.replace("```output\nfile", "```output\nfiles"))
    assert "page.md:1" in runner.run_page(page)[0]
    page.write_text("```bash\nfalse\necho on\n```\n\n```output\n...\n```\n")
    assert "ended with 1" in runner.run_page(page)[0]
    page.write_text("```bash\necho seen\n```\n\nwords between\n\n```output\nseen\n```\n")
    with pytest.raises(SystemExit, match=r"page\.md:7"):
        runner.run_page(page)


def test_what_a_python_block_prints_is_compared_in_both_spellings(tmp_path):
    runner = module("docs/run_blocks.py")
    page = tmp_path / "page.md"
    for mark in ("#>", "# >"):
        page.write_text(f"```python\nprint(1 + 1)\n{mark} 2\n```\n")
        assert runner.run_page(page) == []
        page.write_text(f"```python\nprint(1 + 1)\n{mark} 3\n```\n")
        assert len(runner.run_page(page)) == 1


def test_a_command_in_the_background_ends_with_its_page(tmp_path):
    runner = module("docs/run_blocks.py")
    page = tmp_path / "page.md"
    mark = tmp_path / "ended"
    page.write_text(
        f"```bash\nbash -c 'trap \"touch {mark}; exit\" TERM; echo up; while :; do sleep 0.1; done' &\n```\n\n"
        "```output\nup\n```\n\n```console\n$ echo meanwhile\nmeanwhile\n```\n"
    )
    assert runner.run_page(page) == []
    assert mark.exists()


def test_empty_output_blocks_can_be_filled(tmp_path):
    runner = module("docs/run_blocks.py")
    page = tmp_path / "page.md"
    page.write_text(
        "```bash\necho one\n```\n\n```output\n```\n\nwords\n\n```bash\necho two\n```\n\n```output\n...\n```\n"
    )
    printed: dict[int, str] = {}
    runner.run_page(page, printed)
    runner.fill(page, printed)
    assert "```output\none\n```" in page.read_text()
    assert "```output\n...\n```" in page.read_text()
    assert runner.run_page(page) == []


def test_every_picture_is_there_shown_and_still_what_its_script_draws(tmp_path):
    pictures = module("docs/pictures.py")
    pictures.main(tmp_path)
    names = {f"{name}.svg" for name in pictures.PICTURES}
    folder = ROOT / "docs" / "pictures"
    assert {path.name for path in folder.iterdir()} == names
    shown = {(page.parent / target).resolve() for page in PAGES for target in PICTURE.findall(page.read_text())}
    assert {path for path in shown if path.parent == folder} == {folder / name for name in names}
    assert all(path.exists() for path in shown)  # measured curves and screenshots are made by other commands
    assert "(docs/pictures/one-shot.svg)" in (ROOT / "README.md").read_text()
    for name in names:
        kept, drawn = (folder / name).read_text(), (tmp_path / name).read_text()
        assert NUMBER.sub("#", kept) == NUMBER.sub("#", drawn), f"{name} is old: make pictures"
        pairs = zip(NUMBER.findall(kept), NUMBER.findall(drawn), strict=True)
        assert all(abs(float(a) - float(b)) <= 0.25 for a, b in pairs), f"{name} is old: make pictures"


def test_the_switches_in_the_picture_of_privacy_exist():
    from oneflare.core.layers import parse_overrides
    from oneflare.methods.resolve import resolve

    values = {"NAMES": "moments", "E": "1", "exact | noised | withheld": "noised"}
    switches = re.findall(
        r"((?:upload|train)\.\w+|analytic)=([^<:]+)", (ROOT / "docs/pictures/privacy.svg").read_text()
    )
    assert len(switches) >= 5
    for key, value in switches:
        settings = [f"{key}={values.get(value, value)}"]
        if key == "upload.counts":
            settings.append("fusions=count_prototypes")
        if key == "upload.statistics_epsilon":
            settings += ["method=analytic", "upload.counts=withheld"]
        resolve(parse_overrides(settings))


def test_the_glossary_has_every_version_number_and_method():
    text = (ROOT / "docs" / "glossary.md").read_text()
    assert module("docs/versions.py").page(text) == text, "run: python docs/versions.py"
    from oneflare.methods import METHODS

    for method in METHODS.values():
        assert f"| `{method.name}` |" in text
        for number in method.numbers:
            assert re.search(rf"^\| {re.escape(number)} \| `{method.name}` \|", text, re.MULTILINE)


def test_the_map_has_every_room_and_module():
    text = (ROOT / "docs" / "map.md").read_text()
    assert module("docs/rooms.py").page(text) == text, "run: python docs/rooms.py"
    for path in (ROOT / "src" / "oneflare").rglob("*.py"):
        said = ast.get_docstring(ast.parse(path.read_text())) or ""
        first, _, rest = said.partition("\n")
        assert first.endswith("."), f"{path}: no first line that is a sentence"
        assert not rest or rest.startswith("\n"), f"{path}: what is in it needs more than one line"
        assert f"| {first} |" in text, f"{path} is not on the map"


def templates() -> list[str]:
    """Every string of the source, with a mark where a value is filled in."""
    found = []
    for path in (ROOT / "src" / "oneflare").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(v.value) if isinstance(v, ast.Constant) else "\0" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"\{\w+\}", "\0", node.value))
    return found


def test_every_message_of_the_troubleshooting_page_is_in_the_source():
    text = (ROOT / "docs" / "howto" / "troubleshooting.md").read_text()
    messages = re.findall(r"^\| `(.+?)` \| .+ \| .+ \|$", text, re.MULTILINE)
    assert len(messages) >= 40
    known = "\n".join(templates())
    for message in messages:
        parts = [re.escape(part) for part in message.split("...")]
        assert re.search(r"[^\n]*".join(parts), known), f"no such message: {message}"


def test_how_to_pages_and_examples_mirror_each_other():
    pages = {path.stem for path in (ROOT / "docs" / "howto").glob("*.md")}
    assert {
        "own-data", "own-encoder", "own-controller", "own-fusion", "air-gapped", "gpu", "resume", "troubleshooting",
    } <= pages  # fmt: skip
    mirrored = {
        "own_arrays.py": "howto/own-data.md",
        "own_encoder.py": "howto/own-encoder.md",
        "own_controller.py": "howto/own-controller.md",
        "own_fusion.py": "howto/own-fusion.md",
        "fuse_folder.py": "concepts/fusion.md",
        "hospitals.py": "federation-by-file.md",
        "hospitals_flower.py": "flower.md",
    }
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == set(mirrored)
    for example, page in mirrored.items():
        assert f"examples/{example}" in (ROOT / "docs" / page).read_text(), f"{page} does not name {example}"


FIGURES = re.compile(r"accuracy \d+\.\d %|│.*\d\.\d")


def test_pages_that_print_figures_say_that_processors_differ():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    printing = [page for page in pages if FIGURES.search(page.read_text())]
    assert {"hospital.md", "researcher.md", "federation-by-file.md", "flower.md"} <= {page.name for page in printing}
    silent = [page.name for page in printing if "differ between processors" not in " ".join(page.read_text().split())]
    assert silent == [], "these pages print figures and do not say that they differ between processors"


def test_every_test_that_the_threat_model_names_exists():
    page = (ROOT / "docs" / "threat-model.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page)
    assert len(named) > 30
    for file, name in named:
        tree = ast.parse((ROOT / file).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, (file, name)
    rows = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| it can")]
    assert [row for row in rows if not re.search(r"\| `tests/[\w/]+\.py::\w+` \|$", row)] == []
    for party in ("A member", "The coordinator", "The network", "A stranger", "A stolen disk"):
        section = page.split(f"\n## {party}\n")[1].split("\n## ")[0]
        assert "What does not stop it:" in section


def test_every_object_of_the_python_reference_is_where_the_page_says():
    """Building the site needs packages of its own, so a name that moved would only be noticed there."""
    places = re.findall(r"^::: (\S+)$", (ROOT / "docs/reference/python.md").read_text(), re.MULTILINE)
    assert places
    for place in places:
        found = pkgutil.resolve_name(place)
        home = getattr(found, "__module__", place)
        assert place.startswith(home), f"{place} is defined in {home}"
