"""Speeds from a time account."""

from __future__ import annotations

from slotd.client.rates import rate_line, rates
from tests.fakes.fake_client import completion


def test_rates_leave_out_cached_tokens_and_the_first_token() -> None:
    found = rates(
        completion((1, 2, 3), timings={"prefill_s": 0.5, "decode_s": 0.2, "sample_s": 0.05, "wall_s": 1})
    )
    assert found.prefill == 12  # (10 - 4) / 0.5
    assert found.decode == 8  # (3 - 1) / 0.25


def test_nothing_computed_is_rate_0() -> None:
    found = rates(completion((), timings={}, cached_tokens=10))
    assert (found.prefill, found.decode, found.seconds) == (0, 0, 0)


def test_line() -> None:
    assert rate_line(completion()) == "3 tokens, 8.0 tok/s; prompt 10 tokens, 4 cached, 12 tok/s; 1.00 s"
    assert "cached" not in rate_line(completion(cached_tokens=0))
