"""A model with recurrent layers in the real daemon, on the CPU; tests/gpu tells the same story to a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.recurrent_story import Story, tell

DATA = Path(__file__).parents[1] / "golden" / "data"


@pytest.mark.parametrize("name", ["qwen35"])
def test_field_reports_18_24_25_34(tmp_path: Path, name: str) -> None:
    tell(Story(DATA / f"{name}.gguf", tmp_path, "--device=cpu", "--exact", n_vocab=320))
