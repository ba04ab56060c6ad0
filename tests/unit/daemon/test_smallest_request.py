"""A daemon that could answer nothing does not start, and says what it needs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slotd.daemon.engine import Engine
from slotd.daemon.memory import DeviceMemory, Faults
from slotd.daemon.numpy_backend import NumpyBackend
from slotd.daemon.smallest_request import check_smallest_request
from slotd.daemon.weights.reader import open_model
from slotd.protocol.errors import ConfigError
from tests.fakes.pressure_rig import PressureRig
from tests.fakes.tiny_draft import write_tiny_draft


def engine_of(model: Path, faults: str | None = None) -> Engine:
    with open_model(model) as file:
        return Engine(file, NumpyBackend(DeviceMemory(None, Faults.parse(faults))))


def refusal(engine: Engine, limit: int) -> str | None:
    engine.memory.limit = limit
    try:
        check_smallest_request(engine, limit)
    except ConfigError as error:
        assert engine.memory.limit == limit
        return str(error)
    return None


def test_the_need_that_is_named_is_enough_and_little_less_is_not(tiny_llama: Path) -> None:
    engine = engine_of(tiny_llama)
    held = engine.memory.live()
    said = refusal(engine, held + 1000)
    assert said is not None
    match = re.fullmatch(
        r"not even a request of one token fits: it needs about (\d+) bytes \((\d+) for the weights, "
        r"(\d+) for 1024 tokens of K/V, and room to compute in\), and --memory-limit is (\d+)", said
    )  # fmt: skip
    assert match is not None
    needed, weights, segment, limit = map(int, match.groups())
    assert (weights, segment, limit) == (engine.memory.live("weights"), 1024 * 512, held + 1000)
    assert refusal(engine_of(tiny_llama), needed) is None
    assert refusal(engine_of(tiny_llama), needed - 20_000) is not None
    rig = PressureRig(tiny_llama)
    rig.engine.memory.limit = needed
    rig.prompt("r", [5], 2)
    rig.run()
    assert rig.ended("r").status == "length"


def test_nothing_is_left_of_the_try(tiny_llama: Path) -> None:
    engine = engine_of(tiny_llama, "decode:1:9")  # no fault hits it, none is counted
    assert refusal(engine, engine.memory.live() + (8 << 20)) is None
    assert (engine.store.pages.n_used, engine.memory.cached, engine.memory.live("kv")) == (0, 0, 0)


def test_a_draft_goes_where_there_is_no_room_beside_it(tiny_llama: Path, tmp_path: Path) -> None:
    with open_model(tiny_llama) as file:
        engine = Engine(file, NumpyBackend(), draft=write_tiny_draft(tmp_path / "draft.gguf"))
    needed = re.search(r"needs about (\d+) bytes", refusal(engine_of(tiny_llama), 1000) or "")
    assert needed is not None
    assert refusal(engine, int(needed[1]) + 1000) is None
    assert not engine.drafts
    assert engine.drafting.refusal == "beside it there is no memory for a request of one token"
    engine.park()
    engine.unpark()
    assert not engine.drafts


def test_with_much_memory_nothing_is_tried(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(tiny_llama)
    monkeypatch.setattr(engine, "forward", lambda *_: 1 / 0)
    assert refusal(engine, 1 << 30) is None
