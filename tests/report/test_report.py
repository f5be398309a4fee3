"""The story, the page's text, figures and tables as files. How it behaves in a browser: test_browser.py."""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import replace
from xml.etree import ElementTree

import pytest
import torch
import yaml
from markupsafe import escape as html
from scipy.optimize import brentq

from oneflare.errors import ConfigError, RunError
from oneflare.report import details, figures, lead, read_story, settings, write_report, write_study
from oneflare.report.collect import bounded
from oneflare.report.forest import forest
from oneflare.report.geometry import cosines, plane
from oneflare.report.latex import escape, escape_numbers, latex
from oneflare.report.page import render
from oneflare.report.rendering import json_for_html
from oneflare.report.settings import settings_of
from oneflare.report.story import Gap, Row
from oneflare.report.story import Test as Probe
from oneflare.report.words import words_of
from oneflare.simulation.stages import read_result
from oneflare.study.compare import read_comparison
from oneflare.study.records import StudyResult


def embedded(text: str):
    return json.loads(re.search(r'<script type="application/json" id="story">(.*?)</script>', text, re.DOTALL).group(1))


def row(label: str, accuracies: list[float], fusion: str = "f") -> Row:
    mean = sum(accuracies) / len(accuracies)
    seeds = list(range(len(accuracies)))
    return Row(label, fusion, True, seeds, accuracies, mean, 0.0, mean, mean, None, mean, 0.0, 0.1, 1, 10, 1.0, 1.0)


def test_the_page_of_a_run_says_what_its_files_say_and_needs_no_network(tiny_run):
    text = write_report(tiny_run).read_text()
    result = read_result(tiny_run)
    story = embedded(text)
    for name, found in result.fusions.items():
        assert f'data-value="{found.accuracy}"' in text
        assert story["runs"][0]["fusions"][name]["per_class"] == found.per_class
    assert story["runs"][0]["table"] == [list(row) for row in result.content.partition.table]
    assert story["runs"][0]["lambda"]["bound"] == 50
    assert "lambda_max: 50.0" in text
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", text)
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|import\(", text)


def test_one_seed_has_no_deviation_over_seeds(tmp_path, tiny_comparison):
    """What the size of the test set allows must not pass for a spread over seeds."""
    one = tmp_path / "one"
    shutil.copytree(tiny_comparison, one)
    content = json.loads((one / "comparison.json").read_text())
    (one / "comparison.json").write_text(json.dumps(content | {"seeds": [0]}))
    several, single = (re.sub(r"\s+", " ", write_report(folder).read_text()) for folder in (tiny_comparison, one))
    words = "standard deviation over seeds"
    assert words in several.split('id="glossary"')[0]
    assert words not in single.split('id="glossary"')[0]
    assert "95 % interval from the size of the test set alone" in single
    (row, *_) = read_comparison(one).to_dict()["accuracy"]["fafi"].values()
    assert row["std"] is None


def test_writing_it_again_gives_the_same_page(tiny_run, tiny_comparison):
    for folder in (tiny_run, tiny_comparison):
        assert write_report(folder).read_bytes() == write_report(folder).read_bytes()


def test_a_comparison_pairs_by_seed_and_names_the_leader(tiny_comparison):
    comparison = read_comparison(tiny_comparison)
    story = read_story(tiny_comparison)
    (panel,) = story.panels
    for method in comparison.methods:
        for fusion in comparison.fusions:
            found, cell = panel.row(method, fusion), comparison.cell(method, fusion)
            assert found.accuracies == list(cell.values)
            assert found.mean == cell.mean
            assert found.std == pytest.approx(cell.std)
            assert found.main == (comparison.own_fusion(method) == fusion)
    own = panel.main_row("flare")
    assert own.gap.mean == pytest.approx(comparison.own_difference("flare")[0])
    assert own.gap.low <= own.gap.mean <= own.gap.high
    best = max(panel.main, key=lambda found: found.mean)
    assert re.search(rf"{best.label}( with {best.fusion})? leads", story.lead[-1])
    assert best.fusion in story.lead[-1]
    assert [curve.label for curve in panel.lambdas] == ["flare"]


def test_a_study_becomes_a_page_even_where_its_runs_are_gone(tiny_study, tmp_path):
    path, runs = tiny_study
    content = json.loads(path.read_text())
    text = write_study(path, runs).read_text()
    story = embedded(text)
    assert len(story["panels"]) == len(content["places"]) == 2
    for cell in content["cells"]:
        assert f'data-value="{cell["mean"]}"' in text
        assert f'data-value="{cell["balanced"]}"' in text
    assert story["verdicts"][0]["verdict"] == content["claims"][0]["verdict"]
    assert "A study in miniature &lt;of two arms&gt;" in text
    assert "the log says nothing &amp; means it" in text
    assert len(story["runs"]) == 12
    assert [series["x"] for series in story["sweeps"][0]["series"]] == [[5.0, 20.0]]
    assert story["sweeps"][0]["level"]["name"] == "FAFI"
    assert story["log"] == [{"settings": "nowhere, one seed", "values": {"FAFI": 12.5, "lambda 20": "1,000"}}]
    alone = read_story(path, tmp_path / "nothing")
    assert alone.runs == []
    assert [row.mean for panel in alone.panels for row in panel.rows] == [cell["mean"] for cell in content["cells"]]
    assert alone.panels[0].lambdas  # kept in the results: the study draws lambda
    assert 'id="clients"' not in render(alone)


def test_unfinished_cells_are_left_out_and_named(tiny_study, tmp_path):
    path, runs = tiny_study
    content = json.loads(path.read_text())
    cell = content["cells"][0]
    cell |= {"accuracies": [], "seeds": [], "runs": [], "missing": [0, 1], "mean": None, "history": []}
    partial = tmp_path / "partial.json"
    partial.write_text(json.dumps(content))
    story = read_story(partial, runs)
    assert story.panels[0].main_row("FAFI") is None
    assert any("2 of the runs are not there yet" in sentence for sentence in story.lead)
    assert "A study in miniature" in render(story)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [("{}", "is not the result of a study"), ("[1]", "is not the result of a study"), ("{", "is not valid JSON")],
)
def test_a_file_that_is_no_study(tmp_path, content, complaint):
    (tmp_path / "other.json").write_text(content)
    with pytest.raises(RunError, match=complaint):
        read_story(tmp_path / "other.json")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda content: content.pop("rule"), "the field 'rule' is missing"),
        (lambda content: content["cells"][0].update(mood="good"), "the field 'cells.0.mood' is unknown"),
        (lambda content: content["cells"][0].update(cost=None), "cells.0: a cell with accuracies needs mean"),
        (lambda content: content["cells"][1].update(row="nobody"), "the row 'nobody' is named but not listed in rows"),
        (lambda content: content["cells"].pop(), "cells are not one for every place and row"),
        (lambda content: content.update(baseline=3), "the field 'baseline' is wrong"),
    ],
)
def test_a_study_with_a_wrong_field_is_refused_in_one_line(tiny_study, tmp_path, change, complaint):
    path, runs = tiny_study
    content = json.loads(path.read_text())
    change(content)
    damaged = tmp_path / "damaged.json"
    damaged.write_text(json.dumps(content))
    with pytest.raises(RunError) as caught:
        read_story(damaged, runs)
    line = str(caught.value)
    assert line.startswith(f"{damaged}: {complaint}")
    assert "run `oneflare study NAME` again" in line
    assert "\n" not in line


def test_a_study_is_written_as_it_was_read(tiny_study, tmp_path):
    path, _ = tiny_study
    StudyResult.read(path).write(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()


def test_a_comparison_with_a_wrong_field_is_refused_in_one_line(tiny_comparison, tmp_path):
    folder = tmp_path / "comparison"
    shutil.copytree(tiny_comparison, folder)
    (folder / "comparison.json").write_text('{"methods": ["fafi"]}')
    with pytest.raises(RunError, match=r"comparison\.json: the field 'seeds' is missing; run the same"):
        read_story(folder)


def test_a_folder_without_a_run(tmp_path):
    with pytest.raises(RunError, match="is not a run folder"):
        write_report(tmp_path)
    with pytest.raises(RunError, match="nothing at"):
        write_report(tmp_path / "missing")
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(RunError, match=r"several results; choose one of .*a\.json"):
        write_report(tmp_path)


def test_names_cannot_break_out_of_the_page(tiny_run):
    story = read_story(tiny_run)
    evil = "</script><img src=x onerror=alert(1)>"
    story.runs[0]["classes"][0] = evil
    text = render(replace(story, title=evil, lead=[evil], facts={evil: evil}))
    assert "<img" not in text
    assert text.count("</script>") == 2
    assert embedded(text)["runs"][0]["classes"][0] == evil
    assert json.loads(json_for_html([float("nan"), float("inf"), 1.5])) == [None, None, 1.5]


# ---- what is embedded stays small


def test_curves_keep_their_ends_and_their_peak():
    values = [math.sin(k) for k in range(5000)]
    values[1234] = 9.0
    kept = details.kept_points(values, 100)
    assert len(kept) <= 100
    assert kept == sorted(set(kept))
    assert {0, 4999, 1234} <= set(kept)
    assert details.kept_points([1.0, 2.0], 100) == [0, 1]


def test_a_thousand_clients_are_sampled_evenly():
    traces = {
        client: [{"epoch": 1, "lambda_raw": 1.0 + client, "lambda_raw_max": 1.0, "lambda_effective": 1.0}]
        for client in range(1000)
    }
    curves = details.lambda_curves(traces, 50.0)
    assert curves["of"] == 1000
    shown = [curve["client"] for curve in curves["clients"]]
    assert len(shown) == details.MOST_CLIENTS
    assert (shown[0], shown[-1]) == (0, 999)
    assert details.lambda_curves({0: [{"epoch": 1, "lambda_raw": 0.0, "lambda_raw_max": 0.0}]}, None) is None


def test_runs_that_do_not_fit_are_left_out(tiny_run):
    result = read_result(tiny_run)
    size = len(json.dumps(details.run_details(result, "a, seed 0", 0)))
    wanted = [(result, f"m{k}, seed 0", k % 2) for k in range(4)]
    assert [run["label"] for run in bounded(wanted, most=int(2.5 * size))] == ["m0, seed 0", "m1, seed 0"]
    assert len(bounded(wanted, most=1)) == 1
    assert [run["panel"] for run in bounded(wanted)] == [0, 0, 1, 1]


def test_mean_lambda_is_over_clients():
    traces = [
        [{"epoch": e, "lambda_raw": float(k + e), "lambda_effective": float(k), "lambda_raw_max": 7.0} for e in (1, 2)]
        for k in (1, 3)
    ]
    curve = details.mean_lambda("m", traces)
    assert (curve.epochs, curve.raw, curve.effective, curve.largest) == ([1, 2], [3.0, 4.0], [2.0, 2.0], 7.0)


# ---- words


def test_wilson_solves_its_equation():
    for share, number in ((0.7, 359), (0.05, 40), (1.0, 20), (0.0, 20)):
        low, high = lead.wilson(share, number)

        def gap(p, share=share, number=number):
            return (share - p) ** 2 - lead.NORMAL_95**2 * p * (1 - p) / number

        if low > 0:
            assert low == pytest.approx(brentq(gap, 0, share - 1e-9), abs=1e-7)
        if high < 1:
            assert high == pytest.approx(brentq(gap, share + 1e-9, 1), abs=1e-7)


def test_the_leader_is_called_what_it_is():
    (clear,) = lead.winner([row("a", [0.5, 0.52, 0.51]), row("b", [0.7, 0.72, 0.72])])
    assert clear.startswith("Fused by f, b leads with 71.3")
    assert "20.3 points ahead of a" in clear
    assert "ahead on 3 of 3 seeds" in clear
    assert clear.endswith("which is more than chance.")
    (close,) = lead.winner([row("a", [0.5, 0.6, 0.4]), row("b", [0.55, 0.4, 0.56])])
    assert close.endswith("which may be chance.")
    (once,) = lead.winner([row("a", [0.5]), row("b", [0.6])])
    assert "nobody can say" in once
    (alone,) = lead.winner([row("a", [0.5, 0.6])])
    assert alone.startswith("a with f reaches 55.0")


def test_the_reader_is_told_every_word(tiny_study):
    story = read_story(*tiny_study)
    told = {term: text for _, terms in words_of(story) for term, text in terms}
    assert {*story.labels, *(row.fusion for panel in story.panels for row in panel.rows)} <= set(told)
    assert {"lambda", "valve", "alpha", "interval", "calibration error"} <= set(told)
    text = render(story)
    assert all(f"<dt>{html(term)}</dt>" in text for term in told)
    assert story.question in text
    assert story.question not in story.lead


def test_sections_without_content_are_not_there(tiny_run):
    story = read_story(tiny_run)
    assert 'id="geometry"' in render(story)
    (panel,) = story.panels
    bare = replace(
        story,
        panels=[replace(panel, curves=[replace(curve, epochs=[0], mean=[0.5]) for curve in panel.curves], lambdas=[])],
        runs=[story.runs[0] | {"lambda": None, "geometry": None}],
    )
    text = render(bare)
    for anchor in ("checkpoints", "lambda", "geometry"):
        assert f'id="{anchor}"' not in text
        assert f'href="#{anchor}"' not in text
    assert "valve" not in {term for _, terms in words_of(bare) for term, _ in terms}


def test_settings_are_said_once(tiny_comparison):
    story = read_story(tiny_comparison)
    found = settings_of(story.runs)
    for run, row in zip(story.runs, found["rows"], strict=True):
        everything = settings.flat(yaml.safe_load(run["configuration"]))
        shared = settings.flat(yaml.safe_load(found["shared"]))
        own = {key: value for key, value in everything.items() if key not in shared}
        assert shared == {key: everything[key] for key in shared}
        assert f"seed {run['seed']}" in row["own"]
        assert row["own"].count(" ") >= len(own)
    deep = {"a": {"b": {"c": 1}}, "d": {}, "e": [1, 2]}
    assert settings.flat(deep) == {"a.b.c": 1, "d": {}, "e": [1, 2]}
    assert settings.nested(settings.flat(deep)) == deep
    assert settings.split([{"x": 1, "y": 2}, {"x": 1, "z": 2}]) == ({"x": 1}, [{"y": 2}, {"z": 2}])


def a_test(mean, low, high, threshold=0.0, side="above", unit="points"):
    return Probe(
        "a against b", "", mean, low, high, [] if mean is None else [mean], 0.5, side, threshold, unit, "undecided"
    )


def test_a_claims_picture_keeps_order_and_scale():
    ((first, second),) = forest([[a_test(1.0, -1.0, 3.0), a_test(-2.0, -4.0, 0.5, side="below")]])
    assert first.low < first.threshold < first.mean < first.high
    assert (first.start, first.end) == (first.threshold, 100.0)
    assert (second.start, second.end) == (0.0, second.threshold)
    assert first.threshold == second.threshold
    unit = (first.high - first.low) / 4
    assert second.high - second.low == pytest.approx(4.5 * unit, abs=0.05)
    small, large = forest([[a_test(0.1, 0.0, 0.2)], [a_test(30.0, 20.0, 40.0)]])  # else the first would be a dot
    assert small[0].high - small[0].low > 50
    assert large[0].high - large[0].low > 30
    ((without,),) = forest([[a_test(None, None, None)]])
    assert (without.mean, without.low) == (None, None)


# ---- geometry


def test_cosines_and_plane_of_a_simplex():
    from oneflare.nn import simplex_etf

    anchors = simplex_etf(4, 8, seed=0)
    assert torch.allclose(cosines(anchors), (4 * torch.eye(4, dtype=torch.float64) - 1) / 3)
    clients = torch.stack([2 * anchors, 5 * anchors])
    found = plane(anchors, clients, anchors)
    assert found["points"][0] == found["points"][1] == found["server"] == found["anchors"]
    assert found["kept"] == pytest.approx([1 / 3, 1 / 3])  # a simplex of four spreads alike in three directions
    flat = plane(torch.eye(3, 5), torch.eye(3, 5)[None], None)
    assert sum(flat["kept"]) == pytest.approx(1)
    assert flat["anchors"] is None


# ---- files for papers


def test_figures_are_files_of_the_asked_kind(tiny_run, tiny_study, tmp_path):
    story = read_story(tiny_run)
    assert [path.name for path in figures.write_figures(story, tmp_path / "p", "png")] == [
        f"{name}.png"
        for name in (
            "accuracy", "checkpoints", "clients", "lambda-clients", "cosines", "plane", "classes", "reliability",
        )
    ]  # fmt: skip
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in (tmp_path / "p").iterdir())
    for path in figures.write_figures(read_story(tiny_study[0], tmp_path), tmp_path / "s", "svg"):
        assert ElementTree.parse(path).getroot().tag.endswith("svg")
    names = {path.stem for path in (tmp_path / "s").iterdir()}
    assert {"settings", "accuracy-digits-alpha-0.1", "lambda-digits-alpha-0.5"} <= names
    assert any(name.startswith("sweep-0") for name in names)
    study = read_story(tiny_study[0], tmp_path)
    (axes,) = figures.lambda_by_method(study.panels[0].lambdas, study.labels).axes
    colours = {line.get_label(): line.get_color() for line in axes.lines}
    for curve in study.panels[0].lambdas:  # a method has one colour in all figures
        assert colours[curve.label] == figures.COLOURS[study.labels.index(curve.label)]
    figure = figures.accuracy(story.panels[0].rows, by_fusion=True)
    from oneflare.report.pictures import save

    save(figure, tmp_path / "a.pdf")
    assert (tmp_path / "a.pdf").read_bytes().startswith(b"%PDF")
    with pytest.raises(ConfigError, match="unknown format 'gif'"):
        figures.write_figures(story, tmp_path, "gif")


def test_latex_escapes_and_is_regular(tiny_study, tiny_comparison):
    assert escape("50% of a_b & {c} #1 $x$ \\ ~ ^ <>") == (
        r"50\% of a\_b \& \{c\} \#1 \$x\$ \textbackslash{} \textasciitilde{} \textasciicircum{} "
        r"\textless{}\textgreater{}"
    )
    assert escape("[x] y") == "{[}x] y"  # after the end of a line a bare bracket would begin an option
    assert escape_numbers("a-1: -0.5 [-2, +3]") == "a-1: $-$0.5 {[}$-$2, +3]"
    for story in (read_story(*tiny_study), read_story(tiny_comparison)):
        text = latex(story)
        assert text.count(r"\begin{table}") == text.count(r"\end{table}") >= 3
        for body in re.findall(r"\\toprule\n(.*?)\\bottomrule", text, re.DOTALL):
            lines = [line for line in body.splitlines() if line.endswith(r"\\")]
            assert len({len(re.findall(r"(?<!\\)&", line)) for line in lines}) == 1
        for panel in story.panels:
            for found in panel.rows:
                assert f"{100 * found.mean:.1f}" in text
    assert "count\\_prototypes" in text


def test_gap_of_a_difference():
    from oneflare.study.verdicts import difference

    assert Gap.of("a", difference([0.1])) == Gap("a", 0.1, None, None)


# ---- colours


def _luminance(colour: str) -> float:
    parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(one: str, other: str) -> float:
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_both_schemes_can_be_read(tiny_run):
    """WCAG: 4.5 for text, 3 for marks."""
    text = render(read_story(tiny_run))
    schemes = [
        dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6});", block))
        for block in re.findall(r":root[^{]*\{([^}]*)\}", text)
    ]
    assert len(schemes) == 4
    for scheme in schemes[:3]:
        for name in ("ink", "soft", "accent", "good", "bad", "open"):
            assert _contrast(scheme[name], scheme["ground"]) >= 4.5, name
        for number in range(8):
            assert _contrast(scheme[f"c{number}"], scheme["ground"]) >= 3
        assert _contrast(scheme["on-fill"], scheme["fill"]) >= 4.5
    assert [schemes[0][f"c{number}"] for number in range(8)] == list(figures.COLOURS)
