"""The caches with the real daemon: what they save, and that answers stay those of a fresh daemon."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slotd.client import Client, Completion, DaemonDiedError, RequestError

Message = dict[str, str]

SYSTEM = {"role": "system", "content": "You answer in few words. " * 6}

#: `--exact`: the bits of an answer do not depend on how the prompt was cut or on what runs beside it.
FLAGS = ["--max-ctx=2048", "--exact"]


@contextmanager
def client_of(model: Path, prefix: int, *, full: int = 0, flags: list[str] | None = None) -> Iterator[Client]:
    daemon_args = FLAGS + (flags or [])
    with Client(model, daemon_args=daemon_args, prefix_slots=prefix, full_slots=full) as client:
        yield client


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.fakes.tiny_gguf import write_tiny_llama

    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "long.gguf", n_ctx=2048)


@pytest.fixture(scope="module")
def fresh(model: Path) -> Iterator[Client]:
    """A daemon whose answers are never cached: each request begins with a token of its own."""
    with client_of(model, 0) as client:
        yield client


def conversation(number: int) -> list[Message]:
    return [{"role": "system", "content": f"You are number {number}. " + SYSTEM["content"]}]


def take_turn(client: Client, messages: list[Message], turn: int) -> Completion:
    messages.append({"role": "user", "content": f"Question {turn}: why?"})
    answer = client.chat(messages, max_tokens=4, ignore_eos=True)
    messages.append({"role": "assistant", "content": f"Because of {turn}."})
    return answer


def share(answers: list[Completion]) -> float:
    """Reused share of all their prompt tokens."""
    return sum(a.cached_tokens for a in answers) / sum(a.prompt_tokens for a in answers)


@pytest.mark.model
def test_sixteen_growing_turns_with_four_slots(default_model: Path) -> None:
    """The product as a whole, one conversation: a long system message, short turns, the model's own answers.

    The share is that of the sequences which the daemon keeps on its own; without slots it is the same. What
    must hold here is that the caches never make it worse. What slots do alone is the next test.
    """
    rules = "Answer in one short sentence. Never invent a fact, a name or a number. " * 14
    messages = [{"role": "system", "content": rules}]
    answers = []
    with Client(default_model, daemon_args=["--max-ctx=2048"], prefix_slots=4) as client:
        for turn in range(16):
            messages.append({"role": "user", "content": f"What is {turn} + 1?"})
            answers.append(client.chat(messages, max_tokens=8))
            messages.append({"role": "assistant", "content": answers[-1].text})
        stats = client.cache_stats()
    cached = [answer.cached_tokens for answer in answers]
    assert all(later > before for before, later in pairwise(cached))
    shares = [answer.cached_tokens / answer.prompt_tokens for answer in answers]
    assert min(shares[2:]) >= 0.9, shares
    assert stats["prefix"]["entries"] == 4
    assert stats["confirmed"] >= 15


@pytest.mark.parametrize("others", [0, 4])
def test_sixteen_growing_turns_reuse_nine_tenths(model: Path, others: int) -> None:
    """Four slots, a long system message, short turns: from turn 3 on at least 90% of every prompt is reused.

    With other prompts in between the daemon keeps nothing of the conversation on its own: then the slots do
    it alone, and they hold it up to the last question but one.
    """
    messages = [{"role": "system", "content": "You answer in few words. " * 32}]
    answers = []
    with client_of(model, 4) as client:
        for turn in range(16):
            answers.append(take_turn(client, messages, turn))
            for other in range(others):
                client.generate([turn + 3, other + 40, *range(3, 23)], max_tokens=1)
        hits = client.cache_stats()["prefix_hits"]
    shares = [answer.cached_tokens / answer.prompt_tokens for answer in answers]
    print(f"{others} others: least {min(shares[2:]):.1%}, all {share(answers[2:]):.1%}")
    assert min(shares[2:]) >= 0.9, shares
    if others:
        assert hits == 15


@pytest.mark.parametrize("prefix", [0, 4])
def test_the_slots_alone_keep_a_conversation_going(model: Path, prefix: int) -> None:
    """Field report 17: with full slots the restore point must go on rising.

    Other prompts push the conversation out of what the daemon keeps: only the slots are left, and without
    them nothing is.
    """
    with client_of(model, prefix) as client:
        messages = [SYSTEM]
        answers = []
        for turn in range(16):
            answers.append(take_turn(client, messages, turn))
            for other in range(4):
                client.generate([turn + 3, other + 40, *range(3, 23)], max_tokens=1)
        hits = client.cache_stats()["prefix_hits"]
    cached = [answer.cached_tokens for answer in answers]
    if not prefix:
        assert cached == [0] * 16
        return
    assert all("restore" in answer.stages for answer in answers[1:])
    assert all(later > before for before, later in pairwise(cached[1:]))
    assert hits == 15
    assert share(answers[2:]) >= 0.75


@pytest.mark.parametrize("prefix", [0, 8])
def test_more_conversations_than_the_daemon_keeps(model: Path, prefix: int) -> None:
    with client_of(model, prefix) as client:
        talks = [conversation(number) for number in range(6)]
        answers = [take_turn(client, talk, turn) for turn in range(6) for talk in talks]
    reused = share(answers[12:])
    assert (reused > 0.75) if prefix else (reused < 0.1), reused


def test_three_identical_sends(model: Path, fresh: Client) -> None:
    """Field reports 31 and 34: cached tokens are counted, and the greedy answer stays the same."""
    messages = [SYSTEM, {"role": "user", "content": "Tell me something long enough to fill a page or two."}]
    expected = fresh.chat(messages, max_tokens=12)
    with client_of(model, 2, full=2) as client:
        answers = [client.chat(messages, max_tokens=12) for _ in range(3)]
        assert [answer.ids for answer in answers] == [expected.ids] * 3
        assert [answer.cached_tokens > 0 for answer in answers] == [False, True, True]
        assert answers[2].cached_tokens == answers[2].prompt_tokens  # the whole prompt was kept
        assert "restore" in answers[2].stages
        for _ in range(5):  # now without what the daemon keeps on its own
            client.generate([random.randrange(3, 300) for _ in range(70)], max_tokens=1)
        again = client.chat(messages, max_tokens=12)
        assert again.ids == expected.ids
        assert again.cached_tokens > 0


def test_one_request_or_four_at_once_say_what_was_done(model: Path) -> None:
    """Field report 35: several at once must not skip the cache silently."""
    for prefix in (1, 4):
        with client_of(model, prefix, flags=["--parallel=4"]) as client:
            messages = [SYSTEM, {"role": "user", "content": "First?"}]
            first = client.chat(messages, max_tokens=2, ignore_eos=True)
            assert first.stages == ("prefill", "snapshot", "decode")
            for other in range(5):
                client.generate([other + 3, *range(3, 23)], max_tokens=1)
            others = [[*messages[:1], {"role": "user", "content": f"Other {n}?"}] for n in range(4)]
            streams = [client.stream(messages=each, max_tokens=2, ignore_eos=True) for each in others]
            for stream in streams:
                answer = stream.result()
                # From the slot, or from what the daemon still has of a stream that has ended meanwhile.
                assert answer.stages[0] in ("restore", "reuse")
                assert answer.stages[1:] == ("prefill", "decode")
                assert answer.cached_tokens > 100


def test_an_emptied_slot_costs_no_error(model: Path, fresh: Client) -> None:
    """As when another program, or memory pressure that was not heard of, has emptied it."""
    with client_of(model, 2) as client:
        messages = [SYSTEM]
        take_turn(client, messages, 0)
        client._cache._recent.clear()
        for slot in client.slots():
            client._ask(_free(client, slot))
        expected = fresh.chat(
            [*messages, {"role": "user", "content": "Question 1: why?"}], max_tokens=4, ignore_eos=True
        )
        answer = take_turn(client, messages, 1)
        assert answer.ids == expected.ids
        assert client.cache_stats()["stale_restores"] == 1


def _free(client: Client, slot: int) -> object:
    from slotd.client import commands

    return commands.FreeSnapshot(client._new_id(), slot)


def test_a_new_daemon_starts_with_empty_caches(model: Path, fresh: Client) -> None:
    """Field report 11: killed between two calls; the second says so, the third is answered."""
    with client_of(model, 4) as client:
        messages = [SYSTEM]
        take_turn(client, messages, 0)
        boot = client.hello["boot"]
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        with pytest.raises(DaemonDiedError):
            take_turn(client, list(messages), 1)
        expected = fresh.chat(
            [*messages, {"role": "user", "content": "Question 1: why?"}], max_tokens=4, ignore_eos=True
        )
        answer = take_turn(client, messages, 1)
        assert client.hello["boot"] != boot
        assert (answer.ids, answer.cached_tokens) == (expected.ids, 0)
        stats = client.cache_stats()
        assert stats["confirmed"] == 2  # of both daemons
        assert stats["prefix"]["entries"] == 1
        assert take_turn(client, messages, 2).cached_tokens > 0


# --------------------------------------------------------------------------------------------------
# Histories: the rules of the property tests, with the real daemon

steps = st.lists(
    st.tuples(st.sampled_from(["ask", "ask", "ask", "two", "cancel", "free", "snapshot", "refused"]),
              st.lists(st.integers(1, 3), min_size=1, max_size=4)),
    min_size=2, max_size=8,
)  # fmt: skip


@pytest.fixture(scope="module")
def cached(model: Path) -> Iterator[Client]:
    with client_of(model, 2, full=1, flags=["--slots=4"]) as client:
        yield client


def ids_of(path: list[int]) -> list[int]:
    return [3, 4, *[turn * 17 + place % 13 for turn in path for place in range(64)]]


@given(history=steps)
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
def test_histories_give_the_answers_of_a_fresh_daemon(
    cached: Client, fresh: Client, history: list[tuple[str, list[int]]]
) -> None:
    expected: dict[tuple[int, ...], tuple[int, ...]] = {}

    def right(path: list[int]) -> tuple[int, ...]:
        key = tuple(path)
        if key not in expected:
            expected[key] = fresh.generate(ids_of(path), max_tokens=4, ignore_eos=True).ids
        return expected[key]

    for what, path in history:
        if what == "two":
            paths = [path, [*path, 2]]
            streams = [cached.stream(ids_of(each), max_tokens=4, ignore_eos=True) for each in paths]
            assert [stream.result().ids for stream in streams] == [right(each) for each in paths]
        elif what == "cancel":
            with cached.stream(ids_of(path), max_tokens=50, ignore_eos=True) as stream:
                next(stream)
        elif what == "free":
            cached.free_slot(path[0] - 1)
        elif what == "snapshot":
            cached.snapshot(path[0])
        elif what == "refused":
            with pytest.raises(RequestError, match="overflow"):
                cached.generate(ids_of(path), max_tokens=5000)
        answer = cached.generate(ids_of(path), max_tokens=4, ignore_eos=True)
        assert answer.ids == right(path)
        assert answer.cached_tokens <= answer.prompt_tokens
    stats = cached.cache_stats()
    assert stats["pending"] == 0
    assert set(cached.slots()) <= set(range(4))


# --------------------------------------------------------------------------------------------------
# Over restarts


def test_a_restarted_daemon_goes_on_from_disk(model: Path, fresh: Client, tmp_path: Path) -> None:
    """Field report 18: after save, restart and restore little is computed, and the answer says so."""

    def run(cache_dir: Path, turn: int, messages: list[Message]) -> Completion:
        flags = [*FLAGS, f"--slot-dir={tmp_path / 'slots'}"]
        with Client(model, daemon_args=flags, prefix_slots=2, cache_dir=cache_dir) as client:
            return take_turn(client, messages, turn)

    messages = [SYSTEM]
    assert run(tmp_path / "ids", 0, messages).cached_tokens == 0
    expected = take_turn(fresh, list(messages), 1)
    answer = run(tmp_path / "ids", 1, messages)
    assert "restore" in answer.stages
    assert answer.cached_tokens > 100
    assert answer.ids == expected.ids
    assert run(tmp_path / "ids", 2, messages).cached_tokens > answer.cached_tokens
    assert run(tmp_path / "other", 3, list(messages)).cached_tokens == 0  # who does not know the ids has none
    assert not [path for path in (tmp_path / "ids").iterdir() if path.name.startswith(".")]


def test_damaged_files_of_either_side_cost_a_hit_only(model: Path, fresh: Client, tmp_path: Path) -> None:
    """Field report 30."""
    flags = [*FLAGS, f"--slot-dir={tmp_path / 'slots'}"]
    messages = [SYSTEM]
    with Client(model, daemon_args=flags, prefix_slots=2, cache_dir=tmp_path / "ids") as client:
        take_turn(client, messages, 0)
    for path in [*(tmp_path / "slots").rglob("*"), *(tmp_path / "ids").glob("*.meta.json")]:
        if path.is_file() and path.stat().st_size:
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 0xFF
            path.write_bytes(data)
    expected = take_turn(fresh, list(messages), 1)
    with Client(model, daemon_args=flags, prefix_slots=2, cache_dir=tmp_path / "ids") as client:
        answer = take_turn(client, messages, 1)
    assert (answer.ids, answer.cached_tokens) == (expected.ids, 0)
