"""The checks of equal bits fail where the fold order depends on the launch, and pass where it does not.

The broken kernels are those of broken_folds.py; the machinery around them is the same for the sound ones.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.bench.synthetic_gguf import write_synthetic
from tests.gpu.broken_folds import BROKEN_FOLDS, copy_sources, kernels_of
from tests.gpu.linear_rig import outlier_rows, product, weights
from tests.gpu.same_bits import SHAPES, cuda_engine, rows_unlike_alone
from tests.gpu.test_attention import alone, make_call, make_rig

#: What is joined in which order: contexts where something of it is, and counts of rows with enough of them.
#: The linear layers round what attention gives them to halves, and one in thousands of values is so near
#: a bound that a last bit of float32 counts: many rows are needed to see one through the whole model.
WHOLE_MODEL = {
    "segments": ((1, 64), (2, 23)),
    "splits": ((600, 1100), (23, 64)),
    "tiles": ((130, 400), (23, 64)),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "small.gguf"
    return write_synthetic(path, SHAPES["small"], seed=7, outlier=3)


def unlike(model: Path, name: str) -> list[tuple[int, int, int]]:
    contexts, counts = WHOLE_MODEL[name]
    return rows_unlike_alone(cuda_engine(model, "f16"), contexts, counts)


@pytest.mark.parametrize("name", BROKEN_FOLDS)
def test_whole_models_show_a_broken_fold(model: Path, name: str, tmp_path: Path) -> None:
    sound, broken = tmp_path / "sound", tmp_path / "broken"
    for folder, fold in ((sound, None), (broken, BROKEN_FOLDS[name])):
        folder.mkdir()
        copy_sources(folder, fold)
    with kernels_of(broken):
        seen = unlike(model, name)
    print(f"{name}: {len(seen)} rows differ, {seen[:8]}")
    assert seen
    with kernels_of(sound):
        assert unlike(model, name) == []


def test_a_product_shows_a_broken_fold(memory, tmp_path: Path) -> None:
    copy_sources(tmp_path, BROKEN_FOLDS["segments"])
    matrix, _ = weights(memory, ["Q4_1"], 176, 2304)
    x = outlier_rows(23, 2304)
    expected = product(memory, x[:1], matrix)[0]
    assert product(memory, x, matrix)[0].tobytes() == expected.tobytes()
    with kernels_of(tmp_path):
        assert product(memory, x[:1], matrix)[0].tobytes() == expected.tobytes()
        assert product(memory, x, matrix)[0].tobytes() != expected.tobytes()


@pytest.mark.parametrize(("name", "committed"), [("splits", 1025), ("tiles", 300)])
def test_attention_shows_a_broken_fold(name: str, committed: int, tmp_path: Path) -> None:
    copy_sources(tmp_path, BROKEN_FOLDS[name])
    rig = make_rig("smollm")
    call = make_call(rig, committed, 7, 5, tree=True)

    def differing() -> int:
        together = rig.run([call])
        lone = np.stack([rig.run([alone(call, row)])[0] for row in range(7)])
        return int((lone.view(np.uint32) != together.view(np.uint32)).sum())

    assert differing() == 0
    with kernels_of(tmp_path):
        found = differing()
        print(f"{name}: {found} words differ")
        assert found
