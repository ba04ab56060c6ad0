import os
import subprocess
import sys
from pathlib import Path

import pytest

from slotd.daemon import blas_threads
from slotd.daemon.blas_threads import SPIN_VARIABLE, VARIABLES, limit_blas_threads, usable_cores


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


@pytest.mark.usefixtures("eight_cores")
@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("max 100000\n", 8),
        ("400000 100000\n", 4),
        ("250000 100000\n", 2),
        ("50000 100000\n", 1),
        ("1600000 100000\n", 8),
        ("", 8),
        ("nonsense\n", 8),
        ("many 100000\n", 8),
    ],
)
def test_the_quota_cuts_the_affinity(tmp_path: Path, text: str, cores: int) -> None:
    cpu_max = tmp_path / "cpu.max"
    cpu_max.write_text(text)
    assert usable_cores(cpu_max) == cores


@pytest.mark.usefixtures("eight_cores")
def test_without_a_control_group_the_affinity_counts(tmp_path: Path) -> None:
    assert usable_cores(tmp_path / "missing") == 8


@pytest.mark.parametrize(("counted", "cores"), [(6, 6), (None, 1)])
def test_a_system_without_affinity_counts_its_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted: int | None, cores: int
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: counted)
    assert usable_cores(tmp_path / "missing") == cores


@pytest.fixture
def nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process; what this one has chosen comes back."""
    for name in (*VARIABLES, SPIN_VARIABLE):
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)
    monkeypatch.setattr(blas_threads, "_chosen_here", False)


@pytest.mark.usefixtures("nothing_chosen")
def test_every_library_gets_the_number_of_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas_threads, "usable_cores", lambda: 3)
    limit_blas_threads()
    assert not blas_threads.chosen_by_user()
    assert [os.environ[name] for name in VARIABLES] == ["3", "3", "3"]


@pytest.mark.usefixtures("nothing_chosen")
@pytest.mark.parametrize("chosen", VARIABLES)
def test_what_the_user_chose_stays(monkeypatch: pytest.MonkeyPatch, chosen: str) -> None:
    monkeypatch.setenv(chosen, "7")
    limit_blas_threads()
    assert blas_threads.chosen_by_user()
    assert {name: os.environ.get(name) for name in VARIABLES} == {
        name: "7" if name == chosen else None for name in VARIABLES
    }


def test_the_module_does_not_load_numpy_itself() -> None:
    code = "import sys, slotd.daemon.blas_threads; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
