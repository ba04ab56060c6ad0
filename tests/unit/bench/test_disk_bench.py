"""The disk benchmark runs, on a snapshot of one page."""

from __future__ import annotations

from pathlib import Path

from tests.bench.disk import ROUNDS, measure


def test_every_rate_is_measured(tmp_path: Path) -> None:
    rates = measure(tmp_path, 1 << 20)
    assert set(rates) == {"plain write", "save", "plain read", "load"}
    for measured in rates.values():
        assert len(measured) == ROUNDS
        assert min(measured) > 0
