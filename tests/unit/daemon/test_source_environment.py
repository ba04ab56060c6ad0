"""The older daemon's environment variables."""

from __future__ import annotations

import pytest

from slotd.daemon.source_environment import SourceSettings, source_settings
from slotd.protocol.errors import ConfigError


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, SourceSettings()),
        ({"DFLASH27B_KV_TQ3": "1"}, SourceSettings("tq3_0", "tq3_0")),
        ({"DFLASH27B_KV_TQ3": "0", "DFLASH27B_KV_Q4": ""}, SourceSettings()),
        ({"DFLASH27B_KV_F16": "1", "DFLASH27B_KV_Q4": "1"}, SourceSettings("q4_0", "q4_0")),
        ({"LUCE_KV_F16": "1", "DFLASH27B_KV_TQ3": "1"}, SourceSettings("tq3_0", "tq3_0")),
        ({"LUCE_KV_TQ3": "0", "DFLASH27B_KV_TQ3": "1"}, SourceSettings()),
        ({"DFLASH27B_KV_TQ3": "1", "LUCE_KV_V": "Q8_0"}, SourceSettings("tq3_0", "q8_0")),
        ({"DFLASH27B_KV_K": "q4_0", "LUCE_KV_K": "q5_1"}, SourceSettings("q5_1", None)),
        ({"DFLASH27B_PREFILL_UBATCH": " 128 "}, SourceSettings(chunk=128)),
    ],
)
def test_what_they_mean(environment: dict[str, str], expected: SourceSettings) -> None:
    assert source_settings(environment) == expected


@pytest.mark.parametrize("value", ["0", "-1", "many", "²", "9" * 30])
def test_a_wrong_piece_is_named(value: str) -> None:
    with pytest.raises(ConfigError, match="DFLASH27B_PREFILL_UBATCH"):
        source_settings({"DFLASH27B_PREFILL_UBATCH": value})
