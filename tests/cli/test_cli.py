"""The command line by its real entry point, in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from hospitals import typed
from oneflare.simulation.stages import read_result
from shared import COMMAND, TINY_WORDS, Forked, figures, forked, oneflare, wait_for


def every_command(group=None, words=()):
    import typer

    from oneflare.cli.main import app

    for name, command in (group or typer.main.get_command(app)).commands.items():
        if hasattr(command, "commands"):
            yield from every_command(command, (*words, name))
        else:
            yield (*words, name), command


def test_help_and_version(tmp_path):
    listing = oneflare("--help", cwd=tmp_path)
    assert listing.returncode == 0
    for words, _ in every_command():
        assert words[0] in listing.stdout
    page = oneflare("fuse", "--help", cwd=tmp_path)
    assert page.returncode == 0
    assert "oneflare fuse runs/demo --all" in page.stdout
    assert "Folders of finished runs, or a comparison" in page.stdout
    assert oneflare("--version", cwd=tmp_path).stdout.startswith("oneflare 0.")


def test_every_command_has_examples_that_parse_help_for_arguments_and_the_common_options():
    import shlex

    for words, command in every_command():
        lines = [line.strip() for line in (command.help or "").splitlines()]
        examples = [line for line in lines if line.startswith(("oneflare " + " ".join(words) + " ",))]
        examples += [line for line in lines if line == "oneflare " + " ".join(words)]
        assert examples, words
        for example in examples:
            given = shlex.split(example.split(" > ")[0], comments=True)[1 + len(words) :]
            command.make_context(words[-1], given)  # raises where an option or argument is not right
        for parameter in command.params:
            assert parameter.help, (words, parameter.name)
        flags = {flag for parameter in command.params for flag in parameter.opts}
        assert {"--quiet", "-q", "--verbose", "-v"} <= flags, words


def test_starting_imports_nothing_heavy(tmp_path):
    code = (
        "import sys, oneflare.cli.main; "
        "heavy = {'torch', 'numpy', 'sklearn', 'matplotlib', 'pyarrow', 'scipy', 'pandas', 'datasets', 'PIL'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert outcome.stdout.strip() == "[]"


def test_training_does_not_load_the_compiler(tmp_path):
    """torch's optimisers import it: two seconds of every start."""
    words = [*TINY_WORDS, "epochs=1", "workers=1"]
    code = (
        f"import sys, oneflare; oneflare.run(*{words}, out='run'); "
        "heavy = {'torch._dynamo', 'sklearn', 'scipy', 'sympy', 'pyarrow', 'matplotlib', 'datasets'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    outcome = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert outcome.stdout.strip() == "[]", outcome.stderr


def test_listing_methods_does_not_load_torch(tmp_path):
    code = "import sys; from oneflare.cli import parts; parts.methods(); assert 'torch' not in sys.modules"
    outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stderr
    for name in ("fedavg", "ensemble", "fafi", "drcl", "etf_annealed", "flare", "V14", "V7"):
        assert name in outcome.stdout


def test_run_json_is_one_object_and_nothing_else(tmp_path, here):
    outcome = oneflare("run", *TINY_WORDS, "method=flare", "--json", cwd=tmp_path)
    assert outcome.returncode == 0, outcome.stderr
    content = json.loads(outcome.stdout)
    assert content["method"] == "flare"
    assert len(content["clients"]) == 3
    (folder,) = (tmp_path / "runs").iterdir()
    assert content == json.loads((folder / "result.json").read_text())

    again = here("run", *TINY_WORDS, "method=flare", cwd=tmp_path)
    assert "complete, nothing to do" in again.stdout
    assert list((tmp_path / "runs").iterdir()) == [folder]

    fused = here("fuse", str(folder), "--fusion", "iffi_released", "--json", cwd=tmp_path)
    assert "iffi_released" in json.loads(fused.stdout)["fusions"]

    page = here("report", str(folder), cwd=tmp_path)
    assert page.returncode == 0
    assert (folder / "report.html").exists()


def test_run_prints_tables_and_says_where_the_files_are(tmp_path):
    outcome = forked("run", *TINY_WORDS, "--out", "here", cwd=tmp_path)
    assert outcome.returncode == 0, outcome.stderr
    assert "samples per client and class" in outcome.stderr
    assert "density_ratio *" in outcome.stdout
    assert "files: here" in outcome.stdout
    assert (tmp_path / "here" / "result.json").exists()


def test_yaml_file_and_overrides(tmp_path):
    (tmp_path / "e.yaml").write_text("method: fafi\nalpha: 0.5\ntrain: {epochs: 3}\n")
    outcome = forked("run", "--config", "e.yaml", *TINY_WORDS, "--json", cwd=tmp_path)
    content = json.loads(outcome.stdout)
    assert (content["method"], content["epochs"], content["partition"]["alpha"]) == ("fafi", 2, 0.3)


def test_a_narrow_terminal_loses_no_name_and_no_figure():
    import io

    from rich.console import Console
    from rich.table import Table

    from oneflare.cli.show import fitted

    table = Table()
    for name in ("fusion", "accuracy %", "balanced %", "worst class %", "calibration error %", "passes", "parameters"):
        table.add_column(name)
    table.add_row("density_ratio *", "11.1", "11.2", "0.0", "12.4", "2", "154,850")
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    console.print(fitted(console, table))
    shown = console.file.getvalue()
    assert "…" not in shown
    assert "density_ratio *" in shown
    assert "154,850" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_compare_pairs_methods_over_seeds(tmp_path, here):
    outcome = forked("compare", "fedavg", "fafi", *TINY_WORDS, "--seeds", "2", "--out", "c", "--json", cwd=tmp_path)
    assert outcome.returncode == 0, outcome.stderr
    content = json.loads(outcome.stdout)
    first, second = (content["accuracy"][name]["feature_mean"] for name in ("fedavg", "fafi"))
    gaps = [b - a for a, b in zip(first["accuracies"], second["accuracies"], strict=True)]
    assert second["paired_difference"] == pytest.approx(sum(gaps) / 2)
    runs = [read_result(tmp_path / run) for runs in content["runs"].values() for run in runs]
    assert runs[0].content.partition.digest == runs[2].content.partition.digest
    assert runs[0].content.partition.table == runs[2].content.partition.table
    shown = here("compare", "fedavg", "fafi", *TINY_WORDS, "--seeds", "2", "--out", "c", cwd=tmp_path)
    assert "paired difference to fedavg" in shown.stdout
    assert "report: c/report.html" in shown.stdout
    assert (tmp_path / "c" / "report.html").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "alpah=1"], "did you mean 'alpha'"),
        (["run", "method=falre"], "did you mean 'flare'"),
        (["run", "data=cifar10", "data.path=/nowhere"], "no train-*.parquet in /nowhere"),
        (["run", "--config", "missing.yaml"], "cannot read missing.yaml"),
        (["fuse", "nowhere", "--fusion", "iffi"], "is not a run folder"),
        (["report", "nowhere"], "nothing at nowhere"),
        (["compare", "fafi", "flaer"], "did you mean 'flare'"),
        (["compare", "fafi", "seed=3"], "seed= is what compare varies"),
        (["compare", "alpha=3"], "name at least one method"),
        (["run", "clients=5000"], "use fewer clients"),
        (["explain", "falre"], "did you mean 'flare'"),
        (["schedule", "cosin"], "did you mean 'cosine'"),
        (["schedule", "cosine", "warmup=2"], "warmup"),
        (["schedule", "cosine", "--out", "curve.txt"], "ends in .png, .pdf, .svg"),
        (["lambda", "nowhere"], "is not a run folder"),
        (["study", "lamda"], "did you mean 'lambda'"),
        (["rnu"], "no such command 'rnu'. Did you mean 'run'? (see oneflare --help)"),
        (["run", "--jsn"], "(see oneflare run --help)"),
        (["compare", "fafi", "--seeds", "0"], "not in the range"),
        (["server", "admit"], "missing argument 'FEDERATION'"),
        (["study", "junk.yaml"], "junk.yaml is not valid YAML"),
        (["run", "--config", "junk.yaml"], "junk.yaml is not valid YAML"),
        (["explain", "robust_prototype"], "did you mean 'robust_prototypes'?"),
        (["server", "init", "new", "--classes", "junk.yaml"], "is not a text file with one name per line"),
        (["predict", "junk.yaml", "x.png"], "is not a OneFlare model, or is damaged"),
        (["compare", "fafi", "--out", "a-run"], "is the folder of one run"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(words, message, tmp_path, here):
    (tmp_path / "junk.yaml").write_bytes(bytes(range(128, 256)))
    (tmp_path / "a-run").mkdir()
    (tmp_path / "a-run" / "experiment.yaml").touch()
    outcome = here(*words, cwd=tmp_path)
    assert outcome.returncode == 2
    assert outcome.stdout == ""
    *before, line = outcome.stderr.splitlines()
    assert before in ([], ["reading data"])
    assert line.startswith("error: ")
    assert message in line


def test_a_mistake_ends_the_process_with_one_line_and_exit_code_2(tmp_path):
    outcome = oneflare("server", "admit", cwd=tmp_path)  # says so before it would import torch
    assert (outcome.returncode, outcome.stdout) == (2, "")
    (line,) = outcome.stderr.splitlines()
    assert line.startswith("error: missing argument 'FEDERATION'")


@pytest.mark.parametrize("words", [["-q", "schedule", "cosine"], ["schedule", "cosine", "--quiet"]])
def test_quiet_before_and_after_the_command(words, tmp_path):
    outcome = forked(*words, cwd=tmp_path)
    assert (outcome.returncode, outcome.stdout, outcome.stderr) == (0, "", "")
    assert (tmp_path / "schedule.png").exists()


def test_verbose_after_the_command(tmp_path):
    assert "Traceback" in forked("run", "alpah=1", "--verbose", cwd=tmp_path).stderr


def test_a_reader_that_goes_away_is_no_error(tmp_path):
    process = subprocess.Popen([*COMMAND, "methods"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path)
    process.stdout.close()
    complaint = process.stderr.read()
    process.stderr.close()
    assert process.wait() in (0, 1)
    assert complaint == b""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("oneflare run method=fl", {"method=flare", "method=flare_analytic", "method=floor"}),
        ("oneflare run method = fl", {"flare", "flare_analytic", "floor"}),
        ("oneflare run data =", {"digits", "digit_sources", "cifar10", "cifar100", "svhn", "tiny-imagenet", "folder"}),
        ("oneflare compare etf", {"etf_annealed"}),
        ("oneflare explain etf", {"etf", "etf_annealed"}),
        ("oneflare fuse runs/demo --fusion iffi", {"iffi", "iffi_released"}),
        ("oneflare study table", {"table1", "table2", "table3"}),
    ],
)
def test_the_shell_completes_names_without_torch(words, expected):
    code = "import sys, atexit; atexit.register(lambda: print('torch' in sys.modules)); "
    code += "from oneflare.cli.main import main; main()"
    asked = {"_ONEFLARE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | asked)
    assert set(outcome.stdout.split()) == expected | {"False"}, outcome.stderr


def test_completed_names_are_those_that_are_registered():
    from oneflare.cli.names import ROOMS, registered
    from oneflare.cli.parts import named_parts

    kinds = {
        "fusion": "FUSIONS", "data set": "SOURCES", "encoder": "ENCODERS", "controller": "CONTROLLERS",
        "backbone": "BACKBONES",
        "feature map": "FEATURE_MAPS", "anchors": "ANCHORS", "partition": "PARTITIONS", "schedule": "SCHEDULES",
        "optimiser": "OPTIMISERS",
    }  # fmt: skip
    assert set(kinds.values()) == set(ROOMS)
    ours = [row for row in named_parts() if row["module"].startswith("oneflare.")]
    for kind, registry in kinds.items():
        assert registered(registry) == tuple(row["name"] for row in ours if row["kind"] == kind)


LONG_WORDS = [*TINY_WORDS, "epochs=25", "train.checkpoint_seconds=0", "--out", "run"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A run that nobody killed; how many workers it had makes no difference."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert forked("run", *LONG_WORDS, "workers=1", cwd=folder).returncode == 0
    return read_result(folder / "run")


@pytest.mark.parametrize("workers", ["1", "2"])
def test_killed_in_the_middle_of_a_client_and_started_again(tmp_path, workers, undisturbed):
    words = ["run", *LONG_WORDS, f"workers={workers}"]
    process = Forked(*words, cwd=tmp_path)
    wait_for(lambda: list(tmp_path.glob("run/clients/*/checkpoint/state.safetensors")))
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "run" / "result.json").exists()
    time.sleep(0.5)
    before = {path: path.read_bytes() for path in tmp_path.glob("run/clients/*/checkpoint/*")}
    time.sleep(0.5)
    assert before == {path: path.read_bytes() for path in before}, "a worker outlived the killed run"
    resumed = forked(*words, cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert figures(read_result(tmp_path / "run")) == figures(undisturbed)
    assert not list((tmp_path / "run").rglob("*.partial"))


def told_how_to_go_on(complaint: str) -> bool:
    return "run the same command again to go on" in complaint and "Traceback" not in complaint


def test_a_signal_stops_a_process_cleanly_and_says_how_to_go_on(tmp_path):
    process = subprocess.Popen(
        [*COMMAND, "run", *LONG_WORDS, "epochs=400"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )
    try:
        wait_for(lambda: list(tmp_path.glob("run/clients/*/checkpoint/state.safetensors")))
        process.send_signal(signal.SIGINT)
        _, complaint = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert told_how_to_go_on(complaint)


def test_a_request_to_end_stops_cleanly_too(tmp_path):
    process = Forked("run", *LONG_WORDS, "epochs=400", cwd=tmp_path)
    try:
        wait_for(lambda: list(tmp_path.glob("run/clients/*/checkpoint/state.safetensors")))
    finally:
        process.send_signal(signal.SIGTERM)
        stopped = process.wait()
    assert stopped.returncode == 143
    assert told_how_to_go_on(stopped.stderr)


def test_stopped_before_anything_was_saved_it_promises_no_checkpoint(tmp_path):
    words = [*TINY_WORDS, "epochs=4000", "train.checkpoint_seconds=600", "--out", "run"]
    process = Forked("run", *words, cwd=tmp_path)
    try:
        wait_for((tmp_path / "run" / "partition.json").exists)
    finally:
        process.send_signal(signal.SIGTERM)
        stopped = process.wait()
    assert stopped.stderr.splitlines()[-1] == (
        "stopped; nothing was saved yet of what was running; the same command begins it again"
    )


BROKEN = """
from oneflare.objective import CONTROLLERS, Controller

@CONTROLLERS.register("broken")
class Broken(Controller):
    def loss(self, local, align, progress):
        return local / self.missing
"""


@pytest.mark.parametrize("workers", ["1", "2"])
def test_an_error_in_the_users_controller_shows_the_users_lines(tmp_path, workers):
    (tmp_path / "mine.py").write_text(BROKEN)
    words = ["--plugin", "mine", "run", *TINY_WORDS, "controller=broken", f"workers={workers}", "--quiet"]
    failed = forked(*words, cwd=tmp_path)
    assert failed.returncode == 2
    assert failed.stderr.splitlines() == [
        "error: your own code failed with AttributeError: 'Broken' object has no attribute 'missing'",
        f'  "{tmp_path / "mine.py"}", line 7, in loss',
        "    return local / self.missing",
    ]


def test_two_processes_on_one_folder(tmp_path):
    words = ["run", *LONG_WORDS, "epochs=400", "workers=1"]
    first = Forked(*words, cwd=tmp_path)
    try:
        wait_for(lambda: (tmp_path / "run" / "partition.json").exists())
        second = forked(*words, cwd=tmp_path)
        assert second.returncode == 2
        assert f"in use by process {first.process.pid}" in second.stderr
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()


@pytest.mark.parametrize(
    ("group", "order"),
    [
        ("server", ["init", "admit", "fuse", "scores", "rollback", "log"]),
        ("client", ["keygen", "rehearse", "train", "release"]),
    ],
)
def test_help_lists_the_commands_of_a_federation_in_order_of_use(capsys, group, order):
    code, out, _ = typed(capsys, group, "--help")
    assert code == 0
    rows = [line.split()[1] for line in out.splitlines() if len(line.split()) > 2 and line.split()[0] == "│"]
    assert [name for name in rows if name in order] == order


def test_quiet_shows_no_progress_in_any_command(monkeypatch):
    """Also where a command has no such option of its own."""
    from oneflare.cli import manners
    from oneflare.cli.progress import progress
    from oneflare.client.observer import Observer

    for quiet in (False, True):
        monkeypatch.setattr(manners, "_quiet", quiet)
        with progress(enabled=True, table=False) as observer:
            assert (type(observer) is Observer) is quiet
