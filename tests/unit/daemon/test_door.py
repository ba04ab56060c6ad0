"""The door: what is refused before a request is accepted, each by code and with its numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from slotd.daemon.door import Limits, admit_file, admit_prompt, admit_slot
from slotd.protocol.errors import RequestError, Value
from slotd.protocol.messages import (
    Command,
    FreeSnapshot,
    Generate,
    ListSlots,
    Park,
    Prompt,
    Restore,
    Sampling,
    Snap,
    Snapshot,
)

LIMITS = Limits(n_vocab=320, max_ctx=64, slots=8)


def raw_file(path: Path, ids: list[int]) -> str:
    path.write_bytes(np.asarray(ids, "<i4").tobytes())
    return str(path)


def refusal(command: Prompt | Generate) -> tuple[str, dict[str, Value]]:
    with pytest.raises(RequestError) as caught:
        (admit_file if isinstance(command, Generate) else admit_prompt)(command, LIMITS)  # type: ignore[operator]
    return caught.value.code, caught.value.fields


def test_ids_of_the_line_and_of_a_file_are_the_same(tmp_path: Path) -> None:
    inline = admit_prompt(Prompt(ids=[5, 0, 319], n_gen=3), LIMITS)
    read = admit_prompt(Prompt(path=raw_file(tmp_path / "p.bin", [5, 0, 319]), n_gen=3), LIMITS)
    assert inline.tolist() == read.tolist() == [5, 0, 319]
    assert inline.dtype == read.dtype == np.int32


@pytest.mark.parametrize(
    ("n", "n_gen", "fit", "fits"),
    [
        (60, 4, False, True),
        (60, 5, False, False),
        (64, 0, False, True),
        (65, 0, False, False),
        (60, 2**31 - 1, False, False),
        (60, 2**31 - 1, True, True),
        (63, 9, True, True),
        (64, 9, True, False),  # room for one token there must be
        (64, 0, True, True),
        (65, 0, True, False),
    ],
)
def test_prompt_and_answer_must_fit_the_context(n: int, n_gen: int, fit: bool, fits: bool) -> None:
    command = Prompt(ids=[5] * n, n_gen=n_gen, fit=fit)
    if fits:
        assert len(admit_prompt(command, LIMITS)) == n
    else:
        assert refusal(command) == ("overflow", {"prompt": n, "n_gen": n_gen, "max_ctx": 64})


def test_an_empty_prompt() -> None:
    assert refusal(Prompt(ids=[], n_gen=1)) == ("empty_prompt", {"reason": "no ids"})
    assert refusal(Prompt(path="/no/such/file", n_gen=1))[0] == "empty_prompt"


@pytest.mark.parametrize(
    ("ids", "at", "token"), [([5, 320], 1, 320), ([-1, 5], 0, -1), ([1, 2, 2**31 - 1], 2, 2**31 - 1)]
)
def test_a_token_that_is_not_in_the_vocabulary(ids: list[int], at: int, token: int) -> None:
    assert refusal(Prompt(ids=ids, n_gen=1)) == ("bad_token", {"at": at, "token": token, "vocab": 320})


def test_the_first_bad_token_is_named() -> None:
    assert refusal(Prompt(ids=[5, 400, 500], n_gen=1))[1]["at"] == 1


@pytest.mark.parametrize(
    "command",
    [
        Restore(slot=8, ids=[5], n_gen=1),
        Prompt(ids=[5], n_gen=1, snap=Snap(1, 8)),
        Restore(slot=0, ids=[5], n_gen=1, snap=Snap(1, 8)),
    ],
)
def test_a_slot_that_is_not_there(command: Prompt) -> None:
    assert refusal(command) == ("bad_slot", {"slot": 8, "slots": 8})


def test_the_last_slot_is_one() -> None:
    assert len(admit_prompt(Restore(slot=7, ids=[5], n_gen=1, snap=Snap(1, 7)), LIMITS)) == 1


@pytest.mark.parametrize("token", [320, 2**31 - 1])
def test_ids_of_fields_are_in_the_vocabulary(token: int) -> None:
    stop = Prompt(ids=[5], n_gen=1, stop=(319, token))
    assert refusal(stop) == ("bad_args", {"field": "stop", "token": token, "vocab": 320})
    bias = Prompt(ids=[5], n_gen=1, sampling=Sampling(logit_bias=((319, 1.0), (token, 1.0))))
    assert refusal(bias) == ("bad_args", {"field": "logit_bias", "token": token, "vocab": 320})


def test_a_wrong_field_is_named_before_the_file_is_read() -> None:
    assert refusal(Prompt(path="/no/such/file", n_gen=1, stop=(320,)))[0] == "bad_args"


# ----- generate


def counted_file(path: Path, ids: list[int]) -> str:
    return raw_file(path, [len(ids), *ids])


def test_generate_becomes_a_prompt(tmp_path: Path) -> None:
    sampling = Sampling(temperature=0.5, seed=3)
    path = counted_file(tmp_path / "in", [5, 6, 7])
    prompt, ids = admit_file(Generate(id="g", path=path, n_gen=4, out="o", sampling=sampling), LIMITS)
    assert (prompt.id, prompt.n_gen, prompt.sampling) == ("g", 4, sampling)
    assert ids.tolist() == [5, 6, 7]


def test_generate_is_checked_like_a_prompt(tmp_path: Path) -> None:
    full = counted_file(tmp_path / "full", [5] * 60)
    assert refusal(Generate(path=full, n_gen=5))[0] == "overflow"
    wrong = counted_file(tmp_path / "wrong", [5, 320])
    assert refusal(Generate(path=wrong, n_gen=1)) == ("bad_token", {"at": 1, "token": 320, "vocab": 320})


def test_the_bias_of_generate_is_checked_too(tmp_path: Path) -> None:
    good = counted_file(tmp_path / "good", [5])
    biased = Generate(path=good, n_gen=1, sampling=Sampling(logit_bias=((320, 1.0),)))
    assert refusal(biased) == ("bad_args", {"field": "logit_bias", "token": 320, "vocab": 320})


# ----- slot commands


@pytest.mark.parametrize("command", [Snapshot(slot=8), FreeSnapshot(slot=2**31 - 1)])
def test_slot_commands_check_their_slot(command: Command) -> None:
    with pytest.raises(RequestError) as caught:
        admit_slot(command, LIMITS)
    assert caught.value.code == "bad_slot"


@pytest.mark.parametrize("command", [Snapshot(slot=7), FreeSnapshot(slot=0), ListSlots(), Park()])
def test_other_slot_commands_pass(command: Command) -> None:
    admit_slot(command, LIMITS)
