"""Every row of a prompt is walked once, in order, whole blocks at absolute multiples of 64."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from slotd.daemon.ops.delta_plan import BLOCK, Piece, pack_tables, plan_prompt

LENGTHS = st.lists(st.tuples(st.integers(1, 400), st.integers(0, 200)), min_size=1, max_size=4)


@settings(max_examples=40)
@given(LENGTHS, st.booleans(), st.integers(1, 5))
def test_rows_are_walked_in_order(lengths: list[tuple[int, int]], chunked: bool, most_blocks: int) -> None:
    pieces, first = [], 0
    for number, (n, committed) in enumerate(lengths):
        pieces.append(Piece(first, n, committed, 100 + number if committed else 0, 200 + number))
        first += n
    by_write = {piece.write: piece for piece in pieces}
    walked = {piece.write: piece.first for piece in pieces}
    launches = plan_prompt(pieces, chunked=chunked, most_blocks=most_blocks)
    for number, launch in enumerate(launches):
        assert launch.n_blocks <= most_blocks
        assert not launch.early or (number == 0 and launch.first_rows is None)
        for part in launch.pieces:
            piece, at = by_write[part.write], walked[part.write]
            assert part.read == (piece.read if at == piece.first else piece.write)
            if launch.first_rows is None:
                assert part.n_rows <= BLOCK
                assert part.first == at
                walked[part.write] += part.n_rows
            else:
                assert (piece.committed + at - piece.first) % BLOCK == 0
                blocks = range(at, at + part.n_rows * BLOCK, BLOCK)
                assert launch.first_rows[part.first : part.first + part.n_rows] == tuple(blocks)
                walked[part.write] = blocks.stop
    assert all(walked[piece.write] == piece.first + piece.n_rows for piece in pieces)
    if chunked:
        whole = sum(
            max(0, (piece.committed + piece.n_rows) // BLOCK - -(-piece.committed // BLOCK))
            for piece in pieces
        )
        assert sum(launch.n_blocks for launch in launches) == whole
    else:
        assert not any(launch.n_blocks for launch in launches)


def test_tables() -> None:
    launches = plan_prompt([Piece(0, 200, 10, 7, 8), Piece(200, 64, 0, 0, 9)])
    data, places = pack_tables(launches)

    def numbers(at: int, n: int, dtype: type[np.generic]) -> list[int]:
        assert at % 16 == 0
        return np.frombuffer(data, dtype, n, at).tolist()

    front, blocks, end = places
    assert numbers(front.read, 1, np.uint64) == [7]
    assert numbers(front.n_rows, 1, np.int32) == [54]
    assert numbers(blocks.read, 2, np.uint64) == [8, 0]
    assert numbers(blocks.write, 2, np.uint64) == [8, 9]
    assert numbers(blocks.first, 2, np.int32) == [0, 2]
    assert numbers(blocks.n_rows, 2, np.int32) == [2, 1]
    assert numbers(blocks.count, 1, np.int32) == [2]
    assert numbers(blocks.first_rows, 3, np.int32) == [54, 118, 200]
    assert numbers(end.first, 1, np.int32) == [182]
