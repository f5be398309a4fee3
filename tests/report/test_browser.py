"""The page in a real browser: opens from disk, draws, answers to mouse and keyboard, fits a phone, prints."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from browser import PHONE
from oneflare.report import read_story, write_report, write_study
from oneflare.report.page import render

pytest.importorskip("playwright")

KINDS = ("run", "comparison", "study")


@pytest.fixture(scope="module")
def pages(tiny_run, tiny_comparison, tiny_study) -> dict[str, Path]:
    return {
        "run": write_report(tiny_run),
        "comparison": write_report(tiny_comparison),
        "study": write_study(*tiny_study),
    }


def cells(page, selector: str) -> list[tuple[str, str]]:
    """data-value and text of every cell"""
    return page.eval_on_selector_all(
        f"{selector} [data-value]", "nodes => nodes.map(n => [n.dataset.value, n.firstChild.textContent.trim()])"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_it_opens_draws_everything_and_asks_for_nothing(pages, visit, kind):
    found = visit(pages[kind])
    assert found.errors == []
    assert found.requests == [pages[kind].as_uri()]
    undrawn = found.page.eval_on_selector_all(
        "figure.chart", "figures => figures.filter(f => !f.querySelector('.plot svg, .plot .empty')).map(f => f.id)"
    )
    assert undrawn == []
    drawn = found.page.eval_on_selector_all("figure.chart:has(.plot svg)", "figures => figures.map(f => f.id)")
    expected = {"fig-comparison", "fig-checkpoints", "fig-clients", "fig-lambda", "fig-cosines", "fig-map"}
    expected |= {"fig-classes", "fig-calibration"}
    expected |= {"comparison": {"fig-lambdas"}, "study": {"fig-lambdas", "fig-settings", "fig-sweep-0"}}.get(
        kind, set()
    )
    assert expected <= set(drawn)
    assert "NaN" not in found.page.inner_html("main")
    assert found.page.locator(".lead").inner_text().count(".") >= 2


def test_the_tables_of_a_run_are_its_result(pages, visit, tiny_run):
    page = visit(pages["run"]).page
    fusions = json.loads((tiny_run / "result.json").read_text())["fusions"]
    values = iter(cells(page, "table.cost"))
    for name in page.eval_on_selector_all("table.cost tbody td.text", "nodes => nodes.map(n => n.textContent)"):
        row = fusions[name]
        for key in ("accuracy", "balanced_accuracy", "worst_class", "calibration_error"):
            assert next(values) == [str(row[key]), f"{100 * row[key]:.1f}"]
        assert next(values) == [str(row["forward_passes"])] * 2
        assert next(values) == [str(row["parameters"]), f"{row['parameters']:,}"]
        assert next(values) == [str(row["fuse_seconds"]), f"{1000 * row['fuse_seconds']:.1f}"]
        next(values), next(values)
    assert list(values) == []


def test_the_tables_of_a_study_are_its_json(pages, visit, tiny_study):
    page = visit(pages["study"]).page
    content = json.loads(tiny_study[0].read_text())
    means = [[str(cell["mean"]), f"{100 * cell['mean']:.1f}"] for cell in content["cells"]]
    assert cells(page, "table.accuracy") == means
    overview = sorted(cells(page, "table.overview"))
    assert overview == sorted(
        mean for mean, cell in zip(means, content["cells"], strict=True) if ":" not in cell["row"]
    )
    gaps = [cell["difference"]["mean"] for cell in content["cells"] if cell["difference"] and ":" not in cell["row"]]
    assert {str(gap) for gap in gaps} <= {value for value, _ in cells(page, "table.main")}
    tests = [test for claim in content["claims"] for test in claim["tests"] if test["mean"] is not None]
    for (value, text), test in zip(cells(page, "table.verdicts"), tests, strict=True):
        assert value == str(test["mean"])
        assert text == f"{test['mean']:+{'.1f' if test['unit'] else '.3g'}}".replace("-", "\N{MINUS SIGN}")
    verdicts = page.eval_on_selector_all(".verdict", "nodes => nodes.map(n => n.textContent.trim())")
    assert [text.split()[-1] for text in verdicts] == [claim["verdict"] for claim in content["claims"]]


def test_legends_switch_curves_off_and_on(pages, visit):
    page = visit(pages["comparison"]).page
    figure = page.locator("#fig-checkpoints")
    marks = figure.locator(".plot svg path")
    before = marks.count()
    button = figure.get_by_role("button", name="flare")
    assert button.get_attribute("aria-pressed") == "true"
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    assert marks.count() < before
    button.focus()
    page.keyboard.press("Enter")  # the same by keyboard; focus survives the redrawing
    assert button.get_attribute("aria-pressed") == "true"
    assert marks.count() == before
    assert page.evaluate("document.activeElement.dataset.key") == "flare"


def test_hover_and_arrow_keys_show_values(pages, visit, tiny_comparison):
    page = visit(pages["comparison"]).page
    row = read_story(tiny_comparison).panels[0].main_row("flare")
    tip = page.locator("#tip")
    assert tip.is_hidden()
    plot = page.locator("#fig-comparison .plot")
    plot.scroll_into_view_if_needed()
    point = plot.evaluate("node => node.chart.points.find(p => p.title.startsWith('flare, ' + 'count'))")
    box = plot.locator("svg").bounding_box()
    page.mouse.move(box["x"] + point["x"], box["y"] + point["y"])
    assert tip.is_visible()
    assert f"{100 * row.mean:.1f} ± {100 * row.std:.1f} %" in tip.inner_text()
    page.mouse.move(2, 2)
    assert tip.is_hidden()
    heat = page.locator("#fig-clients .plot")
    heat.focus()
    page.keyboard.press("ArrowRight")
    table = read_story(tiny_comparison).runs[0]["table"]
    assert tip.inner_text().splitlines()[:2] == [
        "client 0, class 0",
        f"{table[0][0]} image{'' if table[0][0] == 1 else 's'}",
    ]
    page.keyboard.press("Escape")
    assert tip.is_hidden()


def test_run_client_setting_and_fusion_can_be_chosen(pages, visit, tiny_study):
    page = visit(pages["study"]).page
    assert "lambda 5, seed 0" in page.locator("#fig-lambda .shown").inner_text()
    everyone = page.locator("#fig-lambda .plot svg path").count()
    page.select_option("#client", "1")
    assert 0 < page.locator("#fig-lambda .plot svg path").count() < everyone
    assert "client 1" in page.locator("#fig-cosines .shown").inner_text()
    page.select_option("#run", label="FAFI, seed 1")
    assert "has no alignment" in page.locator("#fig-lambda .empty").inner_text()
    page.select_option("#panel", "1")
    second = read_story(*tiny_study).panels[1]
    assert second.title in page.locator("#fig-comparison .shown").inner_text()
    page.select_option("#fusion", "count_prototypes")
    texts = page.locator("#fig-comparison .plot svg text").all_text_contents()
    for label in second.labels:
        row = second.row(label, "count_prototypes")
        assert f"{100 * row.mean:.1f} ± {100 * row.std:.1f}" in texts
    page.locator("#fig-comparison details.values summary").click()
    page.wait_for_selector("#fig-comparison details.values tr")  # filled when the browser says that it was opened
    assert page.locator("#fig-comparison details.values tr").count() == 3 * (1 + 2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_phone_does_not_scroll_sideways(pages, visit, kind):
    found = visit(pages[kind], size=PHONE)
    width = found.page.evaluate("document.documentElement.scrollWidth")
    wide = found.page.evaluate(
        "[...document.querySelectorAll('figure, p, dl, nav, h1, h2, .controls, .wide, pre')]"
        ".filter(n => n.getBoundingClientRect().right > innerWidth + 1).map(n => n.outerHTML.slice(0, 80))"
    )
    assert (width, wide) == (PHONE["width"], [])
    assert found.errors == []


CUT = """() => [...document.querySelectorAll('figure.chart .plot svg')].flatMap(svg => {
  const box = svg.getBoundingClientRect();
  return [...svg.querySelectorAll('text')].filter(text => {
    const r = text.getBoundingClientRect();
    return r.left < box.left - 1 || r.right > box.right + 1 || r.top < box.top - 4 || r.bottom > box.bottom + 1;
  }).map(text => svg.closest('figure').id + ': ' + text.textContent);
})"""


@pytest.mark.parametrize("width", [390, 700, 1280])
def test_no_name_is_cut_and_no_page_scrolls_sideways(pages, visit, width):
    page = visit(pages["study"], size={"width": width, "height": 800}).page
    assert page.evaluate(CUT) == []
    assert page.evaluate("document.documentElement.scrollWidth") == width
    for figure in ("#fig-comparison", "#fig-settings", "#fig-checkpoints"):
        assert "…" not in page.locator(f"{figure} .plot").inner_text()


CONTRAST = """() => {
  const parse = text => text.match(/[0-9.]+/g).slice(0, 3).map(Number);
  const light = rgb => {
    const [r, g, b] = rgb.map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const ground = parse(getComputedStyle(document.body).backgroundColor);
  return [...document.querySelectorAll('.plot text.cell')].map(text => {
    const before = text.previousSibling, cell = before.tagName === 'rect' ? before : null;
    const over = cell ? parse(getComputedStyle(cell).fill) : ground, a = cell ? +cell.getAttribute('fill-opacity') : 0;
    const under = light(ground.map((v, k) => v + a * (over[k] - v))), ink = light(parse(getComputedStyle(text).fill));
    return (Math.max(under, ink) + 0.05) / (Math.min(under, ink) + 0.05);
  });
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_numbers_on_coloured_cells_can_be_read(pages, visit, scheme):
    page = visit(pages["run"], scheme=scheme).page
    page.select_option("#client", "0")  # the other rows fade
    found = page.evaluate(CONTRAST)
    assert len(found) > 50
    assert min(found) >= 4.5
    page.locator("#theme").click()  # nothing is drawn again: the ink has to follow by itself
    assert min(page.evaluate(CONTRAST)) >= 4.5


def test_a_touch_leaves_the_value_on_the_screen(pages, visit):
    page = visit(pages["comparison"], size=PHONE, has_touch=True).page
    plot = page.locator("#fig-comparison .plot")
    plot.scroll_into_view_if_needed()
    box = plot.locator("svg").bounding_box()
    point = plot.evaluate("node => node.chart.points[0]")
    page.touchscreen.tap(box["x"] + point["x"], box["y"] + point["y"])
    assert page.locator("#tip").is_visible()
    assert "seed 0" in page.locator("#tip").inner_text()
    page.locator("h1").tap()
    assert page.locator("#tip").is_hidden()


def test_wide_tables_say_so_and_scroll_by_keyboard(pages, visit):
    page = visit(pages["study"], size=PHONE).page
    table = page.locator(".wide:has(table.cost)").first
    assert table.evaluate("node => node.classList.contains('more') && node.tabIndex === 0")
    table.evaluate("node => { node.scrollLeft = node.scrollWidth; }")
    page.wait_for_function("!document.querySelector('.wide:has(table.cost)').classList.contains('more')")


@pytest.mark.parametrize("kind", KINDS)
def test_a_screen_reader_finds_its_way(pages, visit, kind):
    page = visit(pages[kind]).page
    levels = page.eval_on_selector_all("h1, h2, h3, h4", "nodes => nodes.map(n => Number(n.tagName[1]))")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    names = page.eval_on_selector_all(".plot svg", "nodes => nodes.map(n => n.getAttribute('aria-label'))")
    assert all(names)
    assert page.eval_on_selector_all("select", "nodes => nodes.every(n => n.labels.length === 1)")
    broken = "nodes => nodes.filter(n => !document.querySelector(n.getAttribute('href'))).length"
    assert page.eval_on_selector_all("nav a, .about a", broken) == 0
    page.locator("#theme").focus()
    page.keyboard.press("Tab")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_figures_are_drawn_for_the_width_of_the_paper(pages, visit):
    page = visit(pages["study"], size={"width": 1280, "height": 800}).page
    width = "document.querySelector('#fig-comparison .plot svg').viewBox.baseVal.width"
    before = page.evaluate(width)
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate(width) <= 700 < before
    assert page.locator("details.configuration[open]").count() == 1
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.evaluate(width) == before
    assert page.locator("details.configuration[open]").count() == 0


def test_it_prints_in_light_with_every_setting_and_no_controls(pages, visit):
    found = visit(pages["study"], scheme="dark")
    page = found.page
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.locator("select:visible, #theme:visible, details.values:visible").count() == 0
    assert page.locator("table.accuracy:visible").count() == 2
    sheets = page.pdf(format="A4")
    assert sheets.startswith(b"%PDF")
    assert 3 <= len(re.findall(rb"/Type\s*/Page\b", sheets)) <= 16


def test_dark_and_light(pages, visit):
    page = visit(pages["run"], scheme="dark").page
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(ground)
    page.locator("#theme").click()
    assert page.evaluate(ground) == "rgb(255, 255, 255)" != dark
    page.locator("#theme").click()
    assert page.evaluate(ground) == dark


def test_hostile_names_are_only_text(tiny_run, visit, tmp_path):
    story = read_story(tiny_run)
    evil = "</script><img src=x onerror=document.title='owned'>"
    run = story.runs[0]
    run["classes"][0] = run["label"] = evil
    run["fusions"] = {evil: next(iter(run["fusions"].values()))}
    (tmp_path / "evil.html").write_text(render(replace(story, title="t", lead=[evil])))
    found = visit(tmp_path / "evil.html")
    assert found.page.title().startswith("t ")
    assert found.page.locator("img").count() == 0
    assert found.errors == []
    assert evil in found.page.locator(".lead").inner_text()
    assert evil in found.page.locator("#fig-classes .legend").inner_text()
