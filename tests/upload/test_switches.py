"""What a switch hides is hidden everywhere: every field of an upload against every switch."""

from __future__ import annotations

import math

import pytest
import torch

from hospitals import TINY, digits, tiny_charter, typed
from oneflare.data import ClientData, Split
from oneflare.data.images import Damaged
from oneflare.data.labelled import Inventory
from oneflare.federation.ledger import Ledger
from oneflare.federation.member import Envelope, MemberData, make_upload_in, upload_notes
from oneflare.federation.page import _privacy
from oneflare.upload import read_layout, read_tensors
from oneflare.upload.checking import _FIELDS
from oneflare.upload.disclosure import disclose
from reliability.record import record_door

ANALYTIC = {"method": "analytic", "analytic": {"name": "random_conv", "filters": 3}}
SWITCHES = {
    "exact": TINY,
    "noised": TINY | {"upload": {"counts": "noised", "counts_epsilon": 0.05}, "fusions": "count_prototypes"},
    "withheld": TINY | {"upload": {"counts": "withheld"}, "fusions": "feature_mean"},
    "moments": TINY | {"upload": {"counts": "withheld", "evidence": "moments,gram"}, "fusions": "feature_mean"},
    "statistics": ANALYTIC,
    "private": ANALYTIC | {"upload": {"counts": "withheld", "statistics_epsilon": 1.0}},
}
TERMS = "the same for every member"
NAME = "who and when"
LEARNT = "trained or averaged numbers"
TOTAL = "how many images"
COUNTS = "how many of each class"
MASKS = "random numbers"
LEFT_OUT = "that images were left out; how many of how many, where counts are exact"
FIELDS = {
    **dict.fromkeys(("schema", "federation", "method", "epoch", "classes", "image", "encoder"), TERMS),
    **dict.fromkeys(("encoder_hash", "anchors", "dim", "statistics", "evidence", "counts", "fixed"), TERMS),
    **dict.fromkeys(("client", "member", "created", "signature"), NAME),
    **dict.fromkeys(("trust", "tensors", "digest"), LEARNT),  # trust: refused beside counts that are not exact
    "samples": TOTAL,
    "masked": MASKS,  # tests/federation/masked looks at what is beside them
    "notes": LEFT_OUT,
}
TENSORS = {
    "encoder.": LEARNT,
    "prototypes": LEARNT,
    "evidence.": LEARNT,
    "statistics.scatter": LEARNT,
    "statistics.sums": LEARNT,
    "statistics.counts": COUNTS,
    "counts": COUNTS,
}
SHOWN = {
    "exact": {TOTAL, COUNTS},
    "noised": set(),
    "withheld": {TOTAL},
    "moments": {TOTAL},
    "statistics": {TOTAL, COUNTS},
    "private": {TOTAL},  # public in the guarantee: neighbours have equally many images
}
"""what each switch lets out exactly"""


def upload_of(settings, number: int, folder):
    """Manifest and tensors of a member with the first images, and with one more that was left out as damaged."""
    train = digits()[0]
    data = ClientData.of(Split(train.images[:number], train.labels[:number]), 10)
    charter = tiny_charter(settings=settings)
    out = folder / f"{number}.safetensors"
    found = Inventory({"PNG": number + 1}, None, None, 1)
    notes = upload_notes(charter, MemberData(data, (), (Damaged("scan.png", "is cut short"),), found))
    envelope = Envelope("north", None, notes)
    make_upload_in(envelope, charter, data, out, ledger=Ledger(folder / f"{number}.ledger"))
    manifest, sizes = read_layout(out)
    return charter, data, manifest, sizes, read_tensors(out, manifest)


def kind_of(tensor: str) -> str:
    return next(kind for prefix, kind in TENSORS.items() if tensor.startswith(prefix))


def test_every_field_is_in_the_list():
    assert set(FIELDS) == _FIELDS, "say of a new field which switch hides it"


@pytest.mark.parametrize("switch", SWITCHES)
def test_what_a_switch_hides_is_nowhere_in_the_file(switch, tmp_path):
    numbers = (37, 70)  # two and three batches
    seen = [upload_of(SWITCHES[switch], number, tmp_path) for number in numbers]
    shown = SHOWN[switch]
    for _, data, manifest, _, tensors in seen:
        told = [tensor for name, tensor in tensors.items() if kind_of(name) == COUNTS]
        exact = [tensor for tensor in told if torch.equal(tensor, data.counts)]
        assert (exact == told and told != []) if COUNTS in shown else exact == []
        if TOTAL in shown:
            assert manifest["samples"] == len(data)
        else:
            assert manifest["samples"] == max(1, int(told[0].sum()))  # from what was noised already
        assert manifest["trust"] is None
        number = f"1 of {len(data) + 1}" if COUNTS in shown else "some"
        assert manifest["notes"] == [f"{number} images could not be used and were left out"]
    (_, _, one, sizes, first), (_, _, two, same_sizes, second) = seen
    assert sizes == same_sizes
    for field in set(one) | set(two):
        if FIELDS[field] == TERMS and field != "federation":  # two federations here, each with its own id
            assert one[field] == two[field], field
    for name, tensor in first.items():
        if not tensor.is_floating_point() and kind_of(name) != COUNTS:
            assert torch.equal(tensor, second[name]), f"{name} counts something"


BOTH = TINY | {"method": "flare_analytic", "analytic": {"name": "random_conv", "filters": 3}}
ROUNDED = SWITCHES["statistics"] | {"upload": {"statistics_dtype": "coarse"}}
READ_FIRST = {
    "statistics": ["This file identifies the images behind it", "found 100 % of the images", "--privacy private"],
    "rounded": ["those of products rounded", "found 100 % of the images", "rounding is no protection"],
    "both": ["This file identifies the images behind it", "a network that was trained on your images"],
    "private": ["differentially private", "epsilon 1, delta 1e-05", "holds for one upload"],
    "noised": ["without any formal promise of privacy", "The class counts carry noise"],
    "moments": ["without any formal promise of privacy", "exact averages over your images"],
}


@pytest.mark.parametrize("kind", READ_FIRST)
def test_whoever_lets_a_file_leave_reads_the_worst_first(kind, tmp_path, capsys):
    upload_of({**SWITCHES, "both": BOTH, "rounded": ROUNDED}[kind], 37, tmp_path)
    path = tmp_path / "37.safetensors"
    assert READ_FIRST[kind][0] in disclose(path).first[0]
    code, out, _ = typed(capsys, "upload", "show", str(path))
    assert code == 0
    words = " ".join(out.split())
    places = [words.find(text) for text in READ_FIRST[kind]]
    assert -1 not in places
    assert max(places) < words.index("what it reveals")


def test_the_card_names_all_that_uploads_hold():
    weights, sums = "Uploads are trained weights", "exact sums over images"
    for settings, held in ((TINY, (True, False)), (BOTH, (True, True)), (SWITCHES["statistics"], (False, True))):
        text = _privacy(tiny_charter(settings=settings))
        assert (weights in text, sums in text) == held
        assert "no formal privacy is promised" in text
    assert "(1, 1e-05)-differentially private" in _privacy(tiny_charter(settings=SWITCHES["private"]))


@pytest.mark.soak
def test_nobody_counts_the_images_behind_noised_counts(tmp_path):
    """The attack that worked: the batches that batch normalisation counted give the number of images."""
    found, numbers = 0, range(33, 289, 32)
    for number in numbers:
        charter, _, _, _, tensors = upload_of(SWITCHES["noised"], number, tmp_path)
        train = charter.terms.train
        batches = train.epochs * math.ceil(number / train.batch_size)
        whole = [tensor for name, tensor in tensors.items() if not tensor.is_floating_point() and name != "counts"]
        assert whole
        found += any(bool((tensor == batches).any()) for tensor in whole)
    assert found == 0
    record_door(
        "counts",
        promise="what a switch hides is hidden in every field of the upload",
        tried=f"a coordinator: every field against {len(SWITCHES)} switches; the batches of {len(numbers)} members "
        "with noised counts",
        outcome=f"{found} of {len(numbers)} members' numbers of images found; no whole number in the file depends on "
        "the data but those that are noised",
    )
