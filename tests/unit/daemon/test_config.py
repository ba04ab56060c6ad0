import dataclasses
from pathlib import Path

import pytest

from slotd.daemon.config import MAX_CTX_LIMIT, MAX_SLOTS, Config, Inactive, parse_size, parse_stream_fd
from slotd.protocol.errors import ConfigError

MODEL = Path("model.gguf")


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("max_ctx", 2, MAX_CTX_LIMIT),
        ("chunk", 1, 1 << 20),
        ("parallel", 1, 64),
        ("slots", 1, MAX_SLOTS),
        ("max_line", 64, 1 << 30),
    ],
)
def test_whole_numbers_have_limits(name: str, low: int, high: int) -> None:
    for value in (low, high):
        assert getattr(Config(model=MODEL, **{name: value}), name) == value
    flag = "--" + name.replace("_", "-")
    for value in (low - 1, high + 1):
        with pytest.raises(ConfigError, match=f"^{flag} {value}: must be {low} to {high}$"):
            Config(model=MODEL, **{name: value})


@pytest.mark.parametrize(
    ("name", "high"), [("max_stall", 60.0), ("stall_timeout", 86400.0), ("idle_unload", 604_800.0)]
)
def test_times_have_limits(name: str, high: float) -> None:
    for value in (1e-6, high):
        assert getattr(Config(model=MODEL, **{name: value}), name) == value
    for value in (0.0, -1.0, high + 1, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="^--" + name.replace("_", "-")):
            Config(model=MODEL, **{name: value})


def test_max_stall_is_named_in_the_unit_of_its_flag() -> None:
    with pytest.raises(ConfigError, match="--max-stall 61000 ms: must be over 0 and at most 60000"):
        Config(model=MODEL, max_stall=61.0)


def test_no_context_means_the_one_of_the_model() -> None:
    assert Config(model=MODEL).max_ctx is None


def test_a_config_does_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config(model=MODEL).chunk = 5  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("1000000", 1_000_000),
        ("64b", 64),
        ("512k", 512 << 10),
        ("512K", 512 << 10),
        ("512kb", 512 << 10),
        ("512KiB", 512 << 10),
        ("16MiB", 16 << 20),
        (" 16 MiB ", 16 << 20),
        ("24G", 24 << 30),
        ("1.5g", 3 << 29),
        ("2TiB", 2 << 40),
    ],
)
def test_sizes_are_powers_of_1024_in_every_spelling(text: str, size: int) -> None:
    assert parse_size("--memory-limit", text) == size


@pytest.mark.parametrize(
    "text",
    ["", "0", "0GiB", "-5", "-5G", "lots", "G", "5X", "5 5", "1e9", ".5G", "1.G", "0x10", "nan", "inf",
     "0.5", "0.0001k", "9" * 400],
)  # fmt: skip
def test_what_is_no_size_of_a_byte_and_more_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--memory-limit "):
        parse_size("--memory-limit", text)


def test_a_stream_is_an_inherited_descriptor_or_lines() -> None:
    assert parse_stream_fd("-") == "-"
    assert parse_stream_fd("3") == 3
    assert parse_stream_fd("1023") == 1023


@pytest.mark.parametrize(
    "text",
    ["", "0", "1", "2", "-1", "--", "3.0", "x", " 3", str(2**31), "9" * 5000],
    ids=lambda text: text[:12],
)
def test_what_is_no_descriptor_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--stream-fd "):
        parse_stream_fd(text)


def test_an_inactive_setting_says_its_value_and_the_reason() -> None:
    assert str(Inactive("--ddtree-budget", "22", "not yet")) == "--ddtree-budget=22 (not yet)"
    assert str(Inactive("--ddtree", "", "not yet")) == "--ddtree (not yet)"
