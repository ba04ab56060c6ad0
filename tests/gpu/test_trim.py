"""A long prompt on the GPU is computed the same with trims of the pool between its pieces and without."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from slotd.daemon.config import Config
from tests.bench.figures import Figures
from tests.bench.gpu_trim import compare
from tests.bench.synthetic_gguf import write_synthetic
from tests.gpu.same_bits import SHAPES


@pytest.mark.parametrize("kv", ["f16", "q8_0"])
def test_trims_change_memory_and_no_bit(tmp_path: Path, kv: str) -> None:
    model = write_synthetic(tmp_path / "small.gguf", SHAPES["small"], seed=7)
    figures = Figures(io.StringIO())
    config = Config(model=model, device="0", chunk=1024, k_type=kv, v_type=kv)
    without, with_trims, vmm = compare("small", config, 6000, 1024, figures)
    print(figures.table())
    assert len(with_trims.released) == 5  # 1024, 2048 .. 5120; the last piece is shorter
    assert without.released == vmm.released == []
    assert max(with_trims.released) > 0
    assert with_trims.ledger_peak <= 1.1 * without.ledger_peak  # the pool may cut its blocks otherwise
    assert with_trims.answer == without.answer
    assert vmm.answer == without.answer
