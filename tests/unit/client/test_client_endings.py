"""How a request ends early, and how a client meets silence and death."""

import gc
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from slotd.client import (
    Client,
    ClientClosedError,
    DaemonDiedError,
    DaemonExitError,
    DaemonStartError,
    DaemonTimeoutError,
)
from slotd.client.commands import ListSlots
from slotd.protocol.messages import AllCleared
from tests.fakes.fake_daemon import FakeDaemon
from tests.fakes.token_lines import PROMPT, bytes_ids, tok, toks

BAD = Path(__file__).parents[2] / "fakes" / "bad_daemons"


def spawn(name: str, **settings) -> Client:
    return Client(command=[sys.executable, str(BAD / f"{name}.py")], **settings)


# ----- what is sent, what comes back


# ----- ending early


def test_cancel_gives_what_there_is(daemon, client) -> None:
    daemon.expect(PROMPT, *toks("ab"))
    late = tok(2, bytes_ids("c"))
    daemon.expect("CANCEL id=$id", "[cancel] id=$id found=1", late, "[done] id=$id status=cancelled gen=3")
    with client.stream([5]) as stream:
        assert next(stream).text == "ab"
        assert stream.cancel() is True
        done = stream.result()
    assert (done.text, done.finish_reason) == ("abc", "cancelled")
    assert stream.cancel() is False  # it is over: nothing is sent
    daemon.assert_done()


def test_leaving_the_block_early_cancels_and_waits_for_the_end(daemon, client) -> None:
    daemon.expect(PROMPT, *toks("ab"))
    daemon.expect("CANCEL id=$id", "[cancel] id=$id found=1", "[done] id=$id status=cancelled")
    with client.stream([5]) as stream:
        for _ in stream:
            break
    assert stream.result().finish_reason == "cancelled"
    daemon.assert_done()


def test_an_interrupt_cancels_the_request(daemon, client) -> None:
    daemon.expect(PROMPT, "[prefill] id=$id at=1/2")
    daemon.expect("CANCEL id=$id", "[cancel] id=$id found=1", "[done] id=$id status=cancelled")

    def interrupt(at: int, of: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        client.generate([5], on_progress=interrupt)
    daemon.assert_done()


def test_a_dropped_stream_is_cancelled(daemon, client) -> None:
    cancelled = threading.Event()
    daemon.expect(PROMPT, *toks("ab"))
    daemon.expect("CANCEL id=$id", "[cancel] id=$id found=1", "[done] id=$id status=cancelled", cancelled.set)
    for _ in client.stream([5]):
        break
    gc.collect()
    assert cancelled.wait(5)
    daemon.assert_done()


def test_a_request_that_takes_too_long_is_cancelled(daemon, client) -> None:
    daemon.expect(PROMPT, *toks("ab"))
    daemon.expect("CANCEL id=$id", "[cancel] id=$id found=1", "[done] id=$id status=cancelled")
    with pytest.raises(DaemonTimeoutError, match=r"longer than 0\.05 s; it was cancelled"):
        client.generate([5], timeout=0.05)
    daemon.assert_done()


def test_the_timeout_holds_while_tokens_flow(daemon, client) -> None:
    stop = threading.Event()

    def flow() -> None:
        while not stop.is_set():
            daemon.say(f"[tok] id={daemon.ids[-1]} at=0 ids=70")
            time.sleep(0.002)

    flowing = threading.Thread(target=flow)
    daemon.expect(PROMPT, flowing.start)
    daemon.expect(
        "CANCEL id=$id", "[cancel] id=$id found=1", stop.set, flowing.join, "[done] id=$id status=cancelled"
    )
    with pytest.raises(DaemonTimeoutError, match="it was cancelled"):
        client.generate([5], timeout=0.1)
    daemon.assert_done()


def test_the_timeout_holds_for_a_slow_reader_too(daemon, client) -> None:
    """There is always something to read, so no wait ever runs out: the clock is looked at all the same."""
    read = []
    read_at_cancel = []
    daemon.expect(PROMPT, *(f"[tok] id=$id at={at} ids=70" for at in range(1000)))
    daemon.expect(
        "CANCEL id=$id", lambda: read_at_cancel.append(len(read)), "[done] id=$id status=cancelled gen=1000"
    )
    stream = client.stream([5], timeout=0.1)

    def read_slowly() -> None:
        for chunk in stream:
            read.append(chunk)
            time.sleep(0 if read_at_cancel else 0.001)

    with pytest.raises(DaemonTimeoutError, match="it was cancelled"):
        read_slowly()
    assert read_at_cancel[0] < 1000


def test_a_cancel_that_is_not_obeyed_does_not_hang(daemon, impatient) -> None:
    """STATUS is answered, the request never ends: the wait is bounded all the same."""
    daemon.expect(PROMPT)
    daemon.expect("CANCEL id=$id", "[cancel] id=$id found=1")
    daemon.always("STATUS id=$id", '[status] {"id":"$id"}', "[done] id=$id status=ok")
    stream = impatient.stream([5])
    stream.cancel()
    begun = time.monotonic()
    with pytest.raises(DaemonTimeoutError, match="was cancelled and does not end"):
        stream.result()
    assert time.monotonic() - begun < 5


# ----- silence and death


def test_silence_is_no_error_while_the_daemon_answers_status(daemon, impatient) -> None:
    """A prompt that takes long to read: nothing for a while, but STATUS is answered."""
    for_status = ("STATUS id=$id", '[status] {"id":"$id"}', "[done] id=$id status=ok")
    daemon.expect(PROMPT)
    daemon.expect(*for_status).expect(*for_status)
    daemon.expect(*for_status, lambda: daemon.say(f"[done] id={daemon.ids[1]} status=length limit=n_gen"))
    assert impatient.generate([5]).finish_reason == "length"
    daemon.assert_done()


def test_silence_without_an_answer_to_status_is_an_error(daemon, impatient) -> None:
    daemon.expect(PROMPT).expect("STATUS id=$id")
    begun = time.monotonic()
    with pytest.raises(DaemonTimeoutError, match=r"STATUS: no answer within 0\.1 s"):
        impatient.generate([5])
    assert time.monotonic() - begun < 5


def test_a_short_command_without_an_answer(daemon, impatient) -> None:
    """It may wait for the engine, so it has some patience, while STATUS is answered."""
    daemon.expect("LIST_SLOTS id=$id")
    daemon.always("STATUS id=$id", '[status] {"id":"$id"}', "[done] id=$id status=ok")
    with pytest.raises(DaemonTimeoutError, match=r"LIST_SLOTS: no answer within 0\.6 s"):
        impatient.slots()
    assert not any(isinstance(each, ListSlots) for each in impatient._session.bus._waiters)
    daemon.expect("LIST_SLOTS id=$id", f"[snap] slots=7 id={daemon.ids[1]}", "[snap] slots=1 id=$id")
    assert impatient.slots() == (1,)  # the late answer to the first one is not taken for it


def test_a_slow_answer_of_the_engine_is_waited_for(daemon, impatient) -> None:
    def late() -> None:
        threading.Timer(0.3, daemon.say, [f"[snap] slots=1 id={daemon.ids[1]}"]).start()

    daemon.expect("LIST_SLOTS id=$id", late)
    daemon.always("STATUS id=$id", '[status] {"id":"$id"}', "[done] id=$id status=ok")
    assert impatient.slots() == (1,)


def test_the_end_of_output_ends_every_call(daemon, client) -> None:
    daemon.expect(PROMPT, daemon.hang_up)
    with pytest.raises(DaemonDiedError, match="closed its output"):
        client.generate([5])
    begun = time.monotonic()
    with pytest.raises(DaemonDiedError, match="closed its output"):  # attached: no restart
        client.status()
    assert time.monotonic() - begun < 1


def test_closing_fails_what_still_waits(daemon, client) -> None:
    daemon.expect(PROMPT)
    stream = client.stream([5])
    threading.Timer(0.05, client.close).start()
    with pytest.raises(DaemonDiedError, match="the client was closed"):
        stream.result()
    with pytest.raises(ClientClosedError, match="the client was closed"):
        client.status()


def test_a_daemon_that_dies_in_an_answer_and_is_replaced() -> None:
    with spawn("dies_mid_answer") as client:
        cleared = []
        client.on_all_cleared(cleared.append)
        first = client.pid
        assert client.slots() == ()
        with client.stream([1, 2]) as stream:
            assert next(stream).ids == (5, 6)
            with pytest.raises(DaemonDiedError) as caught:
                next(stream)
        assert "signal SIGKILL (killed from outside" in str(caught.value)
        assert "its last words:\ncannot go on" in str(caught.value)
        assert cleared == []
        assert client.slots() == ()  # at once, as the death was told
        assert client.pid != first
        assert client.hello["boot"] == str(client.pid)
        assert cleared == [AllCleared(epoch=0)]
    assert client._session.process.exit_code == 0


@pytest.mark.parametrize("noticed", [False, True])
def test_a_daemon_killed_between_two_calls(noticed) -> None:
    """The second call says so, quickly; the third one works, on a new daemon."""
    with spawn("dies_mid_answer") as client:
        assert client.slots() == ()
        os.kill(client.pid, signal.SIGKILL)
        while noticed and client._session.bus.error is None:
            time.sleep(0.001)
        begun = time.monotonic()
        with pytest.raises(DaemonDiedError, match="SIGKILL"):
            client.slots()
        assert time.monotonic() - begun < 2
        assert client.slots() == ()


def test_one_death_starts_one_daemon_for_all_threads() -> None:
    with spawn("dies_mid_answer") as client:
        with pytest.raises(DaemonDiedError):
            client.generate([1])
        pids = []

        def ask() -> None:
            pids.append((client.slots(), client.pid))

        threads = [threading.Thread(target=ask) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert len(pids) == 6
        assert len(set(pids)) == 1


def test_without_restart_the_dead_stay_dead() -> None:
    with spawn("dies_mid_answer", restart=False) as client:
        for _ in range(3):
            with pytest.raises(DaemonDiedError, match="SIGKILL"):
                client.generate([1])


def test_a_daemon_that_cannot_start() -> None:
    with pytest.raises(DaemonExitError) as caught:
        spawn("dies_at_once")
    assert caught.value.exit_code == 3
    assert str(caught.value) == (
        "the daemon died: exit code 3 (the model cannot be used); its last words:\n"
        "tensor blk.0.attn_q.weight is missing"
    )


def test_a_daemon_that_is_never_ready() -> None:
    begun = time.monotonic()
    with pytest.raises(DaemonStartError, match=r"not ready within 1 s; its last words:\nstill compiling"):
        spawn("never_ready", start_timeout=1)
    assert time.monotonic() - begun < 10


def test_a_daemon_that_floods_stderr() -> None:
    seen = []
    with spawn("floods_stderr", start_timeout=30, log=seen.append):
        assert len(seen) >= 40_000


def test_a_daemon_that_speaks_version_1_only() -> None:
    with (
        FakeDaemon(hello=None).expect("HELLO id=$id", "err unknown_command verb=HELLO") as daemon,
        pytest.raises(DaemonStartError, match="protocol version 2: HELLO gave unknown_command"),
    ):
        Client.attach(daemon.stdin, daemon.stdout)


def test_garbage_between_the_answers_is_passed_over() -> None:
    with spawn("prints_garbage") as client:
        assert client.slots() == (2,)
        assert client.slots() == (2,)


def test_half_a_line_is_no_answer() -> None:
    with spawn("half_a_line") as client, pytest.raises(DaemonDiedError, match="exit code 1"):
        client.slots()


def test_a_stuck_daemon_is_ended_and_replaced() -> None:
    with spawn("goes_silent", reply_timeout=0.3) as client:
        first = client.pid
        with pytest.raises(DaemonTimeoutError, match=r"STATUS: no answer within 0\.3 s"):
            client.status()
        assert client._session.process.exit_code == -signal.SIGKILL
        with pytest.raises(DaemonTimeoutError, match="STATUS"):
            client.generate([1], max_tokens=1)
        assert client.pid != first


def test_a_stuck_daemon_that_takes_no_long_prompt() -> None:
    with spawn("goes_silent", reply_timeout=0.3) as client:
        begun = time.monotonic()
        with pytest.raises(DaemonTimeoutError, match="did not take a command"):
            client.generate([7] * 200_000, max_tokens=1)
        assert time.monotonic() - begun < 5
        assert client._session.process.exit_code == -signal.SIGKILL


def test_close_ends_even_a_daemon_that_ignores_everything(monkeypatch) -> None:
    client = spawn("ignores_sigterm")
    process = client._session.process
    patient = process.shutdown
    monkeypatch.setattr(process, "shutdown", lambda quit: patient(quit=quit, grace=0.1, term=0.2))
    client.close()
    client.close()  # again
    assert process.exit_code == -signal.SIGKILL
