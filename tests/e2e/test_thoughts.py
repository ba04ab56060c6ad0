"""Thoughts with a real daemon: a budget computes nothing twice, and the commands show or hide them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slotd.client import Client
from slotd.protocol.messages import Done
from tests.fakes.changed_gguf import write_changed
from tests.fakes.qwen_templates import QWEN35
from tests.fakes.tiny_gguf import write_tiny_llama

GOLDEN = Path(__file__).parents[1] / "golden" / "data" / "qwen35-mtp.gguf"
USER = [{"role": "user", "content": "What is there to think about? Say it in one word."}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It reasons for ever: its random answers never have a closing tag."""
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "m.gguf", n_ctx=512, chat_template=QWEN35)


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with recurrent layers, whose state cannot be taken back."""
    keys = {"tokenizer.chat_template": QWEN35, "qwen35.context_length": 512}
    return write_changed(tmp_path_factory.mktemp("model") / "m.gguf", GOLDEN, metadata=keys)


@pytest.mark.parametrize("name", ["model", "recurrent"])
def test_a_budget_is_the_same_as_closing_by_hand_and_computes_nothing_twice(
    request: pytest.FixtureRequest, name: str
) -> None:
    """At temperature 0 and at others, with the seed that Completion names and the one after it."""
    model: Path = request.getfixturevalue(name)
    with Client(model, daemon_args=["--exact"]) as client:
        dones: list[Done] = []
        client.register_event_callback(Done, dones.append)
        sampling: dict[str, Any]
        for sampling in ({}, {"temperature": 1.5, "seed": 7}):
            args = {"ignore_eos": True, **sampling}
            dones.clear()
            done = client.chat(USER, max_tokens=30, thinking_budget=12, **args)
            first, second = (done for done in dones if done.fields.get("gen"))
            assert (done.reasoning_cut, done.reasoning_tokens, len(done.ids)) == (True, 12, 30)
            assert "<" not in done.text + done.reasoning or "think>" not in done.text
            # All of the first sequence is reused but its last token, which was never computed.
            assert second.fields["reused"] == int(first.fields["prompt"]) + 12 - 1
            prompt = client.tokenizer.encode(client.template.render(USER))
            prompt += [*done.ids[:12], *client.tokenizer.encode("\n</think>\n\n")]
            by_hand = client.generate(prompt, max_tokens=18, **(args | ({"seed": 8} if sampling else {})))
            assert by_hand.ids == done.ids[12:]


def slotd(command: str, model: Path, *flags: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "slotd.client", command, "-m", str(model), "--temp=0", "-n", "12", *flags]
    return subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=60, check=False)


def test_the_commands(model: Path) -> None:
    budget = ("--thinking-budget", "5", "--logit-bias", "2:-100", "--logit-bias", "0:-100")
    hi = [{"role": "user", "content": "hi"}]
    jobs = [{"id": "a", "messages": hi}, {"id": "b", "messages": hi, "params": {"think": False}}]
    done = slotd(
        "batch", model, *budget, "-", "--stream", stdin="".join(json.dumps(job) + "\n" for job in jobs)
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    found, off = (next(line for line in lines if line["id"] == id and "text" in line) for id in "ab")
    deltas = [line for line in lines if line["id"] == "a" and "delta" in line]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == found["reasoning"]
    assert "".join(delta["delta"] for delta in deltas) == found["text"]
    assert (found["reasoning_tokens"], found["reasoning_cut"]) == (5, True)
    assert (off["reasoning"], len(off["ids"])) == ("", 12)

    shown = slotd("generate", model, *budget, "--show-reasoning", "hi")
    assert (shown.returncode, shown.stdout) == (0, found["text"] + "\n")
    assert shown.stderr == found["reasoning"] + "\n\n"

    endless = slotd("chat", model, *budget[2:], stdin="hi\n")
    assert (endless.returncode, endless.stdout) == (1, "")
    assert "a thought and no answer" in endless.stderr
    alone = slotd("generate", model, *budget[2:], "hi")
    assert (alone.returncode, alone.stdout.strip()) == (1, "")
    assert "a thought and no answer" in alone.stderr
