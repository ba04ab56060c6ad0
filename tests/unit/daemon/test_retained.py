from array import array

import numpy as np

from slotd.daemon.retained import MIN_SHARED, Retained, RetainedSequences, common_prefix
from slotd.daemon.sequence import Sequence


def sequence_of(ids: list[int]) -> Sequence:
    sequence = Sequence()
    sequence.tokens = array("i", ids)
    return sequence


def ids_of(ids: list[int]) -> np.ndarray:
    return np.asarray(ids, dtype=np.int32)


def filled(*texts: list[int], limit: int = 8) -> tuple[RetainedSequences, list[Sequence]]:
    closed: list[Sequence] = []
    retained = RetainedSequences(limit, closed.append)
    for number, text in enumerate(texts):
        retained.add(Retained(number, sequence_of(text), ()))
    return retained, closed


def test_common_prefix() -> None:
    assert common_prefix(ids_of([1, 2, 3]), ids_of([1, 2, 4, 5])) == 2
    assert common_prefix(ids_of([1, 2]), ids_of([1, 2, 4])) == 2
    assert common_prefix(ids_of([]), ids_of([1])) == 0


def test_the_longest_shared_prefix_wins() -> None:
    text = list(range(100))
    retained, _ = filled(text[:40], text[:70], text[:50])
    match = retained.best_match(ids_of(text))
    assert match is not None
    assert match[1] == 70
    assert match[0].key == 1


def test_the_last_prompt_token_is_never_taken_as_known() -> None:
    text = list(range(40))
    retained, _ = filled(text)
    match = retained.best_match(ids_of(text))
    assert match is not None
    assert match[1] == 39


def test_a_short_match_is_no_match() -> None:
    text = list(range(40))
    retained, _ = filled(text[: MIN_SHARED - 1])
    assert retained.best_match(ids_of(text)) is None


def test_the_oldest_leaves_and_is_closed() -> None:
    retained, closed = filled([1], [2], [3], limit=2)
    assert [entry.key for entry in retained] == [1, 2]
    assert [list(sequence.tokens) for sequence in closed] == [[1]]


def test_a_key_used_again_replaces_its_sequence() -> None:
    retained, closed = filled([1])
    retained.add(Retained(0, sequence_of([9]), ()))
    assert len(retained) == 1
    assert list(closed[0].tokens) == [1]


def test_latest_looks_only_at_wanted_keys() -> None:
    retained = RetainedSequences(4, lambda _: None)
    retained.add(Retained(1, sequence_of([1]), ()))
    retained.add(Retained("a", sequence_of([2]), ()))
    latest = retained.latest(lambda key: isinstance(key, int))
    assert latest is not None
    assert latest.key == 1
