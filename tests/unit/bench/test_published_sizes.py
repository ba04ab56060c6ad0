"""Files of every published qwen model: of full size they are taken, with their heads they run on NumPy.

What the matrices hold takes too much memory here: in the files of full size they are holes, and what runs has
the published heads, channels, states and keys, but a hidden width of 256, four layers and few tokens.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest

from slotd.daemon.engine import Engine
from slotd.daemon.kv.numpy_need import numpy_need
from slotd.daemon.numpy_backend import NumpyBackend
from slotd.daemon.rows import Kind
from slotd.daemon.weights.architectures import expected_tensors
from slotd.daemon.weights.kv_formats import kv_bytes_per_token
from slotd.daemon.weights.reader import open_model
from tests.bench.model_shapes import PRESETS, Q4_K_M, UNEVEN, Shape, tensors
from tests.bench.synthetic_gguf import write_hollow, write_synthetic
from tests.fakes.row_calls import run

QWEN = [name for name in PRESETS if name.startswith("qwen")]

#: Of the reference: MiB of state in all layers, KiB of K/V for a token in f16.
STATES = {
    "qwen35-0.8b": (18 * (1 + 72 / 1024), 12),
    "qwen35-2b": (18 * (1 + 72 / 1024), 12),
    "qwen35-4b": (24 * (2 + 96 / 1024), 32),
    "qwen35-9b": (24 * (2 + 96 / 1024), 32),
    "qwen35-27b": (48 * (3 + 120 / 1024), 64),
}

#: Whose file has all of its tokens too: that alone takes seconds.
WITH_ALL_TOKENS = ("qwen3-0.6b", "qwen35-27b")


@pytest.mark.parametrize("mix", [Q4_K_M, UNEVEN])
@pytest.mark.parametrize("name", QWEN)
def test_a_file_of_full_size_is_taken(tmp_path: Path, name: str, mix: str) -> None:
    """With the block for further tokens where there is one. All tensors are checked."""
    shape = dataclasses.replace(
        PRESETS[name], weight_type=mix, n_mtp=1 if PRESETS[name].arch == "qwen35" else 0
    )
    if name not in WITH_ALL_TOKENS or mix != Q4_K_M:
        shape = dataclasses.replace(shape, n_vocab=1024)
    with open_model(write_hollow(tmp_path / "m.gguf", shape)) as file:
        h = file.hyper
        assert (h.n_layer, h.n_embd, h.n_ff, h.n_vocab) == (
            shape.n_layer, shape.n_embd, shape.n_ff, shape.n_vocab,
        )  # fmt: skip
        assert (h.n_head, h.n_head_kv, h.head_dim, h.value_dim) == (
            shape.n_head, shape.n_head_kv, shape.head_dim, shape.head_dim,
        )  # fmt: skip
        assert (h.rope_base, h.rope_dims, h.tied) == (shape.rope_base, shape.rope_dims, shape.tied)
        assert (h.n_ctx_train, h.n_nextn) == (shape.n_ctx, shape.n_mtp)
        computed = dataclasses.replace(shape, n_mtp=0)
        assert set(expected_tensors(h)) == {spec.name for spec in tensors(computed)}
        n_parameters = sum(math.prod(spec.shape) for spec in tensors(computed))
        need = numpy_need(file, h, 1024, "tq3_0", "tq3_0").weights
        assert 4 * n_parameters <= need < 4.5 * n_parameters
        if h.delta_net is None:
            assert name not in STATES
            return
        mib = h.delta_net.state_bytes / 2**20
        assert (mib, kv_bytes_per_token(h, "f16", "f16") / 1024) == STATES[name]


def with_its_heads(name: str, **changes: object) -> Shape:
    """As published but for the width, the layers and the tokens."""
    small = {"n_embd": 256, "n_ff": 512, "n_layer": 4, "n_vocab": 512}
    return dataclasses.replace(PRESETS[name], **(small | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "mix"), [*((name, Q4_K_M) for name in QWEN), ("qwen3-0.6b", UNEVEN), ("qwen35-4b", UNEVEN)]
)
def test_a_model_with_the_heads_of_each_runs(tmp_path: Path, name: str, mix: str) -> None:
    """In K/V types that all of their heads can have, by pieces, by steps and from a slot."""
    shape = with_its_heads(name, weight_type=mix, n_mtp=1 if PRESETS[name].arch == "qwen35" else 0)
    with open_model(write_synthetic(tmp_path / "m.gguf", shape, seed=1)) as file:
        engine = Engine(file, NumpyBackend(), k_type="tq3_0", v_type="tq3_0")
    ids = np.random.default_rng(0).integers(3, 500, 80).tolist()
    whole = run(engine, engine.open(), ids)
    assert np.isfinite(whole).all()
    assert 1 < whole.std() < 4
    other = engine.open()
    first = run(engine, other, ids[:70], piece=64)
    engine.snapshot(0, other, first[-1])
    behind = run(engine, engine.restore(0), ids[70:], Kind.STEP, 5)
    # tq3_0 makes a step of what was rounding: the spread of the difference counts, not its largest.
    difference = np.concatenate([first, behind]) - whole
    assert np.sqrt(np.square(difference).mean()) < 0.1 * whole.std()
    np.testing.assert_array_equal(behind, run(engine, other, ids[70:], Kind.STEP, 5))
