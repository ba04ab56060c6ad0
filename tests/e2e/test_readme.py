"""The Python of README.md, run as it stands, does what its comments say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import slotd.client

README = Path(__file__).resolve().parents[2] / "README.md"


def test_the_python_example(
    default_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers: list[Any] = []

    class Recording(slotd.client.Client):
        def generate(self, *args: Any, **options: Any) -> Any:
            answers.append(super().generate(*args, **options))
            return answers[-1]

    blocks = re.findall(r"^```python\n(.*?)^```$", README.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    block = blocks[0]  # the others are of models that reason
    monkeypatch.setenv("SLOTD_MODEL", str(default_model))
    monkeypatch.setattr(slotd.client, "Client", Recording)
    exec(compile(block, str(README), "exec"), {})
    assert len(capsys.readouterr().out) > 20
    stopped, scored, first, more = answers
    assert (stopped.finish_reason, stopped.text) == ("stop", " four, ")
    assert [len(each.top) for each in scored.logprobs] == [3] * 4
    assert len(first.ids) == len(more.ids) == 8
    assert more.cached_tokens >= len(first.ids)
