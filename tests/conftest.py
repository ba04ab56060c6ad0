"""Shared fixtures, the report header, and the surroundings of every test: own folders, no SLOTD_ settings."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

# Tests import their support code as tests.fakes and so on.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slotd.daemon.blas_threads import usable_cores  # it does not import NumPy

#: Files that take longest, the longest first. Tests that run side by side begin with them: then none of them
#: is left at the end, when there is nothing else to do.
LONG_FILES = (
    "unit/daemon/ops/test_kernels_compile.py",
    "e2e/test_golden_routes.py",
    "e2e/test_agent_loop.py",
    "e2e/test_chat_cli.py",
)


def _keep_to_own_cores() -> None:
    """Give each of the processes that run tests side by side (pytest-xdist) its own part of the cores.

    The daemons that it starts inherit them and choose their threads by them. Threads of a product spin while
    they wait for each other: daemons that share cores would take several times as long.
    """
    number, count = os.environ.get("PYTEST_XDIST_WORKER", ""), os.environ.get("PYTEST_XDIST_WORKER_COUNT", "")
    if number and count and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        own = cores[int(number.removeprefix("gw")) % len(cores) :: int(count)]
        os.sched_setaffinity(0, own[: max(1, usable_cores() // int(count))])


_keep_to_own_cores()

# OpenBLAS reads this once, when numpy is imported. It counts the machine's cores, not those that this process
# may use, and its threads spin: more of them than cores make every product slower. The daemons that tests
# spawn inherit it.
os.environ.setdefault("OPENBLAS_NUM_THREADS", str(usable_cores()))

#: A model file to use instead of the default one: saves the download on a machine that has it.
MODEL_VARIABLE = "SLOTD_MODEL_FOR_TESTS"

# The developer's own settings must not change what is tested. SLOTD_HOME says where fetched models are; each
# test hides the rest of it (own_surroundings).
for _name in [name for name in os.environ if name.startswith("SLOTD_")]:
    if _name not in (MODEL_VARIABLE, "SLOTD_HOME"):
        del os.environ[_name]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With pytest-xdist, which hands files out in this order: those that take longest first."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        rank = {f"tests/{name}": number for number, name in enumerate(LONG_FILES)}
        items.sort(key=lambda item: rank.get(item.nodeid.partition("::")[0], len(rank)))


def pytest_report_header() -> list[str]:
    """The versions that decide about results."""
    import numpy as np

    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    threads = os.environ["OPENBLAS_NUM_THREADS"]
    libraries = " ".join(f"{name} {_version(name)}" for name in ("numpy", "gguf", "tokenizers"))
    return [
        f"slotd: python {sys.version.split()[0]}, {libraries}",
        f"BLAS: {blas['name']} {blas['version']}, {threads} threads; cupy: {_cupy()}",
        f"model: {_named_model() or 'the default, fetched when it is not in the cache'}",
    ]


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "none"


def _cupy() -> str:
    found = [f"{name} {_version(name)}" for name in ("cupy-cuda12x", "cupy-cuda13x", "cupy-rocm-7-0", "cupy")]
    return ", ".join(entry for entry in found if not entry.endswith(" none")) or "none"


def _named_model() -> Path | None:
    named = os.environ.get(MODEL_VARIABLE)
    return Path(named) if named and Path(named).is_file() else None


# Daemons show themselves there (`slotd top`): those of tests not among the developer's own.
_runtime_folder = tempfile.mkdtemp(prefix="slotd-tests-")
atexit.register(shutil.rmtree, _runtime_folder, ignore_errors=True)
os.environ["XDG_RUNTIME_DIR"] = _runtime_folder


@pytest.fixture(autouse=True)
def own_surroundings(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """State and settings live in a new folder.

    The folder of fetched models stays what it is: found there, the default model is not fetched again.
    """
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "config"))
    models = os.environ.get("SLOTD_HOME")
    if models:  # it holds models and state: keep the one, hide the other
        monkeypatch.delenv("SLOTD_HOME")
        (home / "cache").mkdir()
        (home / "cache" / "slotd").symlink_to(Path(models).expanduser().absolute())
        monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model's file. When it cannot be had, the tests that need it fail and say why."""
    from slotd.client.fetch import resolve_model
    from slotd.protocol.errors import SlotdError

    if named := _named_model():
        return named
    try:
        return Path(resolve_model(None, fetch=True))
    except SlotdError as error:
        pytest.fail(f"no default model ({MODEL_VARIABLE}=FILE names one to use): {error}", pytrace=False)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama model of a few kilobytes with seeded random weights, written once."""
    from tests.fakes.tiny_gguf import write_tiny_llama

    path = tmp_path_factory.mktemp("tiny") / "tiny-llama.gguf"
    write_tiny_llama(path)
    return path
