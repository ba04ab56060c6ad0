"""The buffer of a CUDA call: where arrays lie, what the work list covers, what padding looks like."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from slotd.daemon.ops import cuda_batch
from slotd.daemon.ops.batch import TILE
from slotd.daemon.ops.cuda_batch import (
    GATHERED,
    INERT,
    SHARED,
    TAIL,
    BatchLayout,
    HostBatch,
    PageAddresses,
    is_wide,
    pack_prompt,
    pack_step,
    rows_at_once,
)
from slotd.daemon.rows import Rows
from slotd.daemon.sequence import Sequence

K_BYTES, V_BYTES = 136, 256


def sequence(committed: int) -> Sequence:
    made = Sequence()
    made.tokens = array("i", range(committed))
    return made


def pages(n: int, seed: int) -> PageAddresses:
    rng = np.random.default_rng(seed)
    return rng.integers(1, 2**40, (2, n)).astype(np.uint64) * np.uint64(256)


def host_batch(layout: BatchLayout, fill: int, per_group: int = 5) -> HostBatch:
    views = layout.views(np.full(layout.nbytes, fill, np.uint8))
    return HostBatch(layout, views, K_BYTES, V_BYTES, per_group)


def pack(
    parts: list[Rows], bucket: int, per_group: int = 5, most_single: int = 0
) -> tuple[BatchLayout, dict, list[PageAddresses]]:
    rows = Rows.join(parts)
    counts = [len(part) for part in parts]
    addresses = [
        pages(-(-(len(s) + n) // TILE), i)
        for i, (s, n) in enumerate(zip(rows.sequences, counts, strict=True))
    ]
    n_pages = sum(table.shape[1] for table in addresses)
    layout = BatchLayout.for_steps(bucket, n_pages, 8192, per_group, most_single)
    host = host_batch(layout, 0xEE, per_group)
    packed = pack_step(host, rows, addresses)
    assert packed.n_rows == len(rows)
    assert packed.n_parts <= layout.most_parts
    return layout, host.views, addresses


def test_arrays_lie_apart_and_aligned() -> None:
    for layout in (BatchLayout.for_steps(23, 77, 4096, 5), BatchLayout.for_prompt(2048, 100, 8192)):
        at = 0
        for offset, shape, dtype in layout.fields.values():
            assert offset % 16 == 0
            assert offset >= at
            at = offset + int(np.prod(shape)) * dtype.itemsize
        assert at <= layout.nbytes
        assert layout.address(1000, "page_v") == 1000 + layout.fields["page_v"][0]


def test_rows_places_and_padding() -> None:
    parts = [Rows.chain(sequence(62), [5, 6, 7]), Rows.tree(sequence(10), [8, 9, 3], [-1, 0, 0])]
    _, views, addresses = pack(parts, 8)
    assert views["tokens"].tolist() == [5, 6, 7, 8, 9, 3, 0, 0]
    assert views["positions"].tolist() == [62, 63, 64, 10, 11, 11, -1, -1]
    assert views["sequence"].tolist() == [0, 0, 0, 1, 1, 1, 0, 0]
    assert views["committed"][:2].tolist() == [62, 10]
    assert views["first_page"][:2].tolist() == [0, 2]
    (k0, v0), (k1, _) = addresses
    expected = [k0[0] + 62 * K_BYTES, k0[0] + 63 * K_BYTES, k0[1]]
    expected += [k1[0] + place * K_BYTES for place in (10, 11, 12)]
    assert views["write_k"].tolist() == [*map(int, expected), 0, 0]
    assert views["write_v"][2] == v0[1]
    assert views["page_k"].tolist() == [*k0.tolist(), *k1.tolist()]
    assert views["counts"][:3].tolist() == [2, views["counts"][1], 6]


def test_ancestors_and_which_tails_are_gathered() -> None:
    _, views, _ = pack([Rows.tree(sequence(5), [1] * 6, [-1, 0, 1, 0, 3, -1])], 8)
    ancestors = views["ancestors"]
    assert ancestors[2, :3].tolist() == [0, 1, 2]
    assert ancestors[4, :3].tolist() == [0, 3, 4]
    assert ancestors[5, :1].tolist() == [5]
    entries = views["entries"][: views["counts"][1]]
    assert entries[:, 0].tolist() == [TAIL, TAIL, TAIL, GATHERED, GATHERED, GATHERED]


@pytest.mark.parametrize("committed", [0, 1, 63, 64, 511, 512, 513, 576, 5000])
@pytest.mark.parametrize("n", [1, 3, 23, 64])
@pytest.mark.parametrize("per_group", [1, 3, 5, 16])
@pytest.mark.parametrize("most_single", [0, 1000])
def test_every_row_and_tile_is_worked_on_once(
    committed: int, n: int, per_group: int, most_single: int
) -> None:
    """Also: parts of a row are 0, 1, .. in the order of tiles, splits start at multiples of eight tiles."""
    rng = np.random.default_rng(committed + n)
    parents = [-1, *(int(rng.integers(-1, row)) for row in range(1, n))]
    parts = [Rows.tree(sequence(committed), [1] * n, parents)]
    if n < 64:
        parts.append(Rows.chain(sequence(200), [1]))
    bucket = 24 if n < 24 else 64
    _, views, _ = pack(parts, bucket, per_group, most_single)
    n_entries = int(views["counts"][1])
    assert (views["entries"][n_entries:, 0] == INERT).all()
    size = 1 if most_single else 8
    covered: dict[int, dict[int, int]] = {row: {} for row in range(n)}
    for entry in views["entries"][:n_entries].tolist():
        kind, first, n_rows, first_page, first_tile, n_tiles, length, part = entry
        if first >= n:
            continue
        assert (first_page, length) == (0, committed)
        assert n_rows <= rows_at_once(bucket, per_group)
        if kind == SHARED:
            assert first_tile % size == 0
            assert first_tile // size == part
            assert (first_tile + n_tiles) * TILE <= committed
            assert 1 <= n_tiles <= size
        else:
            assert n_rows == n_tiles == 1
            assert (first_tile + 1) * TILE > committed
        for row in range(first, first + n_rows):
            for tile in range(first_tile, first_tile + n_tiles):
                assert tile not in covered[row]
                covered[row][tile] = part
    first_part = views["first_part"].tolist()
    for row in range(n):
        position = int(views["positions"][row])
        assert sorted(covered[row]) == list(range(position // TILE + 1))
        numbers = [covered[row][tile] for tile in range(position // TILE + 1)]
        assert numbers == sorted(numbers)
        assert set(numbers) == set(range(first_part[row + 1] - first_part[row]))
        assert int(views["first_single"][row]) == (0 if most_single else committed // TILE)
        assert int(views["split_parts"][row]) == (0 if most_single else -(-(committed // TILE) // 8))


@pytest.mark.parametrize("lengths", [[0], [63], [64], [5000], [0, 512, 575, 7000]])
@pytest.mark.parametrize("bucket", [4, 16])
@pytest.mark.parametrize("most_single", [0, 1000])
def test_plain_decoding_is_packed_like_any_other_step(
    lengths: list[int], bucket: int, most_single: int
) -> None:
    rows = Rows.next_tokens([sequence(n) for n in lengths], list(range(7, 7 + len(lengths))))
    addresses = [pages(n // TILE + 1, n) for n in lengths]
    layout = BatchLayout.for_steps(bucket, sum(len(k) for k, _ in addresses), 8192, 5, most_single)
    results = []
    for pack_one in (cuda_batch._pack_next_tokens, cuda_batch._pack_trees):
        host = host_batch(layout, 0)
        packed = pack_one(host, rows, addresses)
        results.append((packed, {name: array.tolist() for name, array in host.views.items()}))
    assert results[0] == results[1]


def test_the_narrow_kernel_takes_16_queries() -> None:
    assert not is_wide(1, 16)
    assert not is_wide(3, 5)
    assert is_wide(4, 5)
    assert rows_at_once(3, 5) == 3
    assert rows_at_once(23, 5) == 25


def test_prompt_blocks() -> None:
    parts = [Rows.chain(sequence(700), [1] * 300), Rows.chain(sequence(0), [2] * 5)]
    rows = Rows.join(parts)
    addresses = [pages(16, 0), pages(1, 1)]
    layout = BatchLayout.for_prompt(len(rows), 17, 4096)
    host = host_batch(layout, 0xEE)
    packed = pack_prompt(host, rows, addresses)
    assert packed.context == 1000
    blocks = host.views["entries"][: packed.n_entries].tolist()
    assert blocks == [[300, 5, 16, 0], [0, 128, 0, 700], [128, 128, 0, 828], [256, 44, 0, 956]]


def test_what_does_not_fit_is_named() -> None:
    rows = Rows.chain(sequence(100), [1, 2])
    layout = BatchLayout.for_steps(1, 2, 4096, 5)
    with pytest.raises(ValueError, match="2 rows, the buffer holds 1"):
        pack_step(host_batch(layout, 0), rows, [pages(2, 0)])
    layout = BatchLayout.for_steps(2, 1, 4096, 5)
    with pytest.raises(ValueError, match="2 pages, the buffer holds 1"):
        pack_step(host_batch(layout, 0), rows, [pages(2, 0)])
    with pytest.raises(ValueError, match="65 rows in a step, the limit is 64"):
        BatchLayout.for_steps(65, 1, 4096, 5)
    layout = BatchLayout.for_steps(2, 2, 64, 5)
    with pytest.raises(ValueError, match="102 positions, the buffer holds 64"):
        pack_step(host_batch(layout, 0), rows, [pages(2, 0)])
