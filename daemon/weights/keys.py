"""Typed, range-checked access to the keys of one architecture."""

from __future__ import annotations

import math

from slotd.protocol.errors import ModelError
from slotd.protocol.gguf_header import Header


class Keys:
    """The keys of a file that start with the name of its architecture."""

    # Far above any model, and low enough that no product of three of them passes 2**63.
    LIMIT = 2**31 - 1

    def __init__(self, header: Header, arch: str) -> None:
        self.header = header
        self.arch = arch

    def positive(self, suffix: str, default: int | None = None) -> int:
        """An integer of at least 1. Raises ModelError: absent without default, another type, out of range."""
        return self._in_range(suffix, default, 1)

    def count(self, suffix: str, default: int | None = None) -> int:
        """As `positive`, or 0."""
        return self._in_range(suffix, default, 0)

    def positive_number(self, suffix: str, default: float | None = None) -> float:
        """A finite number above 0. Raises ModelError as `positive`."""
        value = self.header.number(f"{self.arch}.{suffix}", default)
        if not (math.isfinite(value) and value > 0):
            raise ModelError(f"{self.header.name}: key {self.arch}.{suffix} is {value}, it must be above 0")
        return value

    def refuse(self, suffix: str, value: object, why: str) -> ModelError:
        """The error that says what is wrong with the value of a key."""
        return ModelError(f"{self.header.name}: key {self.arch}.{suffix} is {value}, {why}")

    def _in_range(self, suffix: str, default: int | None, least: int) -> int:
        value = self.header.integer(f"{self.arch}.{suffix}", default)
        if not least <= value <= self.LIMIT:
            raise self.refuse(suffix, value, f"the limit is {least} to {self.LIMIT}")
        return value
