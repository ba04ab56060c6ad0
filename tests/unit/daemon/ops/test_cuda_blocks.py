"""Buffers of a draft's calls: places count from the first page that is left, positions do not."""

from __future__ import annotations

import numpy as np
import pytest

from slotd.daemon.ops.batch import TILE
from slotd.daemon.ops.cuda_batch import INERT, SHARED, TAIL, BatchLayout, HostBatch
from slotd.daemon.ops.cuda_blocks import (
    Block,
    ContextRows,
    block_layout,
    context_layout,
    pack_blocks,
    pack_context,
)

K_BYTES, V_BYTES, PER_GROUP = 128, 256, 3


def pages(n: int, first: int = 1) -> np.ndarray:
    return np.stack([(first + np.arange(n)) << 20, (first + np.arange(n)) << 24]).astype(np.uint64)


def block_host(rows: int, n_pages: int, most_single: int = 200) -> HostBatch:
    layout = block_layout(BatchLayout.for_steps(rows, n_pages, n_pages * TILE, PER_GROUP, most_single))
    return HostBatch(
        layout, layout.views(np.full(layout.nbytes, 0xEE, np.uint8)), K_BYTES, V_BYTES, PER_GROUP
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("most_single", [0, 200])
def test_every_place_that_a_row_sees_is_in_one_entry(causal: bool, most_single: int) -> None:
    shapes = [(8, 0), (3, 61), (16, 130), (5, 700)]
    blocks = [
        Block(np.arange(n, dtype=np.int32), 5000 + i, context, pages(-(-(context + n) // TILE), 100 * i))
        for i, (n, context) in enumerate(shapes)
    ]
    host = block_host(64, 40, most_single)
    packed = pack_blocks(host, blocks, causal=causal)
    views, total = host.views, sum(n for n, _ in shapes)
    assert packed.n_rows == total
    entries = views["entries"][: packed.n_entries]
    assert (views["entries"][packed.n_entries :, 0] == INERT).all()
    start = first_page = parts = 0
    for s, (n, context) in enumerate(shapes):
        for i in range(n):
            row, last = start + i, context + (i if causal else n - 1)
            assert views["visible"][row] == last
            assert views["positions"][row] == 5000 + s + i
            seen, numbers = [], []
            for kind, first, count, page, tile, n_tiles, committed, part in entries.tolist():
                if not first <= row < first + count:
                    continue
                assert kind in (SHARED, TAIL)
                assert committed == context
                assert page == first_page
                seen += range(tile, tile + n_tiles)
                numbers.append(part)
                assert kind == TAIL or (tile + n_tiles) * TILE <= context
            assert sorted(seen) == list(range(last // TILE + 1))
            assert sorted(numbers) == list(range(len(numbers)))
            assert views["first_part"][row] == parts
            parts += len(numbers)
            place = context + i
            k, v = blocks[s].addresses[:, place // TILE]
            assert views["write_k"][row] == k + place % TILE * K_BYTES
            assert views["write_v"][row] == v + place % TILE * V_BYTES
            assert views["ancestors"][row, :n].tolist() == list(range(n))
        start, first_page = start + n, first_page + blocks[s].addresses.shape[1]
    assert (views["first_part"][total:] == parts).all()
    assert packed.n_parts == parts <= host.layout.most_parts
    for name, filler in (("positions", -1), ("visible", -1), ("write_k", 0), ("tokens", 0)):
        assert (views[name][total:] == filler).all(), name


def test_what_does_not_fit_is_refused() -> None:
    block = Block(np.zeros(8, np.int32), 0, 60, pages(1))
    with pytest.raises(ValueError, match="68 places, 1 pages"):
        pack_blocks(block_host(8, 4), [block])
    with pytest.raises(ValueError, match="16 rows, the buffer holds 8"):
        pack_blocks(block_host(8, 4), [Block(np.zeros(16, np.int32), 0, 0, pages(1))])
    with pytest.raises(ValueError, match="5 pages, the buffer holds 4"):
        pack_blocks(block_host(8, 4), [Block(np.zeros(8, np.int32), 0, 0, pages(5))])


def test_rows_of_context() -> None:
    layout = context_layout(8, 8192)
    host = HostBatch(
        layout, layout.views(np.full(layout.nbytes, 0xEE, np.uint8)), K_BYTES, V_BYTES, PER_GROUP
    )
    parts = [
        ContextRows(np.array([0, 4, 7], np.int32), 900, 62, pages(2)),
        ContextRows(np.array([9], np.int32), 3, 3, pages(1, 50)),
    ]
    assert pack_context(host, parts).n_rows == 4
    views = host.views
    assert views["tokens"].tolist() == [0, 4, 7, 9, 0, 0, 0, 0]
    assert views["positions"].tolist() == [900, 901, 902, 3, -1, -1, -1, -1]
    expected = [(1 << 20) + 62 * K_BYTES, (1 << 20) + 63 * K_BYTES, 2 << 20, (50 << 20) + 3 * K_BYTES]
    assert views["write_k"].tolist() == [*expected, 0, 0, 0, 0]
