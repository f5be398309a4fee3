"""Whether to deploy: one test for every sentence of the rule."""

from __future__ import annotations

from dataclasses import replace

import pytest
from story_parts import good_scores, scored, small_federation

from oneflare.federation.verdict import judge, listed
from score_parts import example_scores


@pytest.fixture(scope="module")
def fused(tmp_path_factory):
    return small_federation(tmp_path_factory.mktemp("verdict"))


def test_nothing_against_it_and_better_than_alone(fused):
    content = scored(fused, good_scores()).content
    verdict = judge(content)
    pooled = content.pooled
    assert (verdict.answer, verdict.reasons) == ("deploy", ())
    assert f"{100 * pooled.together.accuracy.value:.1f} %" in verdict.sentence
    assert f"{100 * pooled.comparison.gain.value:.1f} points" in verdict.sentence
    assert "1,590 test images at 3 members" in verdict.sentence


def test_nobody_measured_it(fused):
    verdict = judge(fused.content)
    assert verdict.answer == "unmeasured"
    assert verdict.word == "Do not deploy yet."


@pytest.mark.parametrize(
    ("fields", "answer", "words"),
    [
        ({"right": 0.1, "alone": 0.1}, "no", "no better than guessing one of 3 classes"),
        ({"right": 0.8, "alone": 0.97}, "no", "own models are better by"),
        ({"alone": None}, "care", "no member compared it"),
        ({"supports": (200, 0, 180)}, "care", "nobody has test images of 'melanoma'"),
        ({"supports": (200, 3, 180)}, "care", "figures of 'melanoma' and 'naevus', because groups are too small"),
        ({"supports": (20, 15, 18), "right": 0.8, "alone": 0.5}, "care", "159 images are too few"),
        (
            {"supports": (200, 150, 180), "patients": True, "right": 0.6, "alone": 0.3},
            "care",
            "its probabilities are wrong",
        ),
    ],
)
def test_what_members_measured_can_speak_against_it(fused, fields, answer, words):
    verdict = judge(scored(fused, good_scores(**fields)).content)
    assert verdict.answer == answer
    assert any(words in text for text in (verdict.sentence, *verdict.reasons)), verdict


def test_a_weak_class_is_named_with_its_support(fused):
    scores = good_scores()
    weak = [replace(one, together=replace(one.together, classes=_weaker(one.together.classes))) for one in scores]
    verdict = judge(scored(fused, weak).content)
    assert verdict.answer == "care"
    assert "'melanoma' is recognised in 30.0 %" in verdict.sentence
    assert "of 450 images only" in verdict.sentence


def _weaker(classes):
    one = classes[1]
    rate = replace(one.sensitivity, low=0.25, value=0.3, high=0.35)
    return (classes[0], replace(one, sensitivity=rate), classes[2])


def test_members_who_lose_or_are_silent_are_named(fused):
    scores = good_scores()
    loser = example_scores("south", supports=(200, 150, 180), right=0.8, alone=0.99, patients=False, seed=7)
    verdict = judge(scored(fused, [scores[0], scores[1], loser]).content)
    assert verdict.answer == "care"
    assert "at south its own model is better by" in verdict.sentence
    verdict = judge(scored(fused, scores[:2]).content)
    assert verdict.answer == "care"
    assert "south sent no scores" in verdict.sentence


def test_training_and_the_log_can_speak_against_it(fused):
    content = scored(fused, good_scores()).content
    unseen = replace(content, members=tuple(replace(one, counts=(9, 0, 9)) for one in content.members))
    assert "no member has trained on 'melanoma'" in judge(unseen).sentence
    suspect = replace(content, suspects={"north": "does not fit", "elsewhere": "is left out"})
    assert "the upload of north does not fit" in judge(suspect).sentence
    assert "log of the federation is not in order" in judge(content, ["line 3"]).sentence


def test_lists_of_names():
    assert listed(["a"]) == "a"
    assert listed(["a", "b", "c"]) == "a, b and c"
    assert listed([str(number) for number in range(10)], 3) == "0, 1, 2 and 7 more"
