"""The daemon's command line: words and flags to a configuration, and what each failure exits with."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from slotd.daemon import cli
from slotd.daemon.cli import INACTIVE_FLAGS, collect_inactive, make_config, split_arguments
from slotd.daemon.config import Config
from slotd.protocol.errors import ConfigError
from tests.fakes.draft_checkpoint import write_checkpoint

NO_DRAFTS: dict[str, Any] = {
    "draft": None, "spec": "auto", "ddtree": False, "budget": 22, "draft_block": None, "draft_ctx": 2048,
    "ddtree_temp": 1.0, "chain_seed": False,
}  # fmt: skip

FLAGS: dict[str, Any] = {
    "model": None, "backend": "auto", "stream_fd": None, "memory_limit": None, "max_ctx": None,
    "slot_dir": None, "slot_bytes": None,
    "chunk": None, "parallel": 4, "slots": 8, "k_type": None, "v_type": None, "exact": False,
    "math": None,
    "device": "auto", "pool": "legacy",
    "max_line": "16MiB", "max_stall": 60.0, "stall_timeout": 60.0, "oom_policy": "ladder",
    "engine": None, "engine_timeout": 60.0, "idle_unload": None,
    "host_cache": None, "trim_tokens": None, "state_dir": None, "checkpoint_every": 4096,
    **dict.fromkeys(INACTIVE_FLAGS), "fast_rollback": False, "seq_verify": False, **NO_DRAFTS,
}  # fmt: skip


# ----- words


@pytest.mark.parametrize(
    ("words", "split"),
    [
        ((), (None, None, None)),
        (("t",), ("t", None, None)),
        (("t", "d"), ("t", "d", None)),
        (("t", "d", "p", "16", "o"), ("t", "d", ("p", 16, "o"))),
        (("t", "d", "p", "0", "o"), ("t", "d", ("p", 0, "o"))),
        (("t", "d", "p", str(2**31 - 1), "o"), ("t", "d", ("p", 2**31 - 1, "o"))),
    ],
)
def test_words_by_position(words: tuple[str, ...], split: object) -> None:
    assert split_arguments(words, as_daemon=False) == split


@pytest.mark.parametrize("count", [3, 4, 6])
def test_a_number_of_words_that_means_nothing(count: int) -> None:
    with pytest.raises(ConfigError, match=f"^{count} arguments: give TARGET"):
        split_arguments(("w",) * count, as_daemon=False)


@pytest.mark.parametrize("n", ["", "-1", "1.5", "x", "1e3", str(2**31), "9" * 5000], ids=lambda n: n[:12])
def test_a_wrong_number_of_tokens(n: str) -> None:
    with pytest.raises(ConfigError, match=r"^N .*: must be a number of tokens, 0 to 2147483647$"):
        split_arguments(("t", "d", "p", n, "o"), as_daemon=False)


def test_a_daemon_takes_no_prompt() -> None:
    assert split_arguments(("t", "d"), as_daemon=True) == ("t", "d", None)
    with pytest.raises(ConfigError, match="--daemon takes TARGET and DRAFT only"):
        split_arguments(("t", "d", "p", "1", "o"), as_daemon=True)


# ----- configuration


def test_flags_become_a_configuration_in_its_units() -> None:
    config = make_config(
        "target.gguf",
        None,
        FLAGS
        | {
            "max_stall": 30.0,
            "memory_limit": "2GiB",
            "max_line": "1k",
            "stream_fd": "7",
            "exact": True,
            "math": "exact",
        },
    )
    assert config == Config(
        model=Path("target.gguf"),
        max_stall=0.03,
        memory_limit=2 << 30,
        max_line=1024,
        stream_fd=7,
        exact=True,
        math="exact",
    )


def test_the_word_beats_the_flag_for_the_model() -> None:
    assert make_config("word", None, FLAGS | {"model": "flag"}).model == Path("word")
    assert make_config(None, None, FLAGS | {"model": "flag"}).model == Path("flag")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"model": None}, "no model: give TARGET"),
        ({"backend": "opencl"}, "--backend 'opencl'"),
        ({"device": "gpu"}, "--device 'gpu'"),
        ({"device": "-1"}, "--device '-1'"),
        ({"backend": "cuda", "device": "cpu"}, "--backend cuda does not compute on --device cpu"),
        ({"backend": "numpy", "device": "0"}, "--backend numpy does not compute on --device 0"),
        ({"pool": "own"}, "--pool 'own'"),
        ({"memory_limit": "lots"}, "--memory-limit 'lots'"),
        ({"max_line": "long"}, "--max-line 'long'"),
        ({"stream_fd": "2"}, "--stream-fd '2'"),
        ({"chunk": 0}, "--chunk 0"),
        ({"oom_policy": "once"}, "--oom-policy 'once'"),
        ({"engine": "fork"}, "--engine 'fork': must be thread or process"),
        ({"engine_timeout": 0.0}, "--engine-timeout 0 s: must be 0.1 to 86400"),
        ({"math": "f8"}, "--math 'f8': must be exact, q8 or fast"),
        ({"math": "q8", "exact": True}, "--exact and --math q8 contradict each other"),
        ({"idle_unload": 0.0}, "--idle-unload 0 s: must be over 0 and at most 604800"),
        ({"idle_unload": -2.0}, "--idle-unload -2 s: must be over 0 and at most 604800"),
        ({"idle_unload": float("nan")}, "--idle-unload nan s: must be over 0 and at most 604800"),
        ({"host_cache": "-1"}, "--host-cache '-1'"),
        ({"checkpoint_every": -1}, "--checkpoint-every -1"),
        ({"trim_tokens": -1}, "--prefill-pool-trim-tokens -1"),
    ],
)
def test_a_wrong_setting_is_named(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        make_config(None, None, FLAGS | {"model": "m"} | flags)


def test_lines_for_a_stream() -> None:
    assert make_config("t", None, FLAGS | {"stream_fd": "-"}).stream_fd == "-"


# ----- what is not active


def test_nothing_is_inactive_when_nothing_was_asked_for() -> None:
    assert collect_inactive(FLAGS) == ()


@pytest.mark.parametrize("name", INACTIVE_FLAGS)
def test_every_inactive_flag_is_listed_with_its_value_and_reason(name: str) -> None:
    value = True if FLAGS[name] is False else 5
    (found,) = collect_inactive(FLAGS | {name: value})
    assert found.name == "--" + name.replace("_", "-")
    assert found.value == ("" if value is True else "5")
    assert found.reason == INACTIVE_FLAGS[name]


@pytest.mark.parametrize("name", ["draft_swa"])
def test_zero_is_a_value_like_any_other(name: str) -> None:
    (found,) = collect_inactive(FLAGS | {name: 0})
    assert found.value == "0"


def test_a_window_of_nothing_is_full_attention() -> None:
    assert collect_inactive(FLAGS | {"fa_window": 0}) == ()


# ----- drafts


def test_a_draft_by_word_or_flag_or_none() -> None:
    assert make_config("t", None, FLAGS).draft is None
    assert make_config("t", "d", FLAGS).draft == "d"
    assert make_config("t", None, FLAGS | {"draft": "e"}).draft == "e"
    assert make_config("t", "d", FLAGS | {"draft": "e"}).draft == "d"
    assert make_config("t", "none", FLAGS | {"draft": "e"}).draft == "none"
    assert make_config("t", None, FLAGS | {"draft": "none"}).draft == "none"


def test_ddtree_is_a_mode() -> None:
    assert make_config("t", None, FLAGS).spec == "auto"
    assert make_config("t", None, FLAGS | {"spec": "ngram"}).spec == "ngram"
    assert make_config("t", None, FLAGS | {"ddtree": True}).spec == "tree"
    assert make_config("t", None, FLAGS | {"ddtree": True, "spec": "tree"}).spec == "tree"
    with pytest.raises(ConfigError, match="--ddtree and --spec off contradict"):
        make_config("t", None, FLAGS | {"ddtree": True, "spec": "off"})


# ----- the commands


Run = Callable[..., Any]


@pytest.fixture
def configs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What would have been served; nothing is."""
    made: list[Any] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    monkeypatch.setattr(cli, "guard_stdout", lambda: 77)
    monkeypatch.setattr(cli, "default_engine", lambda device: "thread")  # on a machine with a GPU too
    monkeypatch.setattr(cli, "setup_logging", lambda verbosity: None)
    monkeypatch.setattr("slotd.daemon.serve.serve", lambda config, fd: made.append((config, fd)) or 0)
    monkeypatch.setattr("slotd.daemon.loop.end_process", lambda code: made.append(code))
    monkeypatch.setattr("slotd.daemon.serve.run_once", lambda config, *once: made.append((config, once)) or 1)
    yield made
    for number, handler in handlers.items():
        signal.signal(number, handler)


def invoke(*argv: str, env: dict[str, str] | None = None) -> Any:
    return CliRunner().invoke(cli.main, argv, env=env)


def test_a_daemon_serves_and_then_leaves(configs: list[Any]) -> None:
    assert invoke("daemon", "m.gguf").exit_code == 0
    assert configs == [(Config(model=Path("m.gguf")), 77), 0]


def test_a_process_is_asked_for(configs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slotd.daemon.serve_process.serve", lambda config, fd: configs.append(config) or 0)
    assert invoke("daemon", "m.gguf", env={"SLOTD_ENGINE": "process"}).exit_code == 0
    assert invoke("daemon", "m.gguf", "--engine", "process").exit_code == 0
    assert configs == [Config(model=Path("m.gguf"), engine="process"), 0] * 2


def test_every_flag_arrives(configs: list[Any]) -> None:
    argv = "-c 512 --chunk 64 -np 2 --slots 3 -ctk f16 -ctv f16 --exact --memory-limit 1g --stream-fd -"
    argv += " --max-line 2k --max-stall 10 --stall-timeout 5 --backend numpy -m m.gguf"
    argv += " --oom-policy seed --host-cache 1m --prefill-pool-trim-tokens 512 --state-dir run"
    argv += " --device cpu --pool vmm --checkpoint-every 96"
    argv += " --engine thread --engine-timeout 7 --idle-unload 1.5"
    assert invoke("daemon", *argv.split()).exit_code == 0
    assert configs[0][0] == Config(
        model=Path("m.gguf"), max_ctx=512, chunk=64, parallel=2, slots=3, k_type="f16", v_type="f16",
        exact=True, memory_limit=1 << 30, stream_fd="-", max_line=2048, max_stall=0.01, stall_timeout=5.0,
        oom_policy="seed", host_cache=1 << 20, trim_tokens=512, state_dir="run", device="cpu", pool="vmm",
        engine_timeout=7.0, idle_unload=1.5, checkpoint_every=96,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("backend", "device", "meant"),
    [
        ("auto", "auto", "auto"), ("auto", "cpu", "cpu"), ("auto", "2", "2"), ("numpy", "auto", "cpu"),
        ("numpy", "cpu", "cpu"), ("cuda", "auto", "0"), ("cuda", "3", "3"),
    ],
)  # fmt: skip
def test_backend_and_device_together(backend: str, device: str, meant: str) -> None:
    assert make_config("m", None, FLAGS | {"backend": backend, "device": device}).device == meant


@pytest.mark.parametrize("flag", ["--max-concurrency", "--parallel", "-np"])
def test_spellings_of_one_flag(configs: list[Any], flag: str) -> None:
    invoke("daemon", "m.gguf", flag, "9")
    assert configs[0][0].parallel == 9


def test_a_flag_beats_its_variable_which_beats_the_default(configs: list[Any]) -> None:
    env = {"SLOTD_SLOTS": "5", "SLOTD_CHUNK": "32", "SLOTD_MODEL": "env.gguf"}
    assert invoke("daemon", "--chunk", "64", env=env).exit_code == 0
    config = configs[0][0]
    assert (config.slots, config.chunk, config.parallel, config.model) == (5, 64, 4, Path("env.gguf"))


def test_one_shot_gives_its_own_exit_code(configs: list[Any]) -> None:
    assert invoke("daemon", "t", "d", "p.bin", "16", "o.bin").exit_code == 1
    (config, once), *rest = configs
    assert (config.model, once, rest) == (Path("t"), (77, "p.bin", 16, "o.bin"), [])


@pytest.mark.usefixtures("configs")
@pytest.mark.parametrize(
    "argv",
    [
        ("daemon",), ("daemon", "m", "--slots", "x"), ("daemon", "m", "--slots", "65"),
        ("daemon", "--no-flag"), ("daemon", "a", "b", "c"), ("daemon", "m", "--ddtree-budget", "0"),
        ("no-command",), ("inspect",), ("convert-draft", "x"), ("convert-draft", "-o", "x"),
    ],
)  # fmt: skip
def test_wrong_usage_is_exit_code_2(argv: tuple[str, ...]) -> None:
    result = invoke(*argv)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr


def test_other_errors_are_exit_code_1_and_one_line(
    configs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from slotd.daemon.memory import OutOfDeviceMemory

    def too_large(config: Config, stdout_fd: int) -> int:
        raise OutOfDeviceMemory("start", 100, 5)

    monkeypatch.setattr("slotd.daemon.serve.serve", too_large)
    result = invoke("daemon", "m.gguf")
    assert (result.exit_code, configs) == (1, [])
    assert result.stderr == "slotd: out of device memory: site=start requested=100 free=5\n"


@pytest.mark.usefixtures("configs")
def test_verbose_adds_the_traceback() -> None:
    assert "Traceback" not in invoke("daemon").stderr
    assert "Traceback" in invoke("daemon", "-v").stderr


def test_inspect_tells_a_model_that_runs_from_one_that_does_not(tiny_llama: Path, tmp_path: Path) -> None:
    good = invoke("inspect", str(tiny_llama))
    assert (good.exit_code, "llama" in good.stdout) == (0, True)
    assert invoke("inspect", "--json", str(tiny_llama)).stdout.startswith("{")
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(os.urandom(64))
    result = invoke("inspect", str(broken))
    assert result.exit_code == 3
    assert str(broken) in result.stderr
    assert "Traceback" not in result.stderr
    assert "Traceback" in invoke("inspect", "-v", str(broken)).stderr
    assert "inspect [OPTIONS] [FILE]" in invoke("inspect", "-h").stdout


def test_inspect_takes_the_settings_that_the_daemon_takes(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flags that both have are the same flags: spellings, type and variable. What one refuses both do."""
    shared = 0
    for option in cli.inspect.params:
        twins = [other for other in cli.daemon.params if set(other.opts) & set(option.opts)]
        if isinstance(option, click.Option) and twins:
            (twin,) = twins
            assert isinstance(twin, click.Option)
            assert (option.envvar, option.type.name) == (twin.envvar, twin.type.name), option.name
            shared += option.envvar is not None
    assert shared == 4
    monkeypatch.setenv("SLOTD_DEVICE", "cpu")
    monkeypatch.setenv("SLOTD_MAX_CTX", "100")
    monkeypatch.setenv("SLOTD_CACHE_TYPE_K", "f16")
    monkeypatch.setenv("SLOTD_MEMORY_LIMIT", "1g")
    found = json.loads(invoke("inspect", "--json", str(tiny_llama)).stdout)["memory"]
    assert (found["context"], found["k_type"], found["v_type"]) == (100, "f16", "f32")
    assert found["available"] == 1 << 30
    assert (
        json.loads(invoke("inspect", "-c", "90", "--json", str(tiny_llama)).stdout)["memory"]["context"] == 90
    )
    for name, value, said in (
        ("SLOTD_MAX_CTX", "1", "SLOTD_MAX_CTX: --max-ctx 1: must be 2 to 16777216"),
        ("SLOTD_CACHE_TYPE_V", "q3", "SLOTD_CACHE_TYPE_V: 'q3' is not a K/V type"),
        ("SLOTD_CACHE_TYPE_V", "tq3_0", "SLOTD_CACHE_TYPE_V: V type tq3_0 needs heads of a multiple of 128"),
        ("SLOTD_MEMORY_LIMIT", "x", "SLOTD_MEMORY_LIMIT: --memory-limit 'x': must be a size"),
    ):
        monkeypatch.setenv(name, value)
        for command in ("inspect", "daemon"):
            refused = invoke(command, str(tiny_llama))
            assert refused.exit_code == 2
            assert refused.stderr.startswith(f"slotd: {said}")
        monkeypatch.delenv(name)


def test_convert_draft_writes_a_file_or_says_why_not(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    out = tmp_path / "draft.gguf"
    done = invoke("convert-draft", str(tmp_path / "checkpoint"), "-o", str(out), "--type", "f16")
    assert (done.exit_code, done.stderr) == (0, "")
    size = f"{out.stat().st_size:,} bytes"
    assert done.stdout == f"{out}: DFlash draft, 25 tensors, 98,816 parameters, {size}\n"
    missing = invoke("convert-draft", str(tmp_path), "-o", str(out))
    assert (missing.exit_code, missing.stdout) == (3, "")
    assert missing.stderr == f"slotd: {tmp_path}: no .safetensors file in this folder\n"
    wrong = invoke("convert-draft", str(tmp_path / "checkpoint"), "-o", str(out), "--type", "q4_0")
    assert wrong.exit_code == 2
    assert "--type q4_0" in wrong.stderr
