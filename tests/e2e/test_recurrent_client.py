"""A conversation with a model that has recurrent layers: the caches of the client are slots of the daemon."""

from __future__ import annotations

from pathlib import Path

from slotd.client import Client

MODEL = Path(__file__).parents[1] / "golden" / "data" / "qwen35-mtp.gguf"
TURNS = ["hello world " * 6, "and again the same " * 4, "more of it " * 5, "the end"]


def talk(client: Client) -> tuple[list[tuple[int, ...]], list[int]]:
    """All turns, each behind the answers so far: (ids of the answers, cached tokens of the prompts)."""
    messages: list[dict[str, str]] = []
    answers, cached = [], []
    for turn in TURNS:
        messages = [*messages, {"role": "user", "content": turn}]
        answer = client.generate(messages=messages, max_tokens=12)
        messages = [*messages, {"role": "assistant", "content": answer.text}]
        answers.append(tuple(answer.ids))
        cached.append(answer.cached_tokens)
    return answers, cached


def test_field_report_16_slots_do_not_change_an_answer() -> None:
    with Client(MODEL, prefix_slots=4, daemon_args=["--exact", "--device=cpu"]) as client:
        first, from_nothing = talk(client)
        second, from_slots = talk(client)
    assert second == first
    assert from_nothing[1] == 0  # the answer's text is not the ids of the answer: nothing to go on from
    assert from_slots[1:] == [128, 192, 256]
