"""The memory that inspect names, against the pool of a loaded model and a request that fills the context."""

from __future__ import annotations

from pathlib import Path

import pytest

from slotd.daemon.kv.numpy_need import NumpyNeed, numpy_need
from slotd.daemon.weights.reader import open_model
from tests.fakes.pressure_rig import PressureRig
from tests.fakes.tiny_gguf import write_tiny_llama

DATA = Path(__file__).parents[3] / "golden" / "data"

#: Name -> options of the model; None: a golden model.
MODELS = {
    "qwen3": None,
    "qwen35": None,
    "qwen35-mtp": None,
    "tied": {"n_ctx": 2048, "tied": True},
    "untied": {"n_ctx": 2048},
    "wide": {"n_ctx": 2048, "n_embd": 128},
}


@pytest.fixture(scope="module", params=sorted(MODELS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = MODELS[request.param]
    if options is None:
        return DATA / f"{request.param}.gguf"
    return write_tiny_llama(tmp_path_factory.mktemp("need") / f"{request.param}.gguf", **options)


def need_of(model: Path, context: int, kv: str) -> NumpyNeed:
    with open_model(model) as file:
        return numpy_need(file, file.hyper, context, kv, kv)


def state_bytes(rig: PressureRig) -> int:
    return rig.engine.recurrence.state_bytes


def test_weights_are_what_the_pool_counts(model: Path) -> None:
    rig = PressureRig(model)
    assert need_of(model, 100, "f32").weights == rig.engine.memory.live("weights")


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen35", "qwen35-mtp"])
def test_weights_of_other_architectures(name: str) -> None:
    path = Path(__file__).resolve().parents[3] / "golden" / "data" / f"{name}.gguf"
    assert need_of(path, 100, "f32").weights == PressureRig(path).engine.memory.live("weights")


@pytest.mark.parametrize(("context", "kv"), [(70, "f32"), (1000, "f16"), (2000, "f32")])
def test_a_request_that_fills_the_context_is_answered_within_it(model: Path, context: int, kv: str) -> None:
    need = need_of(model, context, kv)
    rig = PressureRig(model, chunk=128, k_type=kv, v_type=kv, max_ctx=context)
    rig.engine.memory.limit = need.weights + need.kv + state_bytes(rig) + need.working
    rig.prompt("r", [(7 * i) % 300 + 3 for i in range(context - 2)], 2)
    rig.run()
    assert (rig.ended("r").status, rig.ended("r").code) == ("length", None)


def test_it_is_no_more_than_it_has_to_be(model: Path) -> None:
    """A third of the working memory would not do."""
    need = need_of(model, 1500, "f32")
    held = need.weights + need.kv + state_bytes(PressureRig(model))
    for limit, fits in ((held - 1, False), (held + need.working // 3, False), (held + need.working, True)):
        rig = PressureRig(model, chunk=128, max_ctx=1500)
        rig.engine.memory.limit = limit
        rig.prompt("r", [(7 * i) % 300 + 3 for i in range(1498)], 2)
        rig.run()
        assert (rig.ended("r").code is None) is fits, limit
