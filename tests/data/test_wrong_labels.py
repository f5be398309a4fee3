"""Wrong labels at some clients: how many, whose, and that nobody else's change."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import oneflare
from conftest import TINY
from oneflare.data.wrong_labels import wrong
from oneflare.errors import ConfigError
from oneflare.methods.resolve import resolve


@given(st.integers(2, 12), st.integers(0, 60), st.floats(0.01, 1.0), st.integers(0, 1000))
def test_as_many_labels_are_wrong_as_asked_for(classes, number, share, seed):
    labels = np.random.default_rng(seed).integers(0, classes, number)
    changed = wrong(labels, classes, share, np.random.default_rng(seed))
    assert (changed != labels).sum() == round(share * number)
    assert ((changed >= 0) & (changed < classes)).all()


def test_every_other_class_is_equally_likely():
    changed = wrong(np.full(9000, 3), 4, 1.0, np.random.default_rng(0))
    assert np.bincount(changed, minlength=4)[3] == 0
    assert np.bincount(changed, minlength=4)[:3] == pytest.approx([3000] * 3, rel=0.06)


def test_only_the_noisy_clients_change(tmp_path):
    settings = {**TINY, "fusions": ["average"]}
    clean, noisy, same = (
        oneflare.run(**settings | {"partition": {"clients": 3, "alpha": 100.0, **noise}}, seed=1, out=tmp_path / name)
        for name, noise in (("a", {}), ("b", {"label_noise": 0.5, "noisy_clients": 1}), ("c", {"label_noise": 0.5}))
    )
    texts = [(run.folder / "partition.json").read_text() for run in (clean, noisy, same)]
    tables = [np.array(json.loads(text)["table"]) for text in texts]
    assert (tables[0][0] != tables[1][0]).any()
    assert (tables[0][1:] == tables[1][1:]).all()
    assert (tables[1] == tables[2]).all(), "one client is noisy by default"
    assert tables[0].sum() == tables[1].sum() == 200


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ({"noisy_clients": 2}, "noisy_clients does nothing alone; set label_noise"),
        ({"noisy_clients": 6, "label_noise": 0.1}, "noisy_clients=6 is more than the 5 clients"),
    ],
)
def test_noise_that_would_do_nothing_is_refused(split, message):
    with pytest.raises(ConfigError, match=message):
        resolve({"partition": split})
