"""Attention of a draft's blocks: every row has the bits of a lone step row that sees the same places."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from slotd.daemon.ops.cuda_attention import DeviceBatch
from slotd.daemon.ops.cuda_batch import BatchLayout
from slotd.daemon.ops.cuda_blocks import Block, block_layout, pack_blocks
from tests.gpu.attention_rig import Call, Placed, Rig
from tests.gpu.test_attention import assert_same_bits, make_call, make_rig


class PlacedBlocks(Placed):
    """The rows of each call are a block; `dropped` pages in front are not given to the kernels."""

    causal = False
    dropped = 0

    def pack(
        self, step: bool, bucket: int | None = None, context: int | None = None
    ) -> tuple[BatchLayout, DeviceBatch, Any]:
        shape, rows, n = self.rig.shape, self.rows, self.dropped
        addresses = [self.addresses(sequence)[:, n:] for sequence in rows.sequences]
        pages = sum(table.shape[1] for table in addresses) + 3
        steps = BatchLayout.for_steps(
            bucket or len(rows), pages, pages * 64, shape.per_group, self.rig.most_single
        )
        layout = block_layout(steps)
        self.buffer = np.full(layout.nbytes, 0xEE, np.uint8)
        blocks = [
            Block(rows.tokens[rows.owner == s], 10_000, len(sequence) - 64 * n, table)
            for s, (sequence, table) in enumerate(zip(rows.sequences, addresses, strict=True))
        ]
        packed = pack_blocks(self.rig.attention.host_batch(layout, self.buffer), blocks, causal=self.causal)
        block = self.rig.device.upload(self.buffer)
        address = self.rig.device.address(block)
        return layout, DeviceBatch(layout, address, layout.rows, packed.n_entries), block


def lone(call: Call, row: int, last: int, dropped: int) -> Call:
    """A step row with the query of `row`, which sees everything up to row `last`."""
    committed = (call.committed + call.rows.take(slice(last))).take(slice(64 * dropped, None))
    return Call(committed, call.rows.take([last]), call.q[[row]])


def check(rig: Rig, calls: list[Call], bucket: int, causal: bool = False, dropped: int = 0) -> None:
    placed = PlacedBlocks(rig, calls)
    placed.causal, placed.dropped = causal, dropped
    got = rig.run(calls, bucket=bucket, placed=placed)
    start = 0
    for number, call in enumerate(calls):
        n = len(call.rows)
        for row in sorted({0, 1, n // 2, n - 1} & set(range(n))):
            expected = rig.run([lone(call, row, row if causal else n - 1, dropped)])
            what = f"block {number}, row {row} of {n}, context {len(call.committed)}, dropped {dropped}"
            assert_same_bits(got[[start + row]], expected, what)
        start += n


@pytest.mark.parametrize("shape", ["smollm", "23b"])
@pytest.mark.parametrize("context", [0, 1, 57, 63, 64, 130, 2100])
def test_a_row_of_a_block_sees_all_of_it(shape: str, context: int) -> None:
    rig = make_rig(shape)
    check(rig, [make_call(rig, context, 8, 1)], 8)
    check(rig, [make_call(rig, context, 16, 2)], 16, causal=True)


@pytest.mark.parametrize(("k_type", "most_single"), [("f16", 0), ("f32", 200), ("q8_0", 200)])
def test_blocks_side_by_side(k_type: str, most_single: int) -> None:
    rig = make_rig("smollm", k_type, k_type)
    rig.most_single = most_single
    calls = [make_call(rig, context, n, 3) for context, n in ((700, 8), (0, 3), (60, 16), (129, 1))]
    check(rig, calls, 32)


def test_pages_that_were_dropped() -> None:
    rig = make_rig("23b")
    check(rig, [make_call(rig, 700, 16, 4), make_call(rig, 250, 7, 5)], 24, dropped=3)
