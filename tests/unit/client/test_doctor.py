"""The doctor's facts and verdict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slotd.client import doctor
from slotd.client.completion import Completion
from slotd.protocol.errors import DaemonStartError, ModelError
from tests.fakes.fake_client import FakeClient, completion


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"x" * 1000)
    return path


def five(request: dict[str, Any]) -> Completion:
    return completion((1, 2, 3, 4, 5))


def test_healthy(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    client = FakeClient(five)
    assert doctor.run(lambda: model, lambda path: client, as_json=True) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["self_test"]["ok"] is True
    assert facts["self_test"]["ids"] == [1, 2, 3, 4, 5]
    assert facts["model"] == {"path": str(model), "bytes": 1000, "identity": "abc", "arch": "llama"}
    assert facts["versions"]["slotd"]
    assert facts["memory"]["total"] >= facts["memory"]["available"] > 0
    assert facts["cpu"]["cores"] >= 1
    assert client.closed


def test_for_a_person(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.run(lambda: model, lambda path: FakeClient(five), as_json=False) == 0
    printed = capsys.readouterr().out
    for words in ("self-test", "ok: 't1 t2 t3 t4 t5 '", str(model), "abc", "BLAS", "available of"):
        assert words in printed


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ([(1, 2), (1, 2)], "2 tokens came, not 5"),
        ([(1, 2, 3, 4, 5), (1, 2, 3, 4, 6)], "the same greedy prompt gave"),
    ],
)
def test_a_wrong_answer_fails(
    model: Path, answers: list[tuple[int, ...]], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    left = iter(answers)
    client = FakeClient(lambda request: completion(next(left)))
    assert doctor.run(lambda: model, lambda path: client, as_json=False) == 1
    assert words in capsys.readouterr().out


def test_no_daemon_and_no_model_are_facts(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def no_daemon(path: Path) -> FakeClient:
        raise DaemonStartError("out of memory")

    def no_model() -> Path:
        raise ModelError("run `slotd fetch`")

    assert doctor.run(lambda: model, no_daemon, as_json=False) == 1
    assert "FAILED: out of memory" in capsys.readouterr().out
    assert doctor.run(no_model, no_daemon, as_json=True) == 3
    facts = json.loads(capsys.readouterr().out)
    assert facts["self_test"] == {"ok": False, "error": "run `slotd fetch`", "exit_code": 3}
    assert facts["model"] is None


def test_without_a_device_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    numpy = {"name": "numpy"}
    monkeypatch.setattr(doctor, "cupy_version", lambda: "13.0")
    assert "found no device" in doctor.device(numpy)["reason"]
    assert "no daemon" in doctor.device({})["reason"]
    assert "no daemon" in doctor.device({}, "the model file is damaged")["reason"]
    gone = "--device 0: no such CUDA device (CUDA finds no device)"
    assert doctor.device({}, gone) == {"name": None, "reason": gone}
    monkeypatch.setattr(doctor, "cupy_version", lambda: None)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    assert "not installed" in doctor.device(numpy)["reason"]


def test_the_device_of_the_daemon(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    client = FakeClient(five)
    client.hello["backend"] = {
        "name": "cuda", "math": "exact", "device": "NVIDIA H200", "compute_capability": "9.0",
        "driver": "13.0", "memory_free": 100 << 30, "memory_total": 140 << 30,
    }  # fmt: skip
    assert doctor.run(lambda: model, lambda path: client, as_json=False) == 0
    printed = capsys.readouterr().out
    assert "NVIDIA H200, compute capability 9.0, CUDA 13.0, 100.0 GiB free of 140.0 GiB" in printed
    assert "cuda, math exact" in printed
