"""Errors of the client's own, exit codes, and what a person reads."""

from __future__ import annotations

import pytest

from slotd.client.failure import DaemonExitError, done_error, exit_code, explain, start_error
from slotd.protocol.errors import ConfigError, DaemonStartError, ModelError, RequestError, SlotdError

ACCOUNT = {"prompt": 9, "reused": 4, "gen": 2, "epoch": 0, "seed": 5, "wall_s": 0.5, "other_s": 0.0}


def test_the_account_is_in_the_fields_and_not_in_the_text() -> None:
    error = done_error({"code": "empty_slot", "slot": 3, **ACCOUNT}, "r1", "RESTORE")
    assert error.fields == {"slot": 3, **ACCOUNT}
    assert str(error) == str(RequestError("empty_slot", {"slot": 3}))
    assert (error.id, error.verb) == ("r1", "RESTORE")


def test_an_errors_own_prompt_stays() -> None:
    own = {"slot": 1, "prompt": 9, "cur_pos": 12}
    assert str(done_error({"code": "prefix_shorter", **own, **ACCOUNT}, "r1")) == str(
        RequestError("prefix_shorter", own)
    )
    refused = {"prompt": 70, "n_gen": 10, "max_ctx": 64}
    assert str(done_error({"code": "overflow", **refused}, "r1")) == str(RequestError("overflow", refused))


def test_a_start_that_failed_says_what_the_daemon_said() -> None:
    error = start_error("the daemon died: ...", 2, "a warning\nslotd: SLOTD_CHUNK 'x': no")
    assert isinstance(error, DaemonExitError)
    assert (str(error), error.exit_code) == ("SLOTD_CHUNK 'x': no", 2)
    killed = start_error("the daemon died: SIGKILL", -9, "loading")
    assert isinstance(killed, DaemonExitError)
    assert (str(killed), killed.exit_code) == ("the daemon died: SIGKILL", -9)
    assert type(start_error("it hangs", None, "")) is DaemonStartError


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 2),
        (ModelError("x"), 3),
        (DaemonExitError("x", 2), 2),
        (DaemonExitError("x", 3), 3),
        (DaemonExitError("x", -9), 1),
        (DaemonExitError("x", 5), 1),
        (DaemonStartError("exit code 2 (a flag is wrong)"), 1),
        (RequestError("oom"), 1),
    ],
)
def test_exit_codes(error: SlotdError, code: int) -> None:
    assert exit_code(error) == code


def test_what_does_not_fit_is_a_sentence() -> None:
    long = RequestError("overflow", {"prompt": 70, "n_gen": 10, "max_ctx": 64})
    assert explain(long, "be brief") == "the prompt has 70 tokens, the context has 64: be brief"
    more = RequestError("overflow", {"prompt": 60, "n_gen": 10, "max_ctx": 64})
    assert explain(more, "be brief") == (
        "the prompt has 60 tokens and 10 more were asked for, the context has 64: be brief"
    )
    for error in (RequestError("overflow"), RequestError("oom", {"prompt": 1, "max_ctx": 2})):
        assert explain(error, "be brief") == str(error)
