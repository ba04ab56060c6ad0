"""What a draft knows of a sequence: taken in by pieces, within a window, and after the sequence's moves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from slotd.daemon.engine import Engine
from slotd.daemon.kv.pages import PAGE
from slotd.daemon.rows import Kind
from slotd.daemon.weights.reader import open_model
from tests.fakes.dflash_formula import Formula
from tests.fakes.draft_rig import IDS, ask, assert_as, bits, drafting_engine, features_of, take, text_of
from tests.fakes.tiny_draft import BLOCK, draft_weights, write_tiny_draft

Make = Callable[..., Engine]


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_draft(tmp_path_factory.mktemp("draft") / "draft.gguf")


@pytest.fixture
def make(tiny_llama: Path, draft: Path) -> Make:
    return partial(drafting_engine, model=tiny_llama, draft=draft)


# ----- P21, P22: the context


@pytest.mark.parametrize("pieces", [[1], [63], [64, 1], [10, 54, 65], [128], [1] * 9])
def test_p22_a_context_in_pieces_is_that_of_one_piece(make: Make, pieces: list[int]) -> None:
    engine = make()
    assert bits(ask(engine, text_of(engine, 150, pieces))) == bits(ask(engine, text_of(engine, 150)))


def test_p22_steps_leave_what_a_prompt_leaves(make: Make) -> None:
    engine = make()
    text = text_of(engine, 100)
    for at in range(100, 150):
        if at % 3 == 0:
            ask(engine, text)  # writes behind the context, which nobody may see
        take(engine, text, IDS[at : at + 1], Kind.STEP)
    assert bits(ask(engine, text)) == bits(ask(engine, text_of(engine, 150)))


@pytest.mark.parametrize("piece", [1, 50, 64, 300, 500])
def test_p21_a_window_sees_what_it_would_see_of_all(make: Make, piece: int, tiny_llama: Path) -> None:
    """Pages in front go; the rest is as if the text had begun there, but for its positions."""
    engine = make(draft_ctx=128)
    text = text_of(engine, 500, [piece] * ((500 - 1) // piece))
    start = text.draft.start
    assert 128 <= 500 - start < 128 + PAGE
    assert len(text.draft.pages) <= 4
    with open_model(tiny_llama) as file:
        embedding, head = file.dequantise("token_embd.weight"), file.dequantise("output.weight")
    formula = Formula(draft_weights(64, 2, 11, lucebox=True), embedding, head)
    assert_as(ask(engine, text), formula.logprobs(features_of(engine, 500)[start:], start, 7, BLOCK))


def test_p21_a_window_as_long_as_the_text_changes_nothing(make: Make) -> None:
    narrow, wide = make(draft_ctx=300), make(draft_ctx=4096)
    assert bits(ask(narrow, text_of(narrow, 300, [77]))) == bits(ask(wide, text_of(wide, 300)))


# ----- it follows the sequence


def test_truncated_and_forked(make: Make) -> None:
    engine = make()
    expected = bits(ask(engine, text_of(engine, 90)))
    text = text_of(engine, 150)
    whole = bits(ask(engine, text))
    beside = engine.fork(text, 140)
    take(engine, beside, [1, 2, 3], Kind.STEP)  # into a page that both share
    assert bits(ask(engine, text)) == whole
    fork = engine.fork(text, 90)
    assert bits(ask(engine, fork)) == expected
    take(engine, fork, [1, 2, 3], Kind.STEP)
    engine.truncate(text, 90)
    assert bits(ask(engine, text)) == expected
    engine.close(fork)
    assert bits(ask(engine, text)) == expected


def test_rows_that_wait_follow_too(make: Make) -> None:
    """Single rows become context when many of them are there, or when the draft is asked."""
    engine = make(n_slots=1)
    text = text_of(engine, 100, [60])
    for at in range(100, 125):
        take(engine, text, IDS[at : at + 1], Kind.STEP)
    assert (text.draft.end, text.draft.n_waiting) == (100, 25)
    engine.snapshot(0, text, length=118)
    forks = [engine.fork(text, 110), engine.fork(text, 90), engine.restore(0), text]
    engine.truncate(text, 105)
    for fork in forks:
        expected = bits(ask(engine, text_of(engine, len(fork))))
        assert bits(ask(engine, fork)) == expected
        assert fork.draft.n_waiting == 0
    take(engine, forks[0], IDS[110:150])
    assert bits(ask(engine, forks[0])) == bits(ask(engine, text_of(engine, 150)))


@pytest.mark.parametrize("window", [1, 64, 65])
def test_a_narrow_window_with_rows_that_wait(make: Make, window: int) -> None:
    engine = make(draft_ctx=window)
    text = text_of(engine, 40)
    for at in range(40, 300):
        take(engine, text, IDS[at : at + 1], Kind.STEP)
        if at == 200:
            ask(engine, text)
    found = bits(ask(engine, text))
    start = text.draft.start
    assert window <= 300 - start < window + PAGE
    other = engine.open()
    take(engine, other, IDS[:start])
    engine.drafting.forget(other)
    take(engine, other, IDS[start:300])
    assert (other.draft.start, bits(ask(engine, other))) == (start, found)


def test_a_slot_brings_its_context_back(make: Make) -> None:
    engine = make(n_slots=2)
    expected = bits(ask(engine, text_of(engine, 150)))
    text = text_of(engine, 150)
    engine.snapshot(0, text)
    engine.snapshot(1, text, length=100)
    take(engine, text, [1, 2, 3], Kind.STEP)
    engine.close(text)
    assert bits(ask(engine, engine.restore(0))) == expected
    other = engine.restore(1)
    take(engine, other, IDS[100:150])
    assert bits(ask(engine, other)) == expected
    engine.truncate(other, 80)
    take(engine, other, IDS[80:150])
    assert bits(ask(engine, other)) == expected


def test_a_slot_from_host_memory_starts_anew(make: Make) -> None:
    engine = make(host_cache=1 << 24)
    engine.snapshot(0, text_of(engine, 150), tier="host")
    text = engine.restore(0)
    assert text.draft is None
    take(engine, text, IDS[150:200])
    assert (text.draft.start, text.draft.end) == (150, 200)
    ask(engine, text)


def test_nothing_is_left_when_everybody_is_gone(make: Make) -> None:
    engine = make(n_slots=1, host_cache=1 << 24)
    text = text_of(engine, 150)
    engine.snapshot(0, text)
    engine.close(engine.fork(text, 140))
    ask(engine, text)
    assert engine.drafting._store is not None
    used = engine.drafting._store.pages
    engine.close(text)
    assert used.n_used == 3  # the slot's
    engine.host_tier.demote(0)
    engine.trim()
    assert used.n_used == 0
    engine.snapshot(0, text_of(engine, 70))
    engine.compact()  # memory is short: contexts go first
    assert used.n_used == 0


def test_a_cut_below_the_window_starts_anew(make: Make) -> None:
    engine = make(draft_ctx=64)
    text = text_of(engine, 400)
    assert text.draft.start > 100
    engine.truncate(text, 100)
    assert text.draft is None
    take(engine, text, IDS[100:120])
    assert text.draft.start == 100
    ask(engine, text)
