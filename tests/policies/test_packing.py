"""Core packing: hand-worked choices, and the promise that sizes which divide each other never fragment a node."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from rayneuron.policies.packing import choose, compact, nearest, runs

INF2 = (1, 2, 4, 8, 12, 24)


def test_runs_are_aligned() -> None:
    assert runs(range(24), 8, 24) == [0, 8, 16]
    assert runs(range(24), 12, 24) == [0, 12]
    assert runs(set(range(24)) - {9}, 8, 24) == [0, 16]
    assert runs(range(2, 10), 8, 24) == []


def test_small_models_share_a_corner() -> None:
    free = set(range(24))
    taken = []
    for size in (1, 1, 2, 4, 8):
        start = choose(free, size, 24, INF2)
        assert start is not None
        free -= set(range(start, start + size))
        taken.append((start, size))
    assert taken == [(0, 1), (1, 1), (2, 2), (4, 4), (8, 8)]
    assert choose(free, 8, 24, INF2) == 16


def test_the_run_that_spoils_least_is_taken() -> None:
    # 0-7 is taken. Four cores: 8-11 leaves 12-23 whole for a model of 12; 12, 16 or 20 would not.
    assert choose(set(range(8, 24)), 4, 24, INF2) == 8
    # 0-3 and 12 are taken. One core: 13 spoils nothing, 4 would spoil a run of four.
    assert choose(set(range(4, 24)) - {12}, 1, 24, INF2) == 13


def test_observed_fragmentation_is_refused() -> None:
    # bug_reports BR-04: 8 cores, 2-3 and 6-7 held, ask 4: Ray gave 0,1,4,5. With 4-7 free: 4.
    assert choose({0, 1, 4, 5}, 4, 8, (1, 2, 4, 8)) is None
    assert nearest({0, 1, 4, 5}, 4, 8, (1, 2, 4, 8)) == (2, 0)
    assert choose({0, 1, 4, 5, 6, 7}, 4, 8, (1, 2, 4, 8)) == 4
    assert nearest(set(), 4, 8, (1, 2, 4, 8)) is None


def test_compact() -> None:
    assert compact({0, 1, 2, 3, 6, 8, 9}) == "0-3, 6, 8-9"
    assert compact([]) == "none"


def test_every_mix_of_1_2_8_24_core_models_fits_in_any_order() -> None:
    for count in itertools.product(range(4), range(4), range(4)):
        sizes = [1] * count[0] + [2] * count[1] + [8] * count[2]
        if sum(sizes) > 24:
            continue
        for order in set(itertools.permutations(sizes)) if len(sizes) <= 6 else (sizes, sizes[::-1]):
            free = set(range(24))
            for size in order:
                start = choose(free, size, 24, (1, 2, 8, 24))
                assert start is not None, (order, size, free)
                free -= set(range(start, start + size))


@given(st.lists(st.sampled_from((1, 2, 4, 8, 16, 32)), max_size=40))
def test_powers_of_two_never_fragment(sizes: list[int]) -> None:
    free = set(range(32))
    for size in sizes:
        start = choose(free, size, 32, (1, 2, 4, 8, 16, 32))
        assert (start is not None) == (len(free) >= size)
        if start is not None:
            run = set(range(start, start + size))
            assert run <= free and start % size == 0
            free -= run


@given(st.sets(st.integers(0, 23)), st.sampled_from(INF2))
def test_a_choice_exists_exactly_when_an_aligned_run_is_free(free: set[int], size: int) -> None:
    possible = [s for s in range(0, 24, size) if s + size <= 24 and set(range(s, s + size)) <= free]
    start = choose(free, size, 24, INF2)
    assert (start in possible) if possible else start is None
