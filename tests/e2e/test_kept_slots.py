"""A slot that outlives `[snap] all-cleared` is used again, because the daemon says what it holds."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from slotd.client import Client, Completion
from slotd.protocol.slot_identity import slot_hash
from tests.fakes.tiny_gguf import write_tiny_llama

FLAGS = ["--max-ctx=2048", "--chunk=512", "--exact"]

#: Steps of a prompt before the request that is to run out: two each for two conversations, one each for four
#: others. It fails until the cache, the four ended sequences and the slots that it does not use are gone.
FAULT = "prefill_compute:9:6"

SYSTEM = "You answer in few words. " * 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "long.gguf", n_ctx=2048)


def ask(client: Client, number: int, *questions: str) -> Completion:
    """One question of conversation `number`, after the ones before it."""
    messages = [{"role": "system", "content": f"You are number {number}. {SYSTEM}"}]
    for question in questions:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": "Because."}]
    return client.chat(messages[:-1], max_tokens=4, ignore_eos=True)


def fill_up(client: Client) -> None:
    """Push out what the daemon keeps on its own: only slots are left. Too short for slots of their own."""
    for other in range(4):
        client.generate([other + 40, *range(3, 23)], max_tokens=1)


def test_a_kept_slot_is_used_again_and_answers_as_a_fresh_process_does(model: Path) -> None:
    with Client(model, daemon_args=FLAGS, prefix_slots=0) as fresh:
        expected = [
            ask(fresh, 0, "Why?", "And now?").ids,
            ask(fresh, 0, "Who?").ids,
            ask(fresh, 1, "Who?").ids,
        ]
    flags = [*FLAGS, "--host-cache=0"]
    with Client(model, daemon_args=flags, prefix_slots=3, env={"SLOTD_FAULT": FAULT}) as client:
        cleared = []
        client.on_all_cleared(cleared.append)
        ask(client, 0, "Why?")
        ask(client, 1, "Why?")
        fill_up(client)
        hit = ask(client, 0, "Why?", "And now?")  # starts from slot 0, which it therefore does not lose
        assert [(event.epoch, event.freed, event.kept) for event in cleared] == [(1, (1,), (0,))]
        assert (hit.ids, "restore" in hit.stages) == (expected[0], True)
        fill_up(client)
        again, lost = ask(client, 0, "Who?"), ask(client, 1, "Who?")
        assert (again.ids, lost.ids) == (expected[1], expected[2])
        assert "restore" in again.stages
        assert again.cached_tokens == hit.cached_tokens  # slot 0 again
        assert "restore" not in lost.stages
        stats = client.cache_stats()
        assert (stats["cleared"], stats["rebound"], stats["stale_restores"]) == (1, 1, 0)


def test_status_names_thick_slots_by_content(model: Path) -> None:
    with Client(model, daemon_args=[*FLAGS, "-ctk", "f16"], prefix_slots=0) as client:
        ids = [*range(3, 103)]
        first = client.generate(ids, max_tokens=1, ignore_eos=True)
        client.snapshot(3, of=first.id)
        while not (slots := client.status()["slots"]):  # as of the engine's last word, 100 ms old at most
            time.sleep(0.01)
        held = slots["3"]
        assert (held["kind"], held["tokens"]) == ("thick", 101)
        identity = client.hello["model"]["identity"]
        assert held["hash"] == slot_hash(identity, "f16", "f32", 0, [*ids, *first.ids])
