"""The kernels that tests/gpu/test_fold_order.py breaks on purpose: the breaks still fit, and compile."""

from __future__ import annotations

from pathlib import Path

import pytest

from slotd.daemon.ops.kernels import compile_cubin, loading
from slotd.daemon.ops.kernels.sources import FOLDER
from tests.gpu.broken_folds import BROKEN_FOLDS, BrokenFold, copy_sources, kernels_of


@pytest.mark.parametrize("name", BROKEN_FOLDS)
def test_a_break_changes_its_files(name: str, tmp_path: Path) -> None:
    copy_sources(tmp_path, BROKEN_FOLDS[name])
    copied = {path.name: path.read_text("utf-8") for path in tmp_path.iterdir()}
    sources = {path.name: path.read_text("utf-8") for path in (*FOLDER.glob("*.cu"), *FOLDER.glob("*.cuh"))}
    assert copied.keys() == sources.keys()
    changed = {file for file, text in sources.items() if copied[file] != text}
    broken = BROKEN_FOLDS[name]
    assert changed == {broken.file, broken.entries} - {""}
    compile_cubin(tmp_path / (broken.entries or broken.file), "sm_90")  # kept on disk as all kernels are


def test_a_break_that_no_longer_fits_is_an_error() -> None:
    with pytest.raises(ValueError, match="is there 0 times"):
        BrokenFold("linear.cu", {"no such text": ""}, r"^ENTRIES").texts()
    with pytest.raises(ValueError, match="no line is"):
        BrokenFold("linear.cu", {}, r"^no such line").texts()


def test_kernels_are_looked_up_elsewhere_for_a_while(tmp_path: Path) -> None:
    copy_sources(tmp_path, None)
    with kernels_of(tmp_path):
        assert loading.file_of("linear_u4_h32_8") == tmp_path / "linear.cu"
        assert loading._kernels == {}
    assert loading.file_of("linear_u4_h32_8") == FOLDER / "linear.cu"
