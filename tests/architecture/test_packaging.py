"""What a user installs: the wheel has every module and data file of the three folders, and nothing else."""

from __future__ import annotations

import email
import shutil
import subprocess
import sys
import zipfile
from email.message import Message
from pathlib import Path

import pytest

from slotd.protocol.version import __version__
from tests.architecture.sources import PACKAGES, ROOT

#: Files that make up a distribution; everything else in the root must not matter for it.
NEEDED = ("setup.cfg", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy: setuptools writes build/ and egg-info beside what it reads."""
    tree = tmp_path_factory.mktemp("tree")
    for name in NEEDED:
        shutil.copy(ROOT / name, tree / name)
    for folder in [*PACKAGES.values(), ROOT / "tests"]:
        shutil.copytree(folder, tree / folder.name, ignore=shutil.ignore_patterns("__pycache__"))
    out = tmp_path_factory.mktemp("dist")
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    command = [*pip, "--wheel-dir", str(out), "."]
    built = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=240, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def contents(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    archive = zipfile.ZipFile(wheel)
    return email.message_from_bytes(archive.read(f"slotd-{__version__}.dist-info/METADATA"))


def files_of_the_packages() -> set[str]:
    """Every file below the three folders under the name it must have in the wheel."""
    return {
        f"slotd/{path.relative_to(ROOT).as_posix()}"
        for folder in PACKAGES.values()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_wheel_holds_exactly_the_three_packages(contents: set[str]) -> None:
    shipped = {name for name in contents if not name.startswith(f"slotd-{__version__}.dist-info/")}
    assert shipped == files_of_the_packages()


def test_data_files_are_there(contents: set[str]) -> None:
    typed = {f"slotd/{name}/py.typed" for name in ("protocol", "daemon", "client")}
    assert typed | {"slotd/protocol/PROTOCOL.md"} <= contents


def test_license_is_there(contents: set[str]) -> None:
    assert any(name.endswith("LICENSE") and ".dist-info/" in name for name in contents)


def test_name_and_version(wheel: Path, metadata: Message) -> None:
    assert (metadata["Name"], metadata["Version"]) == ("slotd", __version__)
    assert wheel.name == f"slotd-{__version__}-py3-none-any.whl"
    assert metadata["Requires-Python"] == ">=3.11"


def test_one_console_script(wheel: Path) -> None:
    text = zipfile.ZipFile(wheel).read(f"slotd-{__version__}.dist-info/entry_points.txt").decode()
    assert text.split() == ["[console_scripts]", "slotd", "=", "slotd.client.cli:main"]


def test_cupy_is_only_an_extra(metadata: Message) -> None:
    requirements = metadata.get_all("Requires-Dist") or []
    cupy = [requirement for requirement in requirements if requirement.startswith("cupy")]
    assert len(cupy) == 4  # one for each kind of GPU, and the tests compile every kernel
    assert all("extra ==" in requirement for requirement in cupy)
    assert {"cuda12", "cuda13", "rocm", "test"} == set(metadata.get_all("Provides-Extra") or [])


def test_wheel_works_away_from_the_tree(wheel: Path, tmp_path: Path) -> None:
    """Unpacked into an empty folder, the three packages import from there and not from this checkout."""
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    script = (
        "import sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in repr(f).lower()]\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "import slotd.protocol, slotd.daemon, slotd.client\n"
        "print(slotd.protocol.__file__, slotd.daemon.__file__, slotd.client.__file__, sep='\\n')\n"
    )
    command = [sys.executable, "-P", "-c", script, str(tmp_path / "site")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert all(line.startswith(str(tmp_path)) for line in done.stdout.split())
