"""K/V types by name."""

from __future__ import annotations

import pytest

from slotd.daemon.kv.element_types import NOT_YET, kv_type
from slotd.protocol.errors import ConfigError


@pytest.mark.parametrize(("name", "size"), [("f32", 4), ("f16", 2)])
def test_bytes_per_token(name: str, size: int) -> None:
    assert kv_type(name).bytes_per_token(n_layer=30, n_head_kv=3, dim=64) == 30 * 3 * 64 * size


@pytest.mark.parametrize("name", NOT_YET)
def test_later_types_are_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name} is not supported yet \(supported: f32, f16\)"):
        kv_type(name)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'F32' is not a K/V type \(supported: f32, f16\)"):
        kv_type("F32")
