"""Settings from the older daemon's environment variables, for those who start it by the same command.

Each has two prefixes; the newer one counts where both are set. A flag or variable of slotd's own beats them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slotd.protocol.errors import ConfigError

#: The newer one first.
PREFIXES = ("LUCE_", "DFLASH27B_")

#: Switches for both types at once; of several that are on the last one counts.
KV_SWITCHES = {"KV_F16": "f16", "KV_Q4": "q4_0", "KV_TQ3": "tq3_0"}

KV_K, KV_V, PIECE = "KV_K", "KV_V", "PREFILL_UBATCH"

OFF = ("", "0")


@dataclass(frozen=True, slots=True)
class SourceSettings:
    """What was asked for; None: nothing.

    Attributes:
        k_type, v_type: types of cached keys and values.
        chunk: longest prefill piece, in tokens.
    """

    k_type: str | None = None
    v_type: str | None = None
    chunk: int | None = None


def source_settings(environment: Mapping[str, str]) -> SourceSettings:
    """The settings that the variables mean together.

    Raises:
        ConfigError: a length that is none.
    """
    both = None
    for name, kv_type in KV_SWITCHES.items():
        if (_value(environment, name)[1]) not in OFF:
            both = kv_type
    piece_name, piece = _value(environment, PIECE)
    if piece and not (piece.isascii() and piece.isdecimal() and 1 <= int(piece) <= 1 << 20):
        raise ConfigError(f"{piece_name} {piece[:40]!r}: must be 1 to {1 << 20}")
    return SourceSettings(
        _value(environment, KV_K)[1].lower() or both, _value(environment, KV_V)[1].lower() or both,
        int(piece) if piece else None,
    )  # fmt: skip


def _value(environment: Mapping[str, str], name: str) -> tuple[str, str]:
    """(the variable that counts, its value or nothing)."""
    names = [prefix + name for prefix in PREFIXES]
    return next(((each, environment[each].strip()) for each in names if each in environment), (names[-1], ""))
