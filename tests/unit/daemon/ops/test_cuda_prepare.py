"""How wide rows may be on a CUDA device: said when a model is loaded, not at its first request."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from slotd.daemon.ops.cuda_prepare import check_widths, most_width, rounds_for
from slotd.daemon.weights.reader import open_model
from slotd.protocol.errors import ConfigError
from tests.bench.model_shapes import PRESETS
from tests.bench.synthetic_gguf import write_hollow


@pytest.mark.parametrize("name", PRESETS)
def test_every_published_size_fits(tmp_path: Path, name: str) -> None:
    with open_model(write_hollow(tmp_path / "model.gguf", PRESETS[name])) as file:
        check_widths(file.hyper)


def test_what_is_wider_is_refused_by_name(tmp_path: Path) -> None:
    with open_model(write_hollow(tmp_path / "model.gguf", PRESETS["tiny"])) as file:
        hyper = file.hyper
    with pytest.raises(ConfigError, match="feed-forward rows of 32769 numbers: CUDA takes up to 32768"):
        check_widths(replace(hyper, n_ff=32769))
    with pytest.raises(ConfigError, match="embedding rows of 24577 numbers: CUDA takes up to 24576"):
        check_widths(replace(hyper, n_embd=24577))


def test_rounds_are_as_few_as_can_be() -> None:
    assert [rounds_for("swiglu", width) for width in (64, 8192, 8193, 24576, 25600)] == [1, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="norm takes up to 24576"):
        rounds_for("norm", most_width("norm") + 1)
