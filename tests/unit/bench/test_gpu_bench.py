"""The benchmark command on the NumPy backend: every part gives its figures, and the table judges them."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest

from tests.bench import engine_timing, gpu
from tests.bench.engine_timing import StepGraphs
from tests.bench.figures import GOALS, Figures


def test_every_part_gives_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, few in {"STEPS": 6, "WARM": 1, "STEPS_OF_ROWS": 3, "MOVES": 3, "MOST_RUNS": 2}.items():
        monkeypatch.setattr(engine_timing, name, few)
    out = tmp_path / "figures.jsonl"
    argv = ["gpu", "--model", "tiny", "--folder", str(tmp_path), "--file", str(out)]
    argv += ["--part", "rates", "prefill", "decode", "rows", "snapshot", "trim", "full", "long"]
    argv += ["--set", "k_type=q8_0", "chunk=100"]
    monkeypatch.setattr("sys.argv", argv)
    assert gpu.main() == 0
    entries = [json.loads(line) for line in out.read_text().splitlines()]
    plan = gpu.PLANS["tiny"]
    found = {(entry["figure"], entry["size"]) for entry in entries}
    assert {("device", 0), ("rates", 0), ("load", 0), ("write_file", 0), ("memory", 0)} <= found
    assert {("prefill", n) for n in plan.prefill} | {("decode", n) for n in plan.decode} <= found
    assert {("rows", n) for n in plan.rows} <= found
    assert plan.full is not None
    assert plan.long is not None
    assert {("full", plan.full[0]), *(("long", n) for n in plan.long[0])} <= found
    assert {(name, 128) for name in ("snapshot", "restore", "host_save", "host_load")} <= found
    without, with_trims = (entry for entry in entries if entry["figure"] == "trim")
    assert (without["trims"], with_trims["trims"]) == (0, 4)
    assert with_trims["released_most"] > 0
    assert without["same"]
    assert with_trims["same"]
    assert [entry["same"] for entry in entries if entry["figure"] == "long"] == [True, True, None]
    numbers = [value for entry in entries for value in entry.values() if isinstance(value, float)]
    assert all(math.isfinite(number) and number > 0 for number in numbers)
    printed = capsys.readouterr().out
    assert printed.startswith(out.read_text())  # nothing is kept back for the end
    assert "prefill tiny 64" in printed.split("\n\n")[1]


def test_an_unknown_setting_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["gpu", "--set", "speed=11"])
    with pytest.raises(SystemExit):
        gpu.main()
    assert "speed=11: expected NAME=VALUE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "value", "kept"),
    [
        (("decode", "135m", 0), 1199.0, "no"),
        (("decode", "135m", 0), 1200.0, "must"),
        (("decode", "135m", 0), 1900.0, "aim"),
        (("rows", "23b", 16), 10.1, "no"),
        (("rows", "23b", 16), 10.0, "must"),
        (("rows", "23b", 16), 6.4, "aim"),
    ],
)
def test_a_goal_is_kept_from_its_own_side(key: tuple[str, str, int], value: float, kept: str) -> None:
    goal = GOALS[key]
    assert goal.met(value) == kept
    figures = Figures(io.StringIO())
    figures.add(*key, **{goal.field: value})
    (line,) = figures.table().splitlines()[1:]
    assert goal.text.format(value) in line
    assert kept in line.split()


def test_the_last_graph_is_launched_again() -> None:
    class Stream:
        launched = 0
        waited = 0

        def launch(self, graph: object) -> None:
            self.launched += 1

        def wait(self) -> None:
            self.waited += 1

    graphs, stream = StepGraphs(), Stream()
    assert graphs.device_seconds() is None
    graphs.last = (stream, object())
    assert graphs.device_seconds(n=7) is not None
    assert (stream.launched, stream.waited) == (7, 2)
