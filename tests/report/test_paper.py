"""The paper: which results it takes, what its tables and figures show, and that LaTeX understands it."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace

import pytest
from paper_parts import finished, study_result, write_all

from oneflare.errors import ConfigError, RunError, WorkError
from oneflare.methods.recipes import METHODS
from oneflare.report.latex import best_printed, escape
from oneflare.report.paper import build_pdf, figures, names, read_material, tables, text, write_paper
from oneflare.report.paper.material import OUTLINE, images_words, network_words, setting_words
from oneflare.report.paper.writing import FIGURES, REFERENCES, TABLES
from oneflare.study.declare import declared
from oneflare.study.records import StudyResult
from oneflare.study.results import write_results

LATEX = shutil.which("pdflatex") and shutil.which("bibtex")
needs_latex = pytest.mark.skipif(not LATEX, reason="LaTeX (pdflatex and bibtex) is not installed")


@pytest.fixture(scope="module")
def decisive(tmp_path_factory):
    return write_all(tmp_path_factory.mktemp("decisive"), "decisive")


@pytest.fixture(scope="module")
def alone(decisive, tmp_path_factory):
    """The results of one study, whose paper is soon written."""
    folder = tmp_path_factory.mktemp("alone")
    shutil.copytree(decisive / "table3", folder / "table3")
    return folder


@pytest.fixture(scope="module")
def table1(tmp_path_factory):
    return study_result("table1", "decisive", tmp_path_factory.mktemp("runs"))


def body(latex: str) -> list[list[str]]:
    """The cells of all lines of figures in a table."""
    blocks = re.findall(r"\\midrule\n(.*?)\\bottomrule", latex, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line.endswith(r"\\")]
    return [line.removesuffix(r" \\").split(" & ") for line in lines]


def with_cell(content: StudyResult, place: str, row: str, cell) -> StudyResult:
    cells = tuple(cell if (one.place, one.row) == (place, row) else one for one in content.cells)
    return replace(content, cells=cells)


# ---- which results


def test_the_largest_scale_that_is_there_is_taken(tmp_path):
    write_results(study_result("table2", "smoke", tmp_path), tmp_path)
    material = read_material(tmp_path)
    assert material.scales == ("smoke",)
    assert material.missing == tuple(study for study in OUTLINE if study != "table2")
    assert material.claims  # of the only scale there is; the caption says what they are worth
    assert "no verdict to rely on" in tables.claims_table(material.claims)
    write_results(study_result("table2", "small", tmp_path), tmp_path)
    assert read_material(tmp_path).scales == ("small",)
    write_results(study_result("table2", "decisive", tmp_path), tmp_path)
    material = read_material(tmp_path)
    assert material.scales == ("decisive",)
    assert "no verdict to rely on" not in tables.claims_table(material.claims)
    assert read_material(tmp_path, "small").scales == ("small",)


def test_no_results_are_one_line_that_names_the_command(tmp_path, here):
    with pytest.raises(RunError, match=r"oneflare study table1 .* peers --scale decisive --out"):
        read_material(tmp_path / "none")
    with pytest.raises(ConfigError, match="unknown scale 'huge'"):
        read_material(tmp_path, "huge")
    answer = here("paper", cwd=tmp_path)
    assert answer.returncode == 2
    assert answer.stderr.count("\n") == 1
    assert "no results of the paper's studies in results; make them with `oneflare study table1" in answer.stderr
    assert not (tmp_path / "build").exists()


def test_the_command_says_what_was_left_out_and_how_to_make_it(tmp_path, here):
    """peers is not declared for the scale small, so another scale is named."""
    write_results(study_result("table3", "small", tmp_path), tmp_path / "results")
    answer = here("paper", "--no-pdf", "--out", "p", cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout == "paper: p/paper.tex and 3 files beside it, scale small\n"
    assert "left out, for lack of results: table1, figure1, table2, figure2, figure3, peers" in answer.stderr
    assert "peers --scale decisive`" in answer.stderr
    assert r"\input{tables/table3}" in (tmp_path / "p" / "paper.tex").read_text()
    assert "table1" not in (tmp_path / "p" / "paper.tex").read_text()


# ---- words


def test_names_are_those_of_papers(table1, tmp_path):
    peers = study_result("peers", "decisive", tmp_path)
    found = [names.method_name(row) for row in peers.rows]
    for name in ("FedAvg", "FAFI", "FLARE", "FedSRA", "FedOV", "Co-Boosting", "FedLPA", "AFL"):
        assert name in found
    for content in (table1, peers, *(study_result(name, "decisive", tmp_path) for name in ("table2", "table3"))):
        assert not [row.label for row in content.rows if names.NUMBER.search(names.method_name(row))]
    assert names.method_name(table1.row("etf_annealed")) == "ETF-annealed"
    assert (
        names.without_numbers("FLARE beats V7's and V10-Rescaled")
        == "FLARE beats ETF-annealed's and uncertainty-rescaled"
    )
    assert names.without_numbers("floor 1e-5 (V13)") == "floor 1e-5"
    assert names.without_numbers("no valve (V12)") == "no valve (meta-annealed)"
    assert names.without_numbers("V99 is nothing") == "V99 is nothing"
    assert names.in_words("figures under feature_mean") == "figures under mean of features"


def test_every_name_exists_and_every_citation_is_in_the_references():
    from oneflare.fusion import FUSIONS

    assert set(names.METHODS) <= set(METHODS)
    assert {method for method, _ in names.UNDER_SERVER} <= set(METHODS)
    assert set(names.SERVERS) <= set(FUSIONS)
    keys = re.findall(r"^@\w+\{(\w+),", REFERENCES.read_text(), re.MULTILINE)
    assert len(keys) == len(set(keys))
    cited = {*names.CITED.values(), *re.findall(r"\\cite\{(\w+)\}", text.METHOD)}
    assert cited <= set(keys)
    assert set(OUTLINE) == set(TABLES) | set(FIGURES) <= set(declared())


def test_captions_say_what_was_run(table1, tmp_path):
    cifar = table1.places[0]
    assert images_words(table1, cifar).replace("\N{NO-BREAK SPACE}", " ") == (
        "10,000 training and 5,000 test images of 16 × 16 pixels"
    )
    unknown = replace(cifar, train_images=9999, test_images=None)
    assert images_words(table1, unknown).startswith("9,999 training images of")
    assert network_words(table1, cifar) == "a ResNet-8 of width 16, 25 epochs"
    caption = tables.main_table(table1).split(r"\begin{tabular}")[0]
    for words in (
        r"CIFAR-10 and SVHN",
        r"$\alpha$~=~0.05 and 0.5",
        "5 clients",
        "5 seeds",
        "bold: the best mean",
        "(SVHN)",
    ):
        assert words in caption
    small = study_result("table3", "small", tmp_path)
    assert network_words(small, small.places[0]) == "a ResNet-8 of width 16 with a strided stem, 5 epochs"
    paper = setting_words(study_result("table1", "paper", tmp_path))
    assert "50 epochs (CIFAR-10 and SVHN), a ResNet-18 of width 64, 100 epochs (CIFAR-100 and Tiny-ImageNet)" in paper
    one = study_result("table3", "small", tmp_path, seeds=1)
    assert "of one seed, which says nothing about the spread" in tables.valve_table(one)
    assert r"\dagger" not in tables.valve_table(one)


def test_special_characters_of_labels_and_claims_are_escaped(tmp_path):
    nasty = r"50% of a_b & {c} #1 $x$ \ ~ ^ <>"
    content = study_result("table2", "decisive", tmp_path)
    rows = tuple(replace(row, label=nasty) if row.id == "flare" else row for row in content.rows)
    claims = (replace(content.claims[0], text=f"{nasty}\n\nand more", log=nasty), *content.claims[1:])
    write_results(replace(content, rows=rows, claims=claims), tmp_path)
    write_paper(read_material(tmp_path), tmp_path / "out")
    for name in ("table2", "claims"):
        assert escape(nasty) in (tmp_path / "out" / "tables" / f"{name}.tex").read_text()
        assert nasty not in (tmp_path / "out" / "tables" / f"{name}.tex").read_text()
    assert r"\textgreater{} and more" in (tmp_path / "out" / "tables" / "claims.tex").read_text()
    if LATEX:
        assert build_pdf(tmp_path / "out").pdf is not None


def test_no_declared_study_has_a_character_that_latex_does_not_know():
    for path in declared().values():
        assert escape(path.read_text()).isascii(), path


# ---- figures in tables


def test_bold_is_where_the_best_is():
    assert best_printed([1.0, None, 3.04, 3.0], 1) == [False, False, True, True]
    assert best_printed([1.0, None, 3.04, 3.0], 1, lowest=True) == [True, False, False, False]
    assert best_printed([None, None], 1) == [False, False]


def test_the_best_mean_of_each_column_is_bold_and_no_other(table1):
    lines = body(tables.main_table(table1))
    assert len(lines) == len(table1.rows)
    places = [place for block in tables.packed(table1.places, 8) for group in block for place in group]
    assert sorted(place.id for place in places) == sorted(place.id for place in table1.places)
    for column, place in enumerate(places, start=2):
        means = [table1.cell(place.id, row.id).mean for row in table1.rows]
        shown = [line[column] for line in lines]
        bold = [index for index, cell in enumerate(shown) if r"\textbf" in cell]
        assert bold == [index for index, mean in enumerate(means) if f"{100 * mean:.1f}" == f"{100 * max(means):.1f}"]
        for mean, cell in zip(means, shown, strict=True):
            assert f"{100 * mean:.1f}" in cell


def test_a_dagger_marks_what_the_best_does_not_clearly_beat(table1):
    place = table1.places[0].id
    high, near, low = ([0.9, 0.91, 0.92, 0.93, 0.94], [0.95, 0.86, 0.97, 0.88, 0.93], [0.1, 0.11, 0.12, 0.13, 0.14])
    cells = [
        finished(table1.cell(place, row), values, aligned=False)
        for row, values in (("fafi", high), ("flare", near), ("fedavg", low), ("analytic", high))
    ]
    best, alike, worse, tie = tables.accuracies(cells)
    assert best == tie == r"\textbf{92.0} $\pm$ 1.6"
    assert alike.endswith(tables.NOT_CLEAR)
    assert worse == r"12.0 $\pm$ 1.6"
    # by hand: t of the paired differences, four degrees of freedom, one-sided 5 %: 2.132
    gaps = [a - b for a, b in zip(high, near, strict=True)]
    mean = sum(gaps) / 5
    spread = (sum((gap - mean) ** 2 for gap in gaps) / 4) ** 0.5
    assert mean / (spread / 5**0.5) < 2.132


def test_missing_cells_are_a_dash_with_a_note(table1, tmp_path):
    place = table1.places[0].id
    empty = study_result("table1", "decisive", tmp_path, seeds=1).cell(place, "flare")
    gone = replace(
        empty, seeds=(), runs=(), accuracies=(), mean=None, std=None, balanced=None, worst_class=None, missing=(0, 1),
        calibration_error=None, peak=None, history=(), lambda_=None, cost=None, difference=None,
    )  # fmt: skip
    fewer = finished(replace(table1.cell(place, "fafi"), missing=(0, 1, 2)), [0.5, 0.6], aligned=False)
    content = with_cell(with_cell(table1, place, "flare", gone), place, "fafi", fewer)
    latex = tables.main_table(content)
    by_row = dict(zip((row.id for row in content.rows), body(latex), strict=True))
    assert by_row["flare"][2] == "--"
    assert by_row["fafi"][2].endswith(tables.FEWER)
    assert "--: not run yet." in latex
    assert "Some of the planned seeds have not been run." in latex
    assert "not run yet" not in tables.main_table(table1)
    peers = study_result("peers", "decisive", tmp_path)
    peers = with_cell(peers, peers.places[0].id, "afl", replace(gone, row="afl", fusion="afl"))
    line = dict(zip((row.id for row in peers.rows), body(tables.peers_table(peers)), strict=True))["afl"]
    assert line[2:6] == ["--"] * 4
    figures.peers_figure(peers)  # the others are drawn
    assert "Not run yet: AFL." in text.caption("peers", peers)


def test_studies_of_which_nothing_was_run_yet_still_make_a_page_and_a_paper(tmp_path):
    from oneflare.report import write_study
    from oneflare.study.cells import make_plan
    from oneflare.study.declare import find_declaration
    from oneflare.study.results import collect
    from oneflare.study.scales import SCALES

    for study in OUTLINE:
        plan = make_plan(find_declaration(study), SCALES["smoke"])
        path = write_results(collect(plan, tmp_path / "runs"), tmp_path)
        assert "not there yet" in write_study(path, tmp_path / "runs").read_text()
    write_paper(read_material(tmp_path), tmp_path / "out")
    assert "no seed has been run yet" in (tmp_path / "out" / "tables" / "table1.tex").read_text()
    if LATEX:
        assert build_pdf(tmp_path / "out").pdf is not None


def test_the_first_page_says_which_figures_judge_nothing(decisive, tmp_path):
    assert "scale smoke" not in text.document(read_material(decisive))
    write_results(study_result("figure1", "smoke", tmp_path), tmp_path)
    assert "These figures are of the scale smoke" in text.document(read_material(tmp_path))
    write_results(study_result("table3", "decisive", tmp_path), tmp_path)
    assert r"The figures of Figure~\ref{fig:checkpoints} are of the scale smoke" in text.document(
        read_material(tmp_path)
    )


def test_costs_are_those_of_the_results_and_the_smallest_is_bold(tmp_path):
    content = study_result("peers", "decisive", tmp_path)
    place = content.places[0]
    lines = body(tables.peers_table(content))
    costs = [content.cell(place.id, row.id).cost for row in content.rows]
    for column, values in (
        (3, [cost.train_seconds for cost in costs]),
        (4, [cost.fuse_seconds for cost in costs]),
        (5, [cost.upload_bytes / 1e6 for cost in costs]),
    ):
        shown = [line[column].removeprefix(r"\textbf{").removesuffix("}") for line in lines]
        assert shown == [tables.amount(value) for value in values]
        bold = [index for index, line in enumerate(lines) if line[column].startswith(r"\textbf")]
        assert bold == [index for index, cell in enumerate(shown) if cell == tables.amount(min(values))]
    old = replace(content, cells=tuple(replace(c, cost=replace(c.cost, fuse_seconds=None)) for c in content.cells))
    assert "Seconds of the server are not in these results" in tables.peers_table(old)
    assert [tables.amount(value) for value in (1234.4, 23.62, 0.0312, 0.2, 0.0001)] == [
        "1,234", "23.6", "0.031", "0.20", r"\textless{}0.001",
    ]  # fmt: skip


def test_large_lambdas_are_powers_of_ten():
    assert [tables.number(value) for value in (50.03, 1234.0, 1771644.0, 0.0)] == [
        "50.03", "1,234", r"$1.77 \times 10^{6}$", "0",
    ]  # fmt: skip


def test_many_places_are_several_blocks_of_one_table(tmp_path):
    content = study_result("table1", "paper", tmp_path)
    latex = tables.main_table(content)
    assert latex.count(r"\begin{tabular}") == 2
    assert latex.count(r"\begin{table*}") == latex.count(r"\caption") == 1
    lines = body(latex)
    assert len(lines) == 2 * len(content.rows)
    assert {len(line) for line in lines} == {2 + 8}
    assert "Of 16 settings, the best mean is that of" in " ".join(text.SENTENCES["table1"](content))


# ---- files


def test_the_folder_holds_every_table_and_figure(decisive, tmp_path):
    files = write_paper(read_material(decisive), tmp_path)
    assert {str(path.relative_to(tmp_path)) for path in files} == {
        "paper.tex", "references.bib", "tables/table1.tex", "tables/table2.tex", "tables/table3.tex",
        "tables/peers.tex", "tables/claims.tex",
        *(f"figures/{name}.{kind}" for name in ("figure1", "figure2", "figure3", "peers") for kind in ("tex", "pdf")),
    }  # fmt: skip
    for path in files:
        if path.suffix == ".pdf":
            assert path.read_bytes().startswith(b"%PDF")
            assert path.stat().st_size > 5000
    everything = "".join(path.read_text() for path in files if path.suffix == ".tex")
    for label in ("tab:main", "tab:ablation", "tab:valve", "tab:peers", "tab:claims", "fig:checkpoints", "fig:peers"):
        assert everything.count(rf"\label{{{label}}}") == 1
        assert rf"\ref{{{label}}}" in everything
    before = {path: path.read_bytes() for path in files}
    write_paper(read_material(decisive), tmp_path)
    assert {path: path.read_bytes() for path in files} == before


def test_what_an_earlier_paper_left_is_removed(decisive, alone, tmp_path):
    out = tmp_path / "out"
    write_paper(read_material(decisive), out)
    (out / "paper.pdf").write_bytes(b"old")
    (out / "own.tex").write_text("mine")
    write_paper(read_material(alone), out)
    kept = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert kept == {"paper.tex", "references.bib", "own.tex", "tables/table3.tex", "tables/claims.tex"}


def test_figures_show_every_method_once_and_differ_in_more_than_colour(decisive):
    studies = read_material(decisive).studies
    (axes,) = figures.checkpoints_figure(studies["figure1"]).axes
    drawn = axes.get_legend_handles_labels()[1]
    assert drawn == ["FedAvg", "FAFI", "ETF-annealed", "FLARE"]
    looks = figures.looks_of(studies["peers"].rows)
    assert len({one["marker"] for one in looks.values()}) == len(looks) == 11
    assert figures.looks_of(studies["figure1"].rows)["FLARE"] == looks["FLARE"]
    above, below = figures.valve_figure(studies["figure3"]).axes
    assert above.get_legend_handles_labels()[1] == ["no valve (meta-annealed)", "FLARE"]
    assert "valve at 50" in below.get_legend_handles_labels()[1]
    assert below.get_yscale() == "log"
    left, right = figures.peers_figure(studies["peers"]).axes[:2]
    cell = studies["peers"].cell(studies["peers"].places[0].id, "fedavg")
    (point,) = [one for one in left.containers if one.get_label() == "FedAvg"]
    assert point.lines[0].get_xydata().tolist() == [[cell.cost.train_seconds + cell.cost.fuse_seconds, 100 * cell.mean]]
    (point,) = [one for one in right.containers if one.get_label() == "FedAvg"]
    assert point.lines[0].get_xydata().tolist() == [[cell.cost.upload_bytes / 1e6, 100 * cell.mean]]


@needs_latex
@pytest.mark.parametrize("scale", ["decisive", "paper"])
def test_latex_makes_the_pdf_and_no_line_is_too_wide(tmp_path, scale):
    write_paper(read_material(write_all(tmp_path / "results", scale)), tmp_path / "out")
    built = build_pdf(tmp_path / "out")
    assert built.pdf == tmp_path / "out" / "paper.pdf"
    assert built.pdf.read_bytes().startswith(b"%PDF")
    assert built.overfull == built.undefined == ()
    assert not [path for path in (tmp_path / "out").iterdir() if path.suffix in (".aux", ".log", ".bbl")]


@needs_latex
def test_without_latexmk_the_references_are_there_all_the_same(alone, tmp_path, monkeypatch):
    found = {name: shutil.which(name) for name in ("pdflatex", "bibtex")}
    for name, path in found.items():
        (tmp_path / name).symlink_to(path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert shutil.which("latexmk") is None
    write_paper(read_material(alone), tmp_path / "out")
    built = build_pdf(tmp_path / "out")
    assert built.pdf is not None
    assert built.undefined == ()
    source = tmp_path / "out" / "paper.tex"
    source.write_text(source.read_text().replace("kendall2018", "nobody"))
    assert "nobody" in build_pdf(tmp_path / "out").undefined


@needs_latex
def test_what_latex_cannot_read_is_one_line_with_a_log(alone, tmp_path):
    write_paper(read_material(alone), tmp_path)
    source = tmp_path / "paper.tex"
    source.write_text(source.read_text().replace(r"\maketitle", r"\undefinedcommand"))
    with pytest.raises(WorkError, match=r"Undefined control sequence.*paper\.log"):
        build_pdf(tmp_path)
    assert (tmp_path / "paper.log").exists()
    source.write_text(source.read_text().replace("booktabs", "nosuchpackage").replace(r"\undefinedcommand", ""))
    missing = build_pdf(tmp_path)
    assert missing.pdf is None
    assert "LaTeX's package nosuchpackage is missing" in missing.missing


def test_without_latex_the_command_says_what_is_missing_and_succeeds(alone, tmp_path, here, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    answer = here("paper", "--results", str(alone), "--out", "p", cwd=tmp_path)
    assert answer.returncode == 0
    assert answer.stdout == "paper: p/paper.tex and 3 files beside it, scale decisive\n"
    left_out, missing = answer.stderr.splitlines()
    assert left_out.startswith("left out, for lack of results: table1")
    assert missing.startswith("paper.pdf was not made: LaTeX (latexmk, or pdflatex and bibtex) is missing; Debian")
