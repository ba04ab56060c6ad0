"""`make run` when it is left with Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PATIENCE = 60  # seconds


@pytest.mark.parametrize(("code", "failed"), [(130, False), (0, False), (1, True)])
def test_leaving_with_ctrl_c_is_no_error_of_make(tmp_path: Path, code: int, failed: bool) -> None:
    found = subprocess.run(
        make_run(tmp_path, f"exit {code}"), capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert ("Error" in found.stderr, found.returncode != 0) == (failed, failed), found.stderr


def test_the_key_itself_is_no_error_of_make_either(tmp_path: Path) -> None:
    """It reaches make, the shell of the recipe and slotd at once. make ends by the signal, without a word."""
    python = "import signal, sys; signal.signal(2, lambda *_: sys.exit(130)); print('asked', flush=True)"
    command = make_run(tmp_path, f'exec "{sys.executable}" -c "{python}; signal.pause()"')
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert child.stdout is not None
    assert any("asked" in line for line in child.stdout)
    os.killpg(child.pid, signal.SIGINT)
    _, said = child.communicate(timeout=PATIENCE)
    assert (child.returncode, said.strip()) == (-signal.SIGINT, "")


def make_run(environment: Path, slotd: str) -> list[str]:
    """The target of the real Makefile, in an environment whose `slotd` is this line of shell."""
    root = Path(__file__).parents[2]
    (environment / "bin").mkdir()
    for name, line in (("python", f'exec "{sys.executable}" "$@"'), ("slotd", slotd)):
        program = environment / "bin" / name
        program.write_text(f"#!/bin/sh\n{line}\n")
        program.chmod(0o755)
    (environment / ".slotd-run").write_text(f"{root}\n")  # says that slotd is installed there
    return ["make", "-C", str(root), "run", f"VENV={environment}"]
