from __future__ import annotations

import threading

import torch
from hypothesis import given
from hypothesis import strategies as st

from oneflare.core import seeds
from oneflare.core.seeds import derive
from oneflare.nn.generator import initial_generator

PARTS = st.lists(st.text(alphabet="a1/\\", max_size=3), max_size=4)


@given(PARTS, PARTS)
def test_two_names_are_two_streams(one, other):
    assert (derive(0, *one) == derive(0, *other)) == (one == other)
    if len(one) > 1:
        assert derive(0, *one) != derive(0, "/".join(one))


def test_where_a_part_ends_counts():
    assert derive(0, "a", 1) != derive(0, "a/1")
    assert derive(0, "a\\", "b") != derive(0, "a\\/b")


def test_streams_stay_what_they_were():
    """Old runs resume with the same draws: only names with a slash or a backslash within a part were changed."""
    assert derive(0, "a", 1) == 6452566503321283255
    assert derive(7, 3, "augment", 12) == 176029793971384682
    assert derive(0, "initial weights") == 2458874617729642689


class Watched:
    """The lock, with a count of how often it was taken."""

    def __init__(self) -> None:
        self.lock, self.taken = threading.Lock(), 0

    def __enter__(self):
        self.lock.acquire()
        self.taken += 1

    def __exit__(self, *error):
        self.lock.release()


def test_a_generator_waits_for_the_lock_of_the_global_stream(monkeypatch):
    watched = Watched()
    monkeypatch.setattr(seeds, "_GLOBAL", watched)
    initial_generator(4, 1, 8, 2, seed=0)
    assert watched.taken == 1


def test_a_generator_leaves_the_global_stream_as_it_was():
    state = torch.random.get_rng_state()
    one, two = (initial_generator(4, 1, 8, 2, seed=3).state_dict() for _ in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert torch.equal(torch.random.get_rng_state(), state)
