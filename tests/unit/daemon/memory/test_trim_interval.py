from hypothesis import given
from hypothesis import strategies as st

from slotd.daemon.memory.trim_interval import TrimInterval


def count(interval: int, pieces: list[int]) -> int:
    trims = TrimInterval(interval)
    return sum(trims.completed(piece) for piece in pieces)


def test_off_never_trims() -> None:
    assert count(0, [1000] * 50) == 0


def test_a_trim_comes_at_the_first_boundary_at_or_past_the_interval() -> None:
    trims = TrimInterval(100)
    assert [trims.completed(60) for _ in range(5)] == [False, True, False, True, False]


def test_the_run_of_the_source() -> None:
    """60,363 tokens at an interval of 8,192 in pieces of 512: seven trims (S147)."""
    assert count(8192, [512] * (60363 // 512) + [60363 % 512]) == 7


@given(st.integers(1, 20), st.integers(1, 40), st.integers(0, 500))
def test_p48_aligned_pieces_give_floor_of_tokens_by_interval(piece: int, per: int, n_pieces: int) -> None:
    assert count(piece * per, [piece] * n_pieces) == n_pieces * piece // (piece * per)
