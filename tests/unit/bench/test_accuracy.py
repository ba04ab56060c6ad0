"""The accuracy table, on the CPU: of what is the same, and of what is not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.bench import accuracy
from tests.bench.synthetic_gguf import PRESETS, write_synthetic


def test_differences_are_counted() -> None:
    expected = np.array([[1, 2, 3], [5, 4, 0], [0, 1, 0.5]], np.float32)
    got = expected + np.array([[0, 0, 0.25], [0, 1.5, 0], [0, 0, 1]], np.float32)
    difference = accuracy.Difference()
    difference.add(got[:2], expected[:2])
    difference.add(got[2:], expected[2:])
    assert difference.report() == {
        "tokens": 3, "max": 1.5, "mean": pytest.approx(2.75 / 9), "argmax_agreement": pytest.approx(1 / 3),
        "least_gap_flipped": 0.5, "largest_gap_flipped": 1.0,
    }  # fmt: skip


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_synthetic(tmp_path / "tiny.gguf", PRESETS["tiny"])
    monkeypatch.setattr(accuracy, "PIECE", 48)
    argv = ["accuracy", str(model), "--math", "exact", "fast", "--kv", "f32", "q4_0", "--tokens", "100"]
    monkeypatch.setattr("sys.argv", [*argv, "--device", "cpu"])
    assert accuracy.main() == 0
    printed = capsys.readouterr()
    lines, rows = printed.out.split("\n\n")
    entries = [json.loads(line) for line in lines.splitlines()]
    assert [(entry["kv"], entry["on"]) for entry in entries] == [
        (kv, on) for kv in ("f32", "q4_0") for on in ("golden prompts", "text, prompt", "text, steps of 8")
    ]
    assert [entry["tokens"] for entry in entries][1:3] == [100, 100]
    assert all(entry["max"] < 1e-3 for entry in entries if entry["kv"] == "f32")
    assert all(entry["max"] > 1e-3 for entry in entries if entry["kv"] == "q4_0")
    assert len(rows.splitlines()) == 2 + len(entries)
    assert "fast" in printed.err  # refused on the CPU, with the reason
