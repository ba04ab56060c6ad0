"""Page accounting: references, runs, segments."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slotd.daemon.kv.pages import PAGE, SEGMENT_PAGES, Pages, pages_for


def pages_with(n_segments: int) -> Pages:
    pages = Pages()
    for _ in range(n_segments):
        pages.add_segment()
    return pages


def test_pages_for() -> None:
    assert [pages_for(n) for n in (0, 1, PAGE, PAGE + 1)] == [0, 1, 1, 2]


def test_pages_come_in_ascending_runs() -> None:
    pages = pages_with(2)
    assert pages.allocate(3) == [0, 1, 2]
    assert pages.allocate(2) == [3, 4]
    assert pages.allocate(2, after=2) == [5, 6]


def test_the_run_behind_the_last_page_is_preferred() -> None:
    pages = pages_with(1)
    taken = pages.allocate(8)
    pages.release([0, 1, 4, 5, 6])
    assert pages.allocate(2, after=3) == [4, 5]
    assert taken[3] == 3


def test_the_shortest_run_that_is_long_enough_is_taken() -> None:
    pages = pages_with(1)
    pages.allocate(SEGMENT_PAGES)
    pages.release([0, 1, 2, 3, 6, 7, 9])
    assert pages.allocate(2) == [6, 7]
    assert pages.allocate(1) == [9]


def test_without_a_long_enough_run_the_longest_ones_are_taken() -> None:
    pages = pages_with(1)
    pages.allocate(SEGMENT_PAGES)
    pages.release([0, 3, 4, 5, 9, 10])
    assert pages.allocate(5) == [3, 4, 5, 9, 10]


def test_a_run_ends_with_its_segment() -> None:
    pages = pages_with(2)
    pages.allocate(SEGMENT_PAGES - 1)
    assert pages.allocate(4) == [16, 17, 18, 19]


def test_references() -> None:
    pages = pages_with(1)
    (page,) = pages.allocate(1)
    pages.share([page])
    assert pages.references(page) == 2
    pages.release([page])
    pages.release([page])
    assert (pages.references(page), pages.n_free, pages.n_used) == (0, SEGMENT_PAGES, 0)
    with pytest.raises(ValueError, match="page 0 has no owner"):
        pages.release([page])
    with pytest.raises(ValueError, match="page 0 has no owner"):
        pages.share([page])


def test_more_than_there_is_changes_nothing() -> None:
    pages = pages_with(1)
    with pytest.raises(ValueError, match="17 pages wanted, 16 are free"):
        pages.allocate(17)
    assert pages.n_free == SEGMENT_PAGES


def test_segments_come_and_go() -> None:
    pages = pages_with(3)
    held = pages.allocate(SEGMENT_PAGES + 1)
    assert pages.free_segments() == [2]
    pages.remove_segment(2)
    assert pages.n_free == SEGMENT_PAGES - 1
    with pytest.raises(ValueError, match="segment 0 is not free"):
        pages.remove_segment(0)
    pages.release(held[:SEGMENT_PAGES])
    pages.remove_segment(0)
    assert pages.add_segment() == 0
    assert pages.add_segment() == 2
    assert pages.add_segment() == 3


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["take", "share", "give"]), st.integers(0, 12)), max_size=30))
def test_a_page_has_its_owners_and_no_others(steps: list[tuple[str, int]]) -> None:
    pages = pages_with(2)
    owners: list[list[int]] = []
    for step, number in steps:
        if step == "take" and number <= pages.n_free:
            taken = pages.allocate(number)
            assert len(set(taken)) == number
            assert not set(taken) & {page for held in owners for page in held}
            owners.append(taken)
        elif step == "share" and owners:
            owners.append(list(owners[number % len(owners)]))
            pages.share(owners[-1])
        elif step == "give" and owners:
            pages.release(owners.pop(number % len(owners)))
        held_pages = [page for held in owners for page in held]
        for page in range(2 * SEGMENT_PAGES):
            assert pages.references(page) == held_pages.count(page)
        assert pages.n_used == len(set(held_pages))


# ----- moving


@given(
    st.lists(st.integers(0, 3), min_size=SEGMENT_PAGES, max_size=5 * SEGMENT_PAGES),
    st.integers(0, 4),
    st.sets(st.integers(0, 5 * SEGMENT_PAGES - 1), max_size=3),
)
def test_compaction_leaves_as_few_segments_as_the_pages_need(
    owners: list[int], removed: int, wanted_fixed: set[int]
) -> None:
    pages = Pages()
    n_segments = -(-len(owners) // SEGMENT_PAGES)
    for _ in range(n_segments):
        pages.add_segment()
    taken = pages.allocate(len(owners))
    for page, count in zip(taken, owners, strict=True):
        pages.share([page] * count)
        pages.release([page])
    if removed in pages.free_segments():
        pages.remove_segment(removed)
    before = sorted(count for count in owners if count)
    fixed = {page for page in wanted_fixed if page < len(owners) and owners[page]}
    moves = pages.compaction(fixed)
    pages.relocate(moves)
    held = [page for page in range(n_segments * SEGMENT_PAGES) if pages.references(page) > 0]
    assert sorted(pages.references(page) for page in held) == before
    segments = {page // SEGMENT_PAGES for page in held}
    anchored = {page // SEGMENT_PAGES for page in fixed}
    assert len(segments) == max(-(-len(before) // SEGMENT_PAGES), len(anchored))
    assert pages.compaction(fixed) == {}
    assert not fixed.intersection(moves)
    assert not set(moves).intersection(moves.values())


def test_owners_beside_the_known_ones() -> None:
    pages = Pages()
    pages.add_segment()
    pages.allocate(4)
    pages.share([1, 2, 2])
    assert pages.owners_beside([]) == {0, 1, 2, 3}
    assert pages.owners_beside([[0, 1, 2], [1, 2, 3]]) == {2}
    assert pages.owners_beside([[0, 1, 2], [1, 2, 3], [2]]) == set()


def test_a_page_moves_only_to_a_free_place() -> None:
    pages = Pages()
    pages.add_segment()
    pages.allocate(2)
    with pytest.raises(ValueError, match="page 0 can not move to 1"):
        pages.relocate({0: 1})
    with pytest.raises(ValueError, match="page 5 can not move to 6"):
        pages.relocate({0: 3, 5: 6})
    assert [pages.references(page) for page in range(4)] == [1, 1, 0, 0]
