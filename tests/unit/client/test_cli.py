"""The command line: names, help, exit codes, one line for every error."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from slotd.client import batch_run, chat_session, cli, oneshot
from slotd.client.failure import DaemonExitError
from slotd.client.flags import MODEL_FLAGS, SAMPLING_FLAGS
from slotd.client.params import DEFAULTS
from slotd.protocol.errors import (
    ConfigError,
    DaemonDiedError,
    DaemonStartError,
    ModelError,
    RequestError,
    SlotdError,
)
from slotd.protocol.version import __version__
from tests.fakes.fake_client import FakeClient

PASSED_ON = {"daemon", "inspect", "convert-draft"}  # -h too
COMMANDS = PASSED_ON | {"chat", "generate", "batch", "doctor", "bench", "fetch", "top", "try"}


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")
    return str(path)


@pytest.fixture
def slots() -> list[int]:
    """The prefix slots of each daemon of `spawned`."""
    return []


@pytest.fixture
def spawned(monkeypatch: pytest.MonkeyPatch, slots: list[int]) -> list[tuple[Path, list[str], str | None]]:
    """What daemons were asked for; a fake client is given in their place."""
    found: list[tuple[Path, list[str], str | None]] = []

    def spawn(
        path: Path, engine: Any, pre: str | None, prefix_slots: int = 0, cache_dir: str | None = None
    ) -> FakeClient:
        found.append((path, engine.argv(), pre))
        slots.append(prefix_slots)
        return FakeClient()

    monkeypatch.setattr(cli, "_spawn", spawn)
    return found


def run(*args: str) -> int:
    return cli.run(args)


def test_the_commands_are_those_that_exist() -> None:
    assert set(cli.slotd.commands) == COMMANDS


@pytest.mark.parametrize("flag", ["-h", "--help"])
@pytest.mark.parametrize("command", ["", *sorted(COMMANDS - PASSED_ON)])
def test_help(command: str, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*command.split(), flag) == 0
    assert capsys.readouterr().out.startswith("Usage: slotd")


def test_every_shared_flag_is_in_the_help_under_its_section(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("chat", "generate", "batch"):
        run(command, "-h")
        printed = capsys.readouterr().out
        options, _, rest = printed.partition("\nSampling:")
        sampling, _, model = rest.partition("\nModel and daemon:")
        assert all(name in sampling for flag in SAMPLING_FLAGS for name in flag.names)
        assert all(name in model for flag in MODEL_FLAGS for name in flag.names)
        assert "--verbose" in options


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out.startswith(f"slotd {__version__}, protocol 2, CuPy ")


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["nope"],
        ["generate", "--nope", "x"],
        ["generate", "x", "--top-k", "many"],
        ["generate", "x", "-c", "0"],
        ["generate", "x", "--parallel", "-1"],
        ["generate", "x", "--top-p", "2"],
        ["generate", "x", "--logit-bias", "x"],
        ["generate", "a", "b"],
        ["generate", " \n "],
        ["generate", "x", "-f", "y"],
        ["batch"],
        ["batch", "nowhere.jsonl", "-o", "-"],
        ["batch", "-", "--resume"],
        ["bench", "--prefill", "x"],
        ["generate", "-f", "nowhere.txt"],
        ["generate", "x", "-n", "0"],
        ["generate", "x", "--chunk=-1"],
    ],
)
def test_wrong_usage_is_exit_code_2_and_spawns_nothing(
    args: list[str], spawned: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*args) == 2
    assert spawned == []
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err


@pytest.mark.parametrize("command", ["chat", "generate x", "batch -", "bench", "doctor", "try"])
def test_a_missing_model_file_is_exit_code_3(
    command: str, spawned: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "nowhere.gguf"
    assert run(*command.split(), "-m", str(missing)) == 3
    assert spawned == []
    captured = capsys.readouterr()
    assert f"{missing}: the model named by -m: No such file" in captured.out + captured.err


def test_a_number_below_zero_is_named_as_a_value(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", "x", "--chunk=-1") == 2
    assert "Invalid value for '--chunk': -1 is not in the range x>=1" in capsys.readouterr().err


def test_no_tokens_at_all_is_refused_in_words_of_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", "x", "-n", "0") == 2
    assert capsys.readouterr().err.endswith(
        "allowed is a whole number, 1 to 2147483647, or -1 for no limit\n"
    )


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 2),
        (ModelError("x"), 3),
        (DaemonExitError("--chunk 0: no", 2), 2),
        (DaemonExitError("bad.gguf: no", 3), 3),
        (DaemonStartError("not ready within 3 s"), 1),
        (DaemonDiedError("x"), 1),
        (RequestError("oom"), 1),
        (FileNotFoundError(2, "No such file", "x"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_errors_are_one_line_and_an_exit_code(
    error: BaseException,
    code: int,
    model: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*args: Any) -> None:
        raise error

    monkeypatch.setattr(cli, "_spawn", fail)
    assert run("generate", "x", "-m", model) == code
    lines = capsys.readouterr().err.splitlines()
    if isinstance(error, SlotdError):
        assert len(lines) == 1
        assert lines[0].startswith("slotd: ")
        assert lines[0].endswith(str(error).splitlines()[-1].removeprefix("slotd: "))


def test_verbose_shows_the_traceback(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: Any) -> None:
        raise RequestError("oom")

    monkeypatch.setattr(cli, "_spawn", fail)
    monkeypatch.setattr(cli, "_verbosity", 1)
    assert run("generate", "x", "-m", model) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_bug_is_not_hidden(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "_spawn", fail)
    with pytest.raises(ZeroDivisionError):
        run("generate", "x", "-m", model)


def test_flags_reach_the_daemon_and_the_request(
    model: str, spawned: list[tuple[Path, list[str], str | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, Any]] = []

    def answer(client: Any, question: Any, params: Any, **options: Any) -> int:
        asked.append((question, params))
        return 0

    monkeypatch.setattr(oneshot, "run", answer)
    code = run(
        "generate",
        "hi",
        "-m",
        model,
        "-c",
        "64",
        "--chunk",
        "8",
        "-ctk",
        "f16",
        "-ctv",
        "f16",
        "--parallel",
        "2",
        "--exact",
        "--memory-limit",
        "1GiB",
        "--pre",
        "gpt-2",
        "-n",
        "5",
        "--temp",
        "0",
        "--top-k",
        "3",
        "--top-p",
        "0.5",
        "--min-p",
        "0",
        "--repeat-penalty",
        "1.1",
        "--repeat-last-n",
        "9",
        "--frequency-penalty",
        "0.1",
        "--presence-penalty",
        "0.2",
        "-s",
        "3",
        "--logit-bias",
        "5:-1",
        "--stop",
        "a",
        "--stop",
        "b",
        "--system",
        "be brief",
    )
    assert code == 0
    path, argv, pre = spawned[0]
    assert (str(path), pre) == (model, "gpt-2")
    assert argv == [
        "--max-ctx=64",
        "-ctk",
        "f16",
        "-ctv",
        "f16",
        "--exact",
        "--chunk=8",
        "--parallel=2",
        "--memory-limit=1GiB",
    ]
    assert asked[0][0] == oneshot.Question("hi", system="be brief")
    assert asked[0][1] == {
        "max_tokens": 5,
        "temperature": 0.0,
        "top_k": 3,
        "top_p": 0.5,
        "min_p": 0.0,
        "repetition_penalty": 1.1,
        "penalty_window": 9,
        "frequency_penalty": 0.1,
        "presence_penalty": 0.2,
        "seed": 3,
        "logit_bias": {5: -1.0},
        "stop": ["a", "b"],
    }


def test_the_model_from_the_environment(
    model: str,
    spawned: list[tuple[Path, list[str], str | None]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"GGUF")
    monkeypatch.setenv("SLOTD_MODEL", model)
    assert run("generate", "hi") == 0
    assert run("generate", "hi", "-m", str(other)) == 0
    assert [str(path) for path, _, _ in spawned] == [model, str(other)]


def test_chat_gets_its_system_message_and_params(
    model: str, spawned: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Any, ...]] = []

    def chat(client: Any, *args: Any, show_reasoning: bool) -> int:
        seen.append((*args, show_reasoning))
        return 0

    monkeypatch.setattr(chat_session, "run", chat)
    assert run("chat", "-m", model, "--system", "s", "--show-reasoning") == 0
    assert seen == [("m.gguf", DEFAULTS, "s", True)]


@pytest.mark.parametrize(("given", "parallel"), [([], 4), (["--parallel", "7"], 7)])
def test_batch_runs_as_many_jobs_as_the_daemon_takes(
    model: str,
    spawned: list[tuple[Path, list[str], str | None]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    given: list[str],
    parallel: int,
) -> None:
    seen: list[int] = []

    def batch(files: Any, open_client: Any, *, parallel: int, **options: Any) -> int:
        open_client()
        seen.append(parallel)
        return 1

    monkeypatch.setattr(batch_run, "run", batch)
    (tmp_path / "in").write_text("")
    assert run("batch", str(tmp_path / "in"), "-o", str(tmp_path / "out"), "-m", model, *given) == 1
    assert seen == [parallel]
    assert spawned[0][1] == [f"--parallel={parallel}"]


def test_what_a_daemon_is_spawned_with(model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[dict[str, Any]] = []

    def client(path: Path, **options: Any) -> FakeClient:
        made.append(options)
        return FakeClient()

    monkeypatch.setattr("slotd.client.client.Client", client)
    cache = str(tmp_path / "cache")
    run("generate", "x", "-m", model, "--oom-policy=seed", "--host-cache=0", "--prefill-pool-trim-tokens=0")
    run("generate", "x", "-m", model, "--cache-dir", cache, "--slot-bytes=1GiB")
    run("chat", "-m", model, "--cache-dir", cache, "--prefix-slots=12")
    monkeypatch.setenv("SLOTD_SLOT_DIR", "elsewhere")
    monkeypatch.setenv("SLOTD_SLOTS", "20")
    run("chat", "-m", model, "--cache-dir", cache, "--prefix-slots=12")
    run("doctor", "-m", model, "--slots=3")
    ids = str(tmp_path / "cache" / "ids")
    assert [(each["daemon_args"], each["prefix_slots"], each["cache_dir"]) for each in made] == [
        (["--oom-policy=seed", "--host-cache=0", "--prefill-pool-trim-tokens=0"], 0, None),
        ([f"--slot-dir={cache}/slots", "--slot-bytes=1GiB"], 8, ids),
        (["--slots=12", f"--slot-dir={cache}/slots"], 12, ids),
        ([], 12, ids),
        (["--slots=3"], 0, None),
    ]


@pytest.mark.parametrize(
    ("given", "wanted"), [([], 8), (["--prefix-slots", "0"], 0), (["--prefix-slots=7"], 7)]
)
@pytest.mark.parametrize("command", ["chat", "batch"])
def test_chat_and_batch_keep_prefixes(
    model: str,
    spawned: list[Any],
    slots: list[int],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    command: str,
    given: list[str],
    wanted: int,
) -> None:
    def batch(files: Any, open_client: Any, **options: Any) -> int:
        open_client()
        return 0

    monkeypatch.setattr(batch_run, "run", batch)
    monkeypatch.setattr(chat_session, "run", lambda *args, **options: 0)
    (tmp_path / "in").write_text("")
    files = [str(tmp_path / "in"), "-o", str(tmp_path / "out")] if command == "batch" else []
    assert run(command, *files, "-m", model, *given) == 0
    assert slots == [wanted]


def test_one_question_keeps_no_prefixes(model: str, spawned: list[Any], slots: list[int]) -> None:
    assert run("generate", "x", "-m", model) == 0
    assert slots == [0]


def test_try_answers_the_built_in_question(
    model: str, spawned: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", open(os.devnull))  # noqa: SIM115 - closed by monkeypatch's end of life
    try:
        assert run("try", "-m", model) == 0
    finally:
        sys.stdin.close()
    captured = capsys.readouterr()
    assert captured.out == "t1 t2 t3 \n"
    assert captured.err.startswith(f"> {oneshot.BUILT_IN.text}\n")
    assert "tok/s" in captured.err


def test_the_client_lists_what_it_loads_late() -> None:
    import slotd.client
    from slotd.client.chat_template import TemplateError

    assert set(slotd.client.__all__) <= set(dir(slotd.client))
    assert slotd.client.TemplateError is TemplateError


def imported(*args: str) -> set[str]:
    """Modules that one command line imports, by their first name."""
    code = (
        "import sys; from slotd.client import cli; "
        "cli.run(sys.argv[1:]); print(*sys.modules, file=sys.stderr)"
    )
    found = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=True)
    return {name.split(".")[0] for name in found.stderr.split()}


def test_help_imports_nothing_heavy_and_is_fast() -> None:
    heavy = {"numpy", "rich", "prompt_toolkit", "tokenizers", "jinja2", "gguf", "psutil", "cupy", "asyncio"}
    assert not heavy & imported("--help")
    best = 10.0
    for _ in range(5):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "slotd.client", "--help"], capture_output=True, check=True)
        best = min(best, time.perf_counter() - start)
    assert best < 1.0  # 0.1 s alone; generous, because other work may share the machine


def test_a_reader_that_goes_away_is_no_traceback(model: str) -> None:
    code = "import sys; from slotd.client import cli; sys.exit(cli.run(['--help']))"
    read, write = os.pipe()
    os.close(read)
    found = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert found.stderr == b""
