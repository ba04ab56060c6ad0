"""The commands as a person or a script runs them: real processes, the real daemon, a tiny model."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.fakes.tiny_gguf import END_OF_TEXT, IM_END, IM_START, write_tiny_llama

PATIENCE = 60.0

#: Random weights may end an answer at once; these keep it going to its limit.
ENDLESS = [flag for token in (END_OF_TEXT, IM_START, IM_END) for flag in ("--logit-bias", f"{token}:-1000")]
GREEDY = ["--temp", "0", *ENDLESS]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_tiny_llama(path, n_ctx=512)
    return path


def argv(command: str, model: Path, *flags: str) -> list[str]:
    return [sys.executable, "-m", "slotd.client", command, "-m", str(model), *flags]


def slotd(command: str, model: Path, *flags: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv(command, model, *flags),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def wait_until(condition: Any, what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.02)


# ----- generate


def test_generate_streams_the_text_that_json_reports(model: Path) -> None:
    plain = slotd("generate", model, *GREEDY, "-n", "8", "hello world")
    as_json = slotd("generate", model, *GREEDY, "-n", "8", "--json", stdin="hello world\n")
    assert (plain.returncode, as_json.returncode) == (0, 0), plain.stderr + as_json.stderr
    answer = json.loads(as_json.stdout)
    assert len(answer["ids"]) == 8
    assert answer["finish_reason"] == "length"
    assert plain.stdout.rstrip("\n") == answer["text"].rstrip("\n")
    assert plain.stderr == ""


def test_a_warning_of_the_daemon_is_shown_once(model: Path) -> None:
    found = slotd("generate", model, *GREEDY, "-n", "1", "-c", "1000", "hello")
    assert found.returncode == 0
    assert re.fullmatch(r"slotd: --max-ctx 1000 .*\n", found.stderr)


def test_raw_is_another_prompt(model: Path) -> None:
    raw = slotd("generate", model, *GREEDY, "-n", "1", "--json", "--raw", "hello")
    chat = slotd("generate", model, *GREEDY, "-n", "1", "--json", "hello")
    assert json.loads(raw.stdout)["prompt_tokens"] < json.loads(chat.stdout)["prompt_tokens"]


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["-ctk", "q9", "hello"], 2, "q9"),
        (["-c", "4", "hello"], 1, "tokens, the context has 4: shorten the prompt"),
        (["--memory-limit", "x", "hello"], 2, "--memory-limit"),
    ],
)
def test_what_the_daemon_refuses_is_one_line(model: Path, flags: list[str], code: int, words: str) -> None:
    found = slotd("generate", model, *flags)
    assert (found.returncode, found.stdout) == (code, "")
    assert found.stderr.count("\n") == 1
    assert words in found.stderr


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("SLOTD_PARALLEL", "abc", "'abc': must be a whole number"),
        ("SLOTD_PARALLEL", "99", "--parallel 99: must be 1 to 64"),
        ("SLOTD_MAX_STALL", "x", "'x': must be a number"),
        ("SLOTD_EXACT", "maybe", "'maybe' is not a valid boolean"),
        ("SLOTD_CACHE_TYPE_K", "q9", "'q9' is not a K/V type"),
        ("SLOTD_MEMORY_LIMIT", "x", "--memory-limit 'x': must be a size"),
    ],
)
def test_a_wrong_variable_is_one_line_that_names_it(
    model: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, words: str
) -> None:
    monkeypatch.setenv(variable, value)
    found = slotd("generate", model, "hello")
    assert (found.returncode, found.stdout, found.stderr.count("\n")) == (2, "", 1)
    assert re.match(f"slotd: {variable}:? {re.escape(words)}", found.stderr)


def test_a_wrong_flag_is_named_although_its_variable_is_set(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLOTD_MEMORY_LIMIT", "1GiB")
    found = slotd("generate", model, "--memory-limit", "x", "hello")
    assert found.stderr.startswith("slotd: --memory-limit 'x'")


def test_a_file_that_is_no_model_is_exit_code_3(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"no model at all")
    found = slotd("generate", path, "hello")
    assert found.returncode == 3
    assert str(path) in found.stderr
    assert found.stderr.count("\n") == 1


# ----- chat from a pipe (field report 5)


def test_one_line_gives_one_answer(model: Path) -> None:
    found = slotd("chat", model, *GREEDY, "-n", "6", stdin="hi\n")
    expected = slotd("generate", model, *GREEDY, "-n", "6", stdin="hi\n")
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout == expected.stdout != ""


@pytest.mark.parametrize(("stdin", "code"), [("", 0), ("\n", 0), ('"""\n', 1), ("/nope\n", 1)])
def test_no_turn_gives_no_answer(model: Path, stdin: str, code: int) -> None:
    found = slotd("chat", model, stdin=stdin)
    assert (found.returncode, found.stdout) == (code, "")


def test_a_turn_that_does_not_fit_leaves_the_chat_usable(model: Path) -> None:
    found = slotd("chat", model, *GREEDY, "-c", "64", "-n", "4", stdin="x y " * 200 + "\nhi\n")
    alone = slotd("chat", model, *GREEDY, "-c", "64", "-n", "4", stdin="hi\n")
    assert (found.returncode, alone.returncode) == (1, 0)
    assert "tokens, the context has 64: /reset starts afresh" in found.stderr
    assert found.stdout == alone.stdout


def test_the_second_turn_reuses_the_first(model: Path) -> None:
    found = slotd("chat", model, *GREEDY, "-n", "8", stdin="hello " * 30 + "\nand\n/stats\n")
    assert found.returncode == 0
    assert re.search(r"[1-9]\d* cached", found.stderr)


def test_a_model_without_a_template_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plain.gguf"
    write_tiny_llama(path, chat_template=None)
    found = slotd("chat", path, stdin="hi\n")
    assert (found.returncode, found.stdout) == (2, "")
    assert "no chat template" in found.stderr


# ----- chat on a terminal


class Terminal:
    """A child on a pseudo-terminal of its own."""

    def __init__(self, command: list[str], home: Path) -> None:
        self.shown = ""
        self.pid, self._fd = pty.fork()
        if self.pid == 0:  # CPR: the terminal here answers no cursor position requests
            os.environ.update(TERM="xterm", PROMPT_TOOLKIT_NO_CPR="1", SLOTD_HOME=str(home), COLUMNS="200")
            os.execv(command[0], command)

    def read_until(self, pattern: str) -> None:
        """Wait until the pattern is shown after what was waited for last."""
        deadline = time.monotonic() + PATIENCE
        while (found := re.search(pattern, self.shown)) is None:
            assert time.monotonic() < deadline, f"never shown: {pattern}; but: {self.shown[-500:]!r}"
            if select.select([self._fd], [], [], 0.2)[0]:
                try:
                    self.shown += os.read(self._fd, 65536).decode("utf-8", "replace")
                except OSError:  # the child is gone
                    raise AssertionError(f"ended before {pattern}: {self.shown[-500:]!r}") from None
        self.shown = self.shown[found.end() :]

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def exit_code(self) -> int:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if select.select([self._fd], [], [], 0.05)[0]:
                try:
                    os.read(self._fd, 65536)
                except OSError:
                    pass
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.pid = 0
                return os.waitstatus_to_exitcode(status)
        raise AssertionError("it does not end")

    def close(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._fd)


# What prompt_toolkit writes when it begins and ends to read a line: bracketed paste on and off.
PROMPT = r"\x1b\[\?2004h[^\n]*>"
MORE = r"\x1b\[\?2004h[^\n]*\.\.\."
ANSWERING = r"\x1b\[\?2004l[\s\S]{40}"


@pytest.fixture
def terminal(model: Path, tmp_path: Path) -> Iterator[Terminal]:
    """A chat whose answers take many seconds unless they are cancelled."""
    child = Terminal(argv("chat", model, *GREEDY, "-c", "100000"), tmp_path)
    yield child
    child.close()


def test_ctrl_c_cancels_the_answer_and_not_the_program(terminal: Terminal, tmp_path: Path) -> None:
    terminal.read_until(PROMPT)
    terminal.type("hello there\r")
    terminal.read_until(ANSWERING)
    terminal.type("\x03")
    terminal.read_until("cancelled")
    terminal.read_until(r"tok/s")
    terminal.read_until(PROMPT)
    time.sleep(1.1)
    terminal.type("/stats\r")
    terminal.read_until("tokens generated")
    terminal.read_until(PROMPT)
    terminal.type("\x04")
    assert terminal.exit_code() == 0
    history = tmp_path / "chat_history"
    assert "hello there" in history.read_text()
    assert history.stat().st_mode & 0o777 == 0o600


def test_two_ctrl_c_within_a_second_leave(terminal: Terminal) -> None:
    terminal.read_until(PROMPT)
    terminal.type("hello\r")
    terminal.read_until(ANSWERING)
    daemons = psutil.Process(terminal.pid).children()
    assert len(daemons) == 1
    terminal.type("\x03")
    time.sleep(0.1)
    terminal.type("\x03")
    assert terminal.exit_code() == 130
    wait_until(lambda: not daemons[0].is_running(), "the daemon ends")


def test_blocks_and_commands_on_a_terminal(terminal: Terminal) -> None:
    terminal.read_until(PROMPT)
    terminal.type("/nope\r")
    terminal.read_until("unknown command /nope")
    terminal.read_until(PROMPT)
    terminal.type("/params max_tokens=3\r")
    terminal.read_until(r"max_tokens[ \x1b[0m]+3")
    terminal.read_until(PROMPT)
    terminal.type('"""\r')
    terminal.read_until(MORE)
    terminal.type("two lines\r")
    terminal.read_until(MORE)
    terminal.type('"""\r')
    terminal.read_until("cut off at 3 tokens")
    terminal.read_until(PROMPT)
    terminal.type("/quit\r")
    assert terminal.exit_code() == 0


# ----- batch


def write_jobs(path: Path, count: int, max_tokens: int = 8) -> None:
    jobs = [
        {"id": f"j{i}", "prompt": f"hello {i}", "params": {"max_tokens": max_tokens, "ignore_eos": True}}
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(job) + "\n" for job in jobs))


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def start_batch(model: Path, source: Path, out: Path, *flags: str) -> subprocess.Popen[str]:
    command = [*argv("batch", model, "--temp", "0", *flags), str(source), "-o", str(out)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def lines_in(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_batch_stopped_half_way_is_resumed(model: Path, tmp_path: Path, how: signal.Signals) -> None:
    source, out, part = tmp_path / "in", tmp_path / "out", tmp_path / "out.part"
    write_jobs(source, 60, max_tokens=40)
    child = start_batch(model, source, out)
    wait_until(lambda: lines_in(part) >= 5, "five records")
    child.send_signal(how)
    _, stderr = child.communicate(timeout=PATIENCE)
    assert child.returncode == (-how if how == signal.SIGKILL else 130)
    if how == signal.SIGINT:
        assert "--resume" in stderr
        assert "Traceback" not in stderr
    assert not out.exists()
    with part.open("ab") as file:
        file.write(b'{"line": 60, "ha')  # as if killed within a write
    kept = [json.loads(line) for line in part.read_bytes().splitlines()[:-1]]
    assert 5 <= len(kept) < 60
    child = start_batch(model, source, out, "--resume")
    _, stderr = child.communicate(timeout=PATIENCE)
    assert child.returncode == 0, stderr
    found = records(out)
    assert [record["id"] for record in found] == [f"j{i}" for i in range(60)]
    for entry in kept:  # taken as they were, times and all
        assert found[entry["line"] - 1] == entry["record"]
    assert not part.exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_batch_survives_the_death_of_its_daemon(model: Path, tmp_path: Path, number: int) -> None:
    source, out, part = tmp_path / "in", tmp_path / "out", tmp_path / "out.part"
    write_jobs(source, 40, max_tokens=40)
    child = start_batch(model, source, out)
    wait_until(lambda: lines_in(part) >= 3, "three records")
    [daemon] = psutil.Process(child.pid).children()
    daemon.send_signal(number)
    _, stderr = child.communicate(timeout=PATIENCE)
    assert child.returncode == 0, stderr
    assert [(entry["id"], len(entry["ids"])) for entry in records(out)] == [(f"j{i}", 40) for i in range(40)]


def test_a_batch_is_a_server_on_pipes(model: Path) -> None:
    child = subprocess.Popen(
        [*argv("batch", model, "--temp", "0", "--stream"), "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    for turn in range(3):
        job = {"id": "again", "prompt": "hello", "params": {"max_tokens": 4, "ignore_eos": True}}
        child.stdin.write(json.dumps(job).encode() + b"\n")
        child.stdin.flush()
        pieces = []
        while "finish_reason" not in (record := json.loads(child.stdout.readline())):
            pieces.append(record["delta"])
        assert record["line"] == turn + 1
        assert "".join(pieces) == record["text"]
    child.stdin.write(b"oops\n")
    stdout, _ = child.communicate(timeout=PATIENCE)
    assert json.loads(stdout)["error"]["code"] == "bad_json"
    assert child.returncode == 1


# ----- the rest


def test_doctor_is_well(model: Path) -> None:
    found = slotd("doctor", model, "--json")
    assert found.returncode == 0, found.stdout + found.stderr
    facts = json.loads(found.stdout)
    assert facts["self_test"]["ok"] is True
    assert (facts["model"]["path"], facts["backend"]["name"]) == (str(model), "numpy")


def test_bench_reports_rates_and_floor(model: Path) -> None:
    found = slotd("bench", model, "--prefill", "16", "--depth", "16", "-n", "8", "-r", "1", "--json")
    assert found.returncode == 0, found.stderr
    report = json.loads(found.stdout)
    assert report["prefill"][0]["tokens_per_s"] > 0 < report["decode"][0]["tokens_per_s"]
    floor = report["floor"]  # on a busy machine the bandwidth may be anything, and the floor above the decode
    least = floor["weight_bytes"] / floor["bandwidth_bytes_per_s"]
    assert 0 < floor["reached"] == pytest.approx(least / report["decode"][0]["token_s"])


def test_daemon_passes_arguments_and_descriptors_on(model: Path) -> None:
    read, write = os.pipe()
    command = [
        sys.executable,
        "-m",
        "slotd.client",
        "daemon",
        str(model),
        f"--stream-fd={write}",
        "--max-ctx=64",
    ]
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(write,), text=True
    )
    os.close(write)
    stdout, _ = child.communicate("- 2 ids=5,6,7 ignore_eos=1\nPROPS\n", timeout=PATIENCE)
    assert child.returncode == 0
    assert "[daemon] ready" in stdout
    assert '"max_ctx":64' in stdout.replace(" ", "")
    with os.fdopen(read, "rb") as stream:
        ids = stream.read()
    assert len(ids) == 3 * 4
    assert ids[-4:] == b"\xff\xff\xff\xff"


def test_try_answers_one_question_and_shows_rates(model: Path) -> None:
    found = slotd("try", model)
    assert found.returncode == 0
    assert "tok/s" in found.stderr


def test_a_killed_chat_leaves_no_daemon(model: Path) -> None:
    child = subprocess.Popen(argv("chat", model), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    wait_until(lambda: psutil.Process(child.pid).children(), "a daemon")
    [daemon] = psutil.Process(child.pid).children()
    child.kill()
    child.communicate()
    wait_until(lambda: not daemon.is_running(), "the daemon ends")
