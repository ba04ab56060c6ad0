"""Lessons of the source's history that no other file of tests is about; the map is in architecture/."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from slotd.client import Client
from slotd.protocol.errors import DaemonStartError
from slotd.protocol.messages import Command
from tests.fakes.fake_daemon import FakeDaemon

HELLO = (
    '{"id":"$id","slots":8,"max_ctx":4096,"epoch":1,"boot":"b1","parallel":4,'
    '"kv":{"k":"f16","v":"f16","window":0},"model":{"identity":"m"}}'
)
IDS = list(range(10, 140))
DONE = "[done] id=$id status=length gen=1 epoch=1 prompt=130 reused=0 prefill_s=0.1"


def test_1b5e0d1_a_second_start_forgets_nothing() -> None:
    """Double init wiped live entries there."""
    with FakeDaemon(HELLO) as daemon:
        daemon.expect("LIST_SLOTS id=$id", "[snap] slots= id=$id", "[done] id=$id status=ok")
        with Client.attach(daemon.stdin, daemon.stdout, reply_timeout=5, prefix_slots=2) as client:
            ids = ",".join(map(str, IDS))
            daemon.expect(f"- 1 id=$id ids={ids} snap=128:0", "[snap] inline slot=0 cur_pos=128 id=$id", DONE)
            client.generate(IDS, max_tokens=1)
            client._cache.start(client._session, client._text)
            assert client.cache_stats()["prefix"]["entries"] == 1
            assert client.cache_stats()["active"]
            daemon.assert_done()


@pytest.mark.parametrize("late", [0.6, 3.0])
def test_cdf4b23_a_cold_start_has_a_timeout_of_its_own(tiny_llama: Path, late: float) -> None:
    """The first answer may take far longer than a reply; and not for ever."""
    with FakeDaemon(None) as daemon:
        daemon.expect("HELLO id=$id", lambda: time.sleep(late), f"[hello] {HELLO}", "[done] id=$id status=ok")
        if late < 2:
            with Client.attach(
                daemon.stdin, daemon.stdout, model=tiny_llama, reply_timeout=0.1, start_timeout=2
            ) as client:
                assert client.hello["boot"] == "b1"
            return
        began = time.monotonic()
        with pytest.raises(DaemonStartError, match="not ready within 1 s"):
            Client.attach(daemon.stdin, daemon.stdout, model=tiny_llama, reply_timeout=0.1, start_timeout=1)
        assert time.monotonic() - began < late


def test_5549c79_a_waiter_is_there_before_its_command_is_written(
    daemon: FakeDaemon, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that comes at once finds who waits for it, for every kind of command."""
    transport = client._session.transport
    send = transport.send
    waiting: list[int] = []

    def watched(message: Command, timeout: float) -> None:
        waiting.append(client._session.bus.waiters)
        send(message, timeout)

    monkeypatch.setattr(transport, "send", watched)
    daemon.expect("LIST_SLOTS id=$id", "[snap] slots=1 id=$id", "[done] id=$id status=ok")
    assert client.slots() == (1,)
    daemon.expect("- 1 id=$id ids=5,6", "[done] id=$id status=length gen=1")
    client.generate([5, 6], max_tokens=1)
    assert waiting == [1, 1]
    assert client._session.bus.waiters == 0


def test_1b5e0d1_a_prompt_needs_no_file(daemon: FakeDaemon, client: Client, tmp_path: Path,
                                        monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """No temporary prompt file can leak, or be deleted while the daemon reads it (a86b1cd): ids go inline."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    daemon.expect("- 1 id=$id ids=5,6", "[done] id=$id status=length gen=1")
    client.generate([5, 6], max_tokens=1)
    assert list(tmp_path.iterdir()) == []
