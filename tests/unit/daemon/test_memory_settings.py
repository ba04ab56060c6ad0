"""Settings about memory: the environment's names, what is refused and what is only warned about."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from slotd.daemon import cli
from slotd.daemon.config import Config, parse_host_cache, source_trim_tokens
from slotd.protocol.errors import ConfigError

DFLASH, LUCE = "DFLASH_PREFILL_POOL_TRIM_TOKENS", "LUCE_PREFILL_POOL_TRIM_TOKENS"
OURS = "SLOTD_PREFILL_POOL_TRIM_TOKENS"


def config_of(monkeypatch: pytest.MonkeyPatch, *arguments: str, **environment: str) -> Config:
    """What the command line and the environment come to."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    made: list[Config] = []

    def keep(arguments: tuple[str, ...], flags: dict[str, Any]) -> int:
        made.append(cli.make_config(arguments[0], None, flags))
        return 0

    monkeypatch.setattr(cli, "_daemon", keep)
    result = CliRunner().invoke(cli.main, ["daemon", "model.gguf", *arguments])
    if not made:
        raise ConfigError(result.output)
    return made[0]


@pytest.mark.parametrize(
    ("environment", "tokens"),
    [
        ({}, 0),
        ({DFLASH: "8192"}, 8192),
        ({LUCE: "4096"}, 4096),
        ({DFLASH: "8192", LUCE: "4096"}, 4096),
        ({DFLASH: "8192", LUCE: "0"}, 0),
        ({DFLASH: "0"}, 0),
        ({DFLASH: ""}, 0),
    ],
)
def test_s139_the_names_of_the_source(environment: dict[str, str], tokens: int) -> None:
    assert source_trim_tokens(environment) == (tokens, None)


@pytest.mark.parametrize("value", ["-1", "8k", "1e3", "x", "99999999999", "²"])
def test_a_wrong_value_of_the_source_is_off_with_one_warning(value: str) -> None:
    tokens, warning = source_trim_tokens({DFLASH: "8192", LUCE: value})
    assert tokens == 0
    assert warning is not None
    assert LUCE in warning
    assert "DFLASH" not in warning


def test_the_warning_is_one_line_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(LUCE, "many")
    flags = dict.fromkeys(cli.INACTIVE_FLAGS) | {
        "model": None, "backend": "auto", "device": "cpu", "pool": "legacy",
        "stream_fd": None, "memory_limit": None, "trim_tokens": None, "checkpoint_every": 0,
        "max_ctx": None, "chunk": 64, "parallel": 1, "slots": 8, "k_type": "f32", "v_type": "f32",
        "exact": False, "math": None, "max_line": "1MiB", "max_stall": 60.0, "stall_timeout": 60.0,
        "oom_policy": "ladder", "host_cache": None, "slot_dir": None, "slot_bytes": None, "state_dir": None,
        "engine": None, "engine_timeout": 60.0, "idle_unload": None,
        "draft": "none", "spec": "auto", "ddtree": False, "budget": 22, "draft_block": None,
        "draft_ctx": 2048, "ddtree_temp": 1.0, "chain_seed": False,
    }  # fmt: skip
    assert cli.make_config("model.gguf", None, flags).trim_tokens == 0
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert LUCE in err


def test_our_own_name_wins_and_is_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    assert config_of(monkeypatch, **{OURS: "512", LUCE: "4096"}).trim_tokens == 512
    assert config_of(monkeypatch, "--prefill-pool-trim-tokens=1024").trim_tokens == 1024
    assert config_of(monkeypatch, "--prefill-pool-trim-tokens=0").trim_tokens == 0
    for wrong in ("-1", "many", "99999999999"):
        with pytest.raises(ConfigError, match=r"(?i)trim.tokens"):
            config_of(monkeypatch, f"--prefill-pool-trim-tokens={wrong}")
        with pytest.raises(ConfigError):
            config_of(monkeypatch, **{OURS: wrong})


def test_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    assert config_of(monkeypatch).oom_policy == "ladder"
    assert config_of(monkeypatch, SLOTD_OOM_POLICY="seed").oom_policy == "seed"
    with pytest.raises(ConfigError, match="--oom-policy 'once': must be ladder or seed"):
        config_of(monkeypatch, "--oom-policy=once")


def test_the_host_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    assert config_of(monkeypatch).host_cache is None
    assert config_of(monkeypatch, "--host-cache=0").host_cache == 0
    assert config_of(monkeypatch, SLOTD_HOST_CACHE="2MiB").host_cache == 2 << 20
    with pytest.raises(ConfigError, match="--host-cache '-1'"):
        parse_host_cache("-1")
