"""Where copies are divided."""

from __future__ import annotations

import pytest

from slotd.daemon.ops.page_layout import divided


@pytest.mark.parametrize(
    ("address", "size", "parts"),
    [
        (100, 50, [(0, 50)]),
        (100, 100, [(0, 100)]),  # up to a cut
        (200, 100, [(0, 100)]),  # from one to the next
        (150, 100, [(0, 50), (50, 100)]),
        (150, 300, [(0, 50), (50, 150), (150, 300)]),
        (500, 10, [(0, 10)]),
    ],
)
def test_a_copy_is_divided_at_the_cuts_inside(address: int, size: int, parts: list[tuple[int, int]]) -> None:
    assert divided(address, size, [200, 300]) == parts
    assert divided(address, size, []) == [(0, size)]
