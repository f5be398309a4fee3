"""The protocol in memory: whoever is missing, the total is the sum of the others, number by number."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from oneflare.errors import RunError, UploadError
from oneflare.federation.masked.opening import Round, check_enough, check_release, unmasked
from oneflare.federation.masked.release import Release
from oneflare.federation.masked.rounds import Request, Uploaded
from oneflare.upload.masking.keys import MaskKey
from oneflare.upload.masking.masks import open_share, pair_seed
from oneflare.upload.masking.message import decoded, encoded, mask, new_salt
from oneflare.upload.masking.roster import Enrolment, Roster

FEDERATION = "0" * 64


def make_roster(number: int, threshold: int) -> tuple[Roster, dict[str, MaskKey]]:
    keys = {f"m{index:03d}": MaskKey.generate() for index in range(number)}
    rows = [
        Enrolment(federation=FEDERATION, member=name, mask=key.public, images=9, created="2027-01-01")
        for name, key in keys.items()
    ]
    return Roster(federation=FEDERATION, number=1, threshold=threshold, members=tuple(rows)), keys


def masked_round(roster, keys, sums):
    """Every member of `sums` masks its numbers; the request names them."""
    words, notes = {}, {}
    for name, numbers in sums.items():
        words[name] = np.array(numbers, dtype=np.int64).view(np.uint64).copy()
        notes[name] = mask(words[name], roster, name, keys[name], new_salt())
    uploaded = {name: Uploaded(digest="1" * 64, salt=note.salt, sealed=note.sealed) for name, note in notes.items()}
    request = Request(federation=FEDERATION, roster=roster.digest, created="2027-01-02", uploaded=uploaded)
    return Round(roster, request, notes), words


def answer(closed: Round, keys, name: str) -> Release:
    """What an honest member releases, by the words of the protocol."""
    roster, request = closed.roster, closed.request
    shares = {
        other: encoded(
            open_share(
                keys[name],
                keys[other].public,
                roster.digest,
                bytes.fromhex(row.salt),
                (other, name),
                decoded(row.sealed[name], 49),
            )
        )
        for other, row in request.uploaded.items()
    }
    pairs = {
        other: encoded(pair_seed(keys[name], keys[other].public, roster.digest, (name, other)))
        for other in request.missing(roster)
    }
    return Release(
        federation=FEDERATION,
        roster=roster.digest,
        request=request.digest,
        member=name,
        shares=shares,
        pairs=pairs if name in request.uploaded else {},
    )


def total_of(closed, words, answers):
    for name, one in answers.items():
        check_release(name, one, closed)
    check_enough(closed, answers)
    copies = [(name, vector.copy()) for name, vector in words.items()]
    return unmasked(closed, copies, answers).view(np.int64).tolist()


def whole(members: int):
    """Numbers that `members` may have without an overflow of their sum, the extremes among them."""
    most = (2**63 - 1) // members
    return st.sampled_from([0, 1, -1, most, -most]) | st.integers(-most, most)


@settings(max_examples=25)
@given(st.data())
def test_the_total_is_the_sum_of_whoever_is_there(data):
    number = data.draw(st.integers(2, 9))
    threshold = data.draw(st.integers(2, number))
    roster, keys = make_roster(number, threshold)
    there = data.draw(st.sets(st.sampled_from(roster.names), min_size=threshold))
    length = data.draw(st.integers(1, 5))
    sums = {name: data.draw(st.lists(whole(number), min_size=length, max_size=length)) for name in sorted(there)}
    closed, words = masked_round(roster, keys, sums)
    missing = set(roster.names) - there
    others = sorted(there) if missing else random.Random(0).sample(sorted(there), threshold)
    answers = {name: answer(closed, keys, name) for name in others}
    assert total_of(closed, words, answers) == [sum(column) for column in zip(*sums.values(), strict=True)]


def test_a_hundred_members_of_whom_forty_nine_are_missing():
    roster, keys = make_roster(100, 51)
    there = sorted(random.Random(1).sample(roster.names, 51))
    sums = {name: [index, -index, (2**63 - 1) // 100, -((2**63 - 1) // 100)] for index, name in enumerate(there)}
    closed, words = masked_round(roster, keys, sums)
    answers = {name: answer(closed, keys, name) for name in there}
    assert total_of(closed, words, answers) == [sum(column) for column in zip(*sums.values(), strict=True)]


def test_members_without_an_upload_help_to_open_and_fewer_than_needed_do_not():
    roster, keys = make_roster(4, 3)
    closed, words = masked_round(roster, keys, {name: [7] for name in roster.names[:3]})
    answers = {name: answer(closed, keys, name) for name in roster.names}
    assert answers["m003"].pairs == {}
    assert total_of(closed, words, answers) == [21]
    with pytest.raises(
        RunError, match="m003 sent no upload, so everybody who did must answer the request; ask m002 to"
    ):
        check_enough(closed, {name: answers[name] for name in ("m000", "m001", "m003")})
    everybody, _ = masked_round(roster, keys, {name: [7] for name in roster.names})
    two = {name: answer(everybody, keys, name) for name in roster.names[:2]}
    with pytest.raises(RunError, match=r"2 of 3 needed answers .*\(m000, m001\); ask m002, m003 to run"):
        check_enough(everybody, two)


def test_wrong_secrets_are_named_with_whoever_sent_them():
    roster, keys = make_roster(4, 3)
    closed, _ = masked_round(roster, keys, {name: [7] for name in roster.names[:3]})
    good, other = answer(closed, keys, "m000"), answer(closed, keys, "m001")
    wrong = [
        (
            good.model_copy(update={"shares": other.shares}),
            "the share of m000's mask is not the one that m000 gave m000",
        ),
        (
            good.model_copy(update={"pairs": other.pairs}),
            "the seed in common with m003 is not the one that m000 masked",
        ),
        (good.model_copy(update={"pairs": {}}), "does not answer for the members that the request names; ask m000"),
        (good.model_copy(update={"request": "2" * 64}), "answers another request"),
        (good.model_copy(update={"roster": "2" * 64}), "answers for another federation or roster"),
        (good.model_copy(update={"member": "m009"}), "m009 is not in roster 1"),
        (good.model_copy(update={"shares": {"m000": "AA"}}), "the share of m000's mask"),
    ]
    for one, reason in wrong:
        with pytest.raises(UploadError, match=reason):
            check_release("x.release.json", one, closed)


def test_a_personal_mask_that_was_shared_wrongly_is_found():
    roster, keys = make_roster(3, 2)
    closed, words = masked_round(roster, keys, {name: [1] for name in roster.names})
    lying = dict(closed.notes)
    lying["m001"] = type(lying["m001"])(**(lying["m001"].to_dict() | {"personal": "3" * 64}))
    answers = {name: answer(closed, keys, name) for name in roster.names}
    with pytest.raises(RunError, match="m001 shared another one"):
        unmasked(Round(roster, closed.request, lying), list(words.items()), answers)


@pytest.fixture(scope="module")
def noise():
    """The same sums, all zero, masked three times by one member."""
    roster, keys = make_roster(3, 2)
    name, made = "m001", []
    for _ in range(3):
        vector = np.zeros(50_000, dtype=np.uint64)
        mask(vector, roster, name, keys[name], new_salt())
        made.append(vector)
    return made


def test_masked_numbers_pass_standard_tests_of_randomness(noise):
    """Byte histogram, runs of bits, serial correlation; an honest cipher fails one of these once in a billion."""
    for vector in noise:
        content = vector.view(np.uint8)
        counted = np.bincount(content, minlength=256)
        assert stats.chisquare(counted).pvalue > 1e-10
        bits = np.unpackbits(content).astype(np.int8)
        ones = int(bits.sum())
        assert abs(2 * ones - len(bits)) < 6.5 * len(bits) ** 0.5
        runs = 1 + int((bits[1:] != bits[:-1]).sum())
        assert abs(runs - len(bits) / 2) < 6.5 * len(bits) ** 0.5 / 2
        for lag in (1, 2, 8, 64):
            centred = content - 127.5
            correlation = float((centred[:-lag] * centred[lag:]).mean() / centred.var())
            assert abs(correlation) < 6.5 / len(content) ** 0.5


def test_two_masked_uploads_of_the_same_data_have_nothing_in_common(noise):
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert not np.intersect1d(noise[one], noise[other]).size
        difference = (noise[one] - noise[other]).view(np.uint8)
        assert stats.chisquare(np.bincount(difference, minlength=256)).pvalue > 1e-10
        assert abs(np.corrcoef(noise[one].view(np.uint8), noise[other].view(np.uint8))[0, 1]) < 0.011
