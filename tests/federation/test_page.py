"""The page of a federation in a real browser: the story of eight hospitals, and what hostile names do to it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from eight import CLASSES, LATE, NAMES, REFUSED, REMOVED, STAYING, eight_hospitals
from story_parts import good_scores, scored, small_federation

from browser import PHONE
from oneflare.federation.page import read_federation, write_federation_page

pytest.importorskip("playwright")

DESK = {"width": 1280, "height": 800}
FIRST = ("#verdict", ".tiles", "#gains", "#never")
SEEN = """selectors => selectors.map(selector => {
  const box = document.querySelector(selector).getBoundingClientRect();
  return box.height > 0 && box.bottom <= innerHeight && box.right <= innerWidth + 1; })"""


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    return eight_hospitals(tmp_path_factory.mktemp("eight"))


@pytest.mark.soak
def test_the_first_screen_answers_without_scrolling(eight, visit):
    pooled = read_federation(eight).content.pooled
    for size in (DESK, {"width": 390, "height": 844}):
        found = visit(eight / "report.html", size=size)
        page = found.page
        assert (found.errors, found.requests) == ([], [(eight / "report.html").as_uri()])
        assert page.evaluate(SEEN, list(FIRST)) == [True] * len(FIRST)
        assert page.evaluate("document.documentElement.scrollWidth") == size["width"]
    verdict = page.inner_text("#verdict")
    accuracy = pooled.together.accuracy
    assert verdict.startswith("Deploy")
    assert f"{100 * accuracy.value:.1f} % ({100 * accuracy.low:.1f} to {100 * accuracy.high:.1f})" in verdict
    assert "200 test images of 100 patients at 5 members" in verdict
    tiles = page.inner_text(".tiles")
    assert pooled.together.weakest.name in tiles
    assert "model.safetensors" in tiles
    rows = page.locator("#gains tbody tr").all_inner_texts()
    for row, one in zip(rows, pooled.members, strict=True):
        assert row.split()[:3] == [
            one.member, f"{100 * one.alone.accuracy.value:.1f}", f"{100 * one.together.accuracy.value:.1f}",
        ]  # fmt: skip


@pytest.mark.soak
def test_who_is_in_refused_late_and_removed(eight, visit):
    page = visit(eight / "report.html").page
    text = page.inner_text("body")
    assert "client 0" not in text.lower()
    assert "NaN" not in page.inner_html("main")
    told = {row.split("\t")[0]: row for row in page.locator("#absent-table tbody tr").all_inner_texts()}
    assert set(told) == {REFUSED, LATE, REMOVED}
    assert "refused" in told[REFUSED]
    assert "digest" in told[REFUSED]
    assert "late" in told[LATE]
    assert "after the deadline" in told[LATE]
    assert "removed" in told[REMOVED]
    members = page.locator("#member-table tbody th").all_inner_texts()
    assert members == list(STAYING)
    names = page.locator("#fig-owners .plot svg text").all_text_contents()
    assert {*STAYING, *CLASSES} <= set(names)
    versions = page.locator("#version-table tbody tr").all_inner_texts()
    assert "deleted" in versions[0]
    assert REMOVED in versions[0]
    assert "(in use)" in versions[1]
    assert "all in order" in page.inner_text("#timeline")
    assert {name for name in NAMES if name in page.inner_text("#steps")} == set(NAMES)
    assert "identifies the images behind it" in page.inner_text("#privacy")
    assert "Not for children." in page.inner_text("#limits")


@pytest.mark.soak
def test_tables_say_what_the_result_says(eight, visit):
    page = visit(eight / "report.html").page
    classes = read_federation(eight).content.pooled.together.classes
    for row, one in zip(page.locator("#class-table tbody tr").all(), classes, strict=True):
        values = row.locator("[data-value]").evaluate_all("cells => cells.map(cell => +cell.dataset.value)")
        measured = [one.sensitivity, one.specificity, one.auroc, one.average_precision]
        assert values[2:] == [one.support, *(rate.value for rate in measured if rate is not None)]
    confusion = json.loads(page.locator("#story").text_content())["confusion"]
    assert confusion == [list(row) for row in read_federation(eight).content.pooled.together.confusion]
    page.locator("#fig-owners .plot").focus()
    page.keyboard.press("ArrowRight")
    assert f"{STAYING[0]}, {CLASSES[0]}" in page.inner_text("#tip")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_federation(tmp_path_factory.mktemp("small"))


def test_without_scores_it_says_so_first_and_how_to_get_them(small, visit):
    page = visit(write_federation_page(small)).page
    text = page.inner_text("#verdict")
    assert text.startswith("Do not deploy yet.")
    assert "oneflare evaluate model.safetensors" in text
    assert "oneflare server scores federation" in text
    assert page.locator("#gains").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_phone_dark_and_print(small, visit, scheme):
    fused = scored(small, good_scores(supports=(40, 25, 30)))
    found = visit(write_federation_page(fused), size=PHONE, scheme=scheme)
    wide = found.page.evaluate(
        "[...document.querySelectorAll('figure, p, dl, nav, h1, h2, .wide, .gains, pre')]"
        ".filter(n => n.getBoundingClientRect().right > innerWidth + 1).map(n => n.outerHTML.slice(0, 80))"
    )
    assert (found.errors, wide) == ([], [])
    undrawn = found.page.eval_on_selector_all(
        "figure.chart", "figures => figures.filter(f => !f.querySelector('.plot svg, .plot .empty')).map(f => f.id)"
    )
    assert undrawn == []
    assert found.page.pdf()[:4] == b"%PDF"
    found.page.set_viewport_size({"width": 690, "height": 980})  # A4 without its margins
    found.page.emulate_media(media="print")
    cut = "[...document.querySelectorAll('table')].filter(n => n.getBoundingClientRect().right > 691).map(n => n.id)"
    assert found.page.evaluate(cut) == []
    unlabelled = found.page.eval_on_selector_all(
        "table", "tables => tables.filter(t => !t.querySelector('th[scope=col]') && t.tBodies[0]).map(t => t.id)"
    )
    assert unlabelled == []


def test_names_of_others_are_text_and_never_markup(tmp_path, visit):
    """Class names come from the coordinator, reasons and file names from anybody."""
    evil = "<img src=x onerror=alert(1)>"
    classes = ("</script><b>", "a&b", "naevus")
    fused = small_federation(tmp_path, classes=("x", "y", "z"))
    content = replace(
        fused.content,
        classes=classes,
        suspects={"north": evil},
        notes=(evil,),
        missing=(evil,),
    )
    content = replace(content, scores=tuple(good_scores(names=classes)))
    content = replace(content, scores=tuple(replace(one, model=content.own.sha256) for one in content.scores))
    found = visit(write_federation_page(replace(fused, content=content)))
    assert found.page.locator("img, section b").count() == 0
    assert found.errors == []
    assert evil in found.page.inner_text("#absent")
    assert "</script><b>" in found.page.inner_text("#class-table")
