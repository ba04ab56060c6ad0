"""The shell of the caches, over real pipes, with a daemon that says what a test wants."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from slotd.client import Client, ConfigError, RequestError
from slotd.client.async_client import AsyncClient
from tests.fakes.fake_daemon import FakeDaemon

HELLO = (
    '{"id":"$id","max_ctx":512,"epoch":1,"boot":"b","slots":8,"parallel":1,'
    '"model":{"identity":"m"},"kv":{"k":"f32","v":"f32"}}'
)
LIST = ("LIST_SLOTS id=$id", "[snap] slots= id=$id", "[done] id=$id status=ok epoch=1")

#: 130 tokens: cut at two pages.
IDS = list(range(10, 140))
TEXT = ",".join(map(str, IDS))
LONGER = [*IDS, 5, 6]
LONGER_TEXT = ",".join(map(str, LONGER))


OK = "[done] id=$id status=ok"
INLINE = "[snap] inline slot=0 cur_pos=128 id=$id"
CLEARED = "[snap] all-cleared epoch=2 freed=0 kept= bytes=1"
RESTORE_LONGER = f"RESTORE 0 - 1 id=$id ids={LONGER_TEXT}"
EMPTY = "[done] id=$id status=err code=empty_slot epoch=1"


def done(status: str = "length limit=n_gen", *, reused: int = 0, epoch: int = 1) -> str:
    return f"[done] id=$id status={status} prompt=130 reused={reused} gen=1 epoch={epoch} seed=1 wall_s=0.1"


@pytest.fixture
def daemon() -> Iterator[FakeDaemon]:
    with FakeDaemon(hello=HELLO) as daemon:
        daemon.expect(*LIST)
        yield daemon


@pytest.fixture
def client(daemon: FakeDaemon) -> Iterator[Client]:
    with Client.attach(daemon.stdin, daemon.stdout, reply_timeout=5, prefix_slots=2) as client:
        yield client


def first(daemon: FakeDaemon, *lines: str) -> None:
    """The first request of a test; it asks for a snapshot at the second page."""
    daemon.expect(f"- 1 id=$id ids={TEXT} snap=128:0", *lines)


def keep(daemon: FakeDaemon, client: Client) -> None:
    first(daemon, INLINE, done())
    client.generate(IDS, max_tokens=1)


def forget_recent(client: Client) -> None:
    """As if other requests had pushed the last one out of the daemon."""
    client._cache._recent.clear()


def test_a_second_prompt_starts_from_the_slot_of_the_first(daemon: FakeDaemon, client: Client) -> None:
    keep(daemon, client)
    forget_recent(client)
    daemon.expect(
        RESTORE_LONGER,
        "[snap] restored slot=0 cur_pos=128 id=$id",
        done(reused=128),
    )
    answer = client.generate(LONGER, max_tokens=1)
    daemon.assert_done()
    assert answer.cached_tokens == 128
    assert answer.stages == ("restore", "prefill")
    stats = client.cache_stats()
    assert (stats["active"], stats["prefix_hits"], stats["prefix_hit_tokens"]) == (True, 1, 128)


def ids_text(ids: list[int]) -> str:
    return ",".join(map(str, ids))


#: 190 tokens: the slot gets 128 of them, and the daemon keeps all on its own.
BIG = list(range(10, 200))


def keep_big(daemon: FakeDaemon, client: Client) -> None:
    daemon.expect(f"- 1 id=$id ids={ids_text(BIG)} snap=128:0", INLINE, done())
    client.generate(BIG, max_tokens=1)


def test_what_the_daemon_still_has_needs_no_slot(daemon: FakeDaemon, client: Client) -> None:
    keep_big(daemon, client)
    daemon.expect(f"- 1 id=$id ids={ids_text([*BIG, 5])}", done(reused=190))
    answer = client.generate([*BIG, 5], max_tokens=1)
    daemon.assert_done()
    assert (answer.cached_tokens, answer.stages) == (190, ("reuse",))


def test_a_wrong_guess_is_made_once(daemon: FakeDaemon, client: Client) -> None:
    keep_big(daemon, client)
    daemon.expect(f"- 1 id=$id ids={ids_text([*BIG, 5])}", done(reused=0))  # it has dropped what it had
    client.generate([*BIG, 5], max_tokens=1)
    with client._cache._lock:
        assert client._cache._recent.expected(client_bytes([*BIG, 6, 6])) == 190  # of the last request only
    forget_recent(client)
    daemon.expect(f"RESTORE 0 - 1 id=$id ids={ids_text([*BIG, 6])}", done(reused=128))
    client.generate([*BIG, 6], max_tokens=1)
    daemon.assert_done()


@pytest.mark.parametrize(
    "lines",
    [
        [done()],  # no word of a snapshot
        ["[snap] inline slot=0 cur_pos=127 id=$id", done()],
        ["[snap] inline slot=1 cur_pos=128 id=$id", done()],
        ["[snap] inline slot=0 cur_pos=128 id=other", done()],
        ["[snap] inline-failed slot=0 reason=oom id=$id", done()],
        [INLINE, done(epoch=2)],  # a clearing that was not heard
        [
            "[snap] inline slot=0 cur_pos=128 id=$id",
            CLEARED,
            done(epoch=2),
        ],
    ],
)
def test_without_evidence_there_is_no_entry(daemon: FakeDaemon, client: Client, lines: list[str]) -> None:
    first(daemon, *lines)
    client.generate(IDS, max_tokens=1)
    forget_recent(client)
    daemon.expect(f"- 1 id=$id ids={LONGER_TEXT} snap=128:0", done(epoch=2))
    client.generate(LONGER, max_tokens=1)
    daemon.assert_done()


def test_a_failed_request_leaves_no_entry(daemon: FakeDaemon, client: Client) -> None:  # S131
    first(daemon, INLINE, "[done] id=$id status=err code=oom epoch=1")
    with pytest.raises(RequestError, match="oom"):
        client.generate(IDS, max_tokens=1)
    assert client.cache_stats()["prefix"]["entries"] == 0


def test_after_all_cleared_nothing_is_restored(
    daemon: FakeDaemon, client: Client, caplog: pytest.LogCaptureFixture
) -> None:  # S126, S129
    keep(daemon, client)
    with caplog.at_level(logging.INFO):
        daemon.expect("STATUS id=$id", CLEARED, '[status] {"id":"$id"}')
        client.status()
    assert "all-cleared: dropped 1 prefix + 0 full entries" in caplog.text
    daemon.expect(f"- 1 id=$id ids={LONGER_TEXT} snap=128:0", done(epoch=2))
    client.generate(LONGER, max_tokens=1)
    daemon.assert_done()


def test_the_callback_is_there_before_the_start_up_sync() -> None:  # S128
    with FakeDaemon(hello=HELLO) as daemon:
        daemon.expect(
            "LIST_SLOTS id=$id", CLEARED.replace("=2", "=7"), "[snap] slots=0,1,5 id=$id", OK
        )  # fmt: skip
        for slot in (0, 1):  # slot 5 is not ours
            daemon.expect(
                f"FREE_SNAPSHOT {slot} id=$id", f"[snap] freed slot={slot} id=$id", "[done] id=$id status=ok"
            )
        with Client.attach(daemon.stdin, daemon.stdout, reply_timeout=5, prefix_slots=2) as client:
            assert client.cache_stats()["epoch"] == 7
            assert client.cache_stats()["active"]
        daemon.assert_done()


@pytest.mark.parametrize("code", ["empty_slot", "prefix_mismatch", "prefix_shorter"])
def test_a_slot_that_is_gone_costs_no_error(daemon: FakeDaemon, client: Client, code: str) -> None:
    keep(daemon, client)
    forget_recent(client)
    daemon.expect(RESTORE_LONGER, f"[done] id=$id status=err code={code} epoch=1")
    daemon.expect(f"- 1 id=$id ids={LONGER_TEXT} snap=128:0", "[tok] id=$id at=0 ids=9", done())
    answer = client.generate(LONGER, max_tokens=1)
    daemon.assert_done()
    assert (answer.ids, answer.cached_tokens, answer.stages) == ((9,), 0, ("prefill", "decode"))
    assert daemon.ids[-1] == daemon.ids[-2]  # under the same id
    assert client.cache_stats()["stale_restores"] == 1


def test_it_is_sent_again_once_only(daemon: FakeDaemon, client: Client) -> None:
    keep(daemon, client)
    forget_recent(client)
    daemon.expect(RESTORE_LONGER, EMPTY)
    daemon.expect(f"- 1 id=$id ids={LONGER_TEXT} snap=128:0", EMPTY)
    with pytest.raises(RequestError, match="empty_slot"):
        client.generate(LONGER, max_tokens=1)
    daemon.assert_done()


def test_other_errors_of_a_restore_are_errors(daemon: FakeDaemon, client: Client) -> None:
    keep(daemon, client)
    forget_recent(client)
    daemon.expect(RESTORE_LONGER, "[done] id=$id status=err code=oom epoch=1")
    with pytest.raises(RequestError, match="oom"):
        client.generate(LONGER, max_tokens=1)
    daemon.assert_done()


def test_a_slot_that_the_caller_named_is_the_callers(daemon: FakeDaemon, client: Client) -> None:
    daemon.expect(f"RESTORE 0 - 1 id=$id ids={TEXT}", EMPTY)
    with pytest.raises(RequestError, match="empty_slot"):
        client.generate(IDS, max_tokens=1, slot=0)
    daemon.expect(f"- 1 id=$id ids={TEXT} snap=3:0", "[snap] inline slot=0 cur_pos=3 id=$id", done())
    client.generate(IDS, max_tokens=1, snap=(3, 0))
    daemon.expect(f"- 1 id=$id ids={LONGER_TEXT} snap=128:1", done())  # slot 0 is taken
    client.generate(LONGER, max_tokens=1)
    daemon.assert_done()


def test_an_argument_that_cannot_be_sent_loses_no_slot(daemon: FakeDaemon, client: Client) -> None:
    keep(daemon, client)
    forget_recent(client)
    for _ in range(3):
        with pytest.raises(ConfigError, match="top_p"):
            client.generate(LONGER, max_tokens=1, top_p=2.0)
    assert client.cache_stats()["pending"] == 0
    daemon.expect(RESTORE_LONGER, done(reused=128))
    client.generate(LONGER, max_tokens=1)
    daemon.assert_done()


def test_an_abandoned_request_keeps_its_slot_until_it_has_ended(daemon: FakeDaemon, client: Client) -> None:
    first(daemon, "[tok] id=$id at=0 ids=9")
    stream = client.stream(IDS, max_tokens=1)
    assert next(stream).ids == (9,)
    stream._session.bus.remove(stream.command)  # as after a cancel that the daemon never answers
    other = [*range(300, 430)]
    daemon.expect(f"- 1 id=$id ids={','.join(map(str, other))} snap=128:1", done())
    client.generate(other, max_tokens=1)
    assert client.cache_stats()["pending"] == 1
    daemon.say(f"[snap] inline slot=0 cur_pos=128 id={stream.id}", done().replace("$id", stream.id))
    daemon.expect("STATUS id=$id", '[status] {"id":"$id"}')
    client.status()
    assert client.cache_stats()["pending"] == 0
    daemon.assert_done()
    stream.command.state = stream.command.state.DONE  # nothing to cancel any more


def test_kept_slots_come_back_when_the_daemon_says_what_they_hold(daemon: FakeDaemon, client: Client) -> None:
    keep(daemon, client)
    assert client._cache._caches.identity is not None
    [entry] = client._cache._caches.prefix_entries()
    content = client._cache._caches.identity.content(entry.ids)
    daemon.say("[snap] all-cleared epoch=2 freed=1 kept=0 bytes=1")
    slots = f'"0":{{"tokens":128,"hash":"{content}"}}'
    for _ in range(2):  # the first one only makes sure that the line above was read
        daemon.expect("STATUS id=$id", f'[status] {{"id":"$id","epoch":2,"slots":{{{slots}}}}}')
    client.status()
    daemon.expect(RESTORE_LONGER, done(reused=128, epoch=2))
    client.generate(LONGER, max_tokens=1)
    daemon.assert_done()
    assert client.cache_stats()["rebound"] == 1


def test_a_length_alone_is_no_evidence(daemon: FakeDaemon, client: Client) -> None:
    keep(daemon, client)
    daemon.say("[snap] all-cleared epoch=2 freed=1 kept=0 bytes=1")
    for _ in range(2):
        daemon.expect("STATUS id=$id", '[status] {"id":"$id","epoch":2,"slots":{"0":128}}')
    client.status()
    daemon.expect(f"- 1 id=$id ids={LONGER_TEXT} snap=128:0", done(epoch=2))
    client.generate(LONGER, max_tokens=1)
    daemon.assert_done()


def test_a_kept_slot_is_asked_about_once(daemon: FakeDaemon, client: Client) -> None:
    keep(daemon, client)
    daemon.say("[snap] all-cleared epoch=2 freed=1 kept=0 bytes=1")
    for _ in range(2):
        daemon.expect("STATUS id=$id", '[status] {"id":"$id","epoch":2,"slots":{}}')
    client.status()
    for ids in ([7], [8]):  # too short for a slot, so that slot 0 stays nobody's
        daemon.expect(f"- 1 id=$id ids={ids[0]}", done(epoch=2))
        client.generate(ids, max_tokens=1)
    daemon.assert_done()


def test_off() -> None:
    with FakeDaemon(hello=HELLO) as daemon:
        with Client.attach(daemon.stdin, daemon.stdout, reply_timeout=5) as client:
            daemon.expect(f"- 1 id=$id ids={TEXT}", done())
            client.generate(IDS, max_tokens=1)
            assert not client.cache_stats()["active"]
        daemon.assert_done()


@pytest.mark.parametrize("hello", ['{"id":"$id","max_ctx":512}', HELLO.replace('"slots":8', '"slots":0')])
def test_a_daemon_that_names_no_slots_is_used_without(hello: str) -> None:
    with FakeDaemon(hello=hello) as daemon:
        with Client.attach(daemon.stdin, daemon.stdout, reply_timeout=5, prefix_slots=2) as client:
            daemon.expect(f"- 1 id=$id ids={TEXT}", done())
            client.generate(IDS, max_tokens=1)
        daemon.assert_done()


def test_a_daemon_that_refuses_the_sync_is_used_without() -> None:
    with FakeDaemon(hello=HELLO) as daemon:
        daemon.expect("LIST_SLOTS id=$id", "[done] id=$id status=err code=internal")
        with Client.attach(daemon.stdin, daemon.stdout, reply_timeout=5, prefix_slots=2) as client:
            assert not client.cache_stats()["active"]


@pytest.mark.parametrize("slots", [-1, True, 1.5])
def test_a_bad_number_of_slots(slots: object, daemon: FakeDaemon) -> None:
    with pytest.raises(ConfigError, match="prefix_slots must be a number of slots"):
        Client.attach(daemon.stdin, daemon.stdout, prefix_slots=slots)  # type: ignore[arg-type]


def test_full_entries(daemon: FakeDaemon) -> None:
    with Client.attach(daemon.stdin, daemon.stdout, reply_timeout=5, prefix_slots=0, full_slots=1) as client:
        short = "21,22,23"
        daemon.expect(f"- 1 id=$id ids={short} snap=3:0", "[snap] inline slot=0 cur_pos=3 id=$id", done())
        client.generate([21, 22, 23], max_tokens=1)
        daemon.expect(
            f"RESTORE 0 - 1 id=$id ids={short}", "[snap] restored slot=0 cur_pos=3 id=$id", done(reused=3)
        )
        client.generate([21, 22, 23], max_tokens=1)
        assert client.cache_stats()["full_hits"] == 1
        daemon.assert_done()


async def _ask(daemon: FakeDaemon) -> tuple[int, ...]:
    client = await AsyncClient.attach(daemon.stdin, daemon.stdout, reply_timeout=5, prefix_slots=2)
    async with client:
        first(daemon, INLINE, done())
        await client.generate(IDS, max_tokens=1)
        forget_recent(client._client)
        daemon.expect(RESTORE_LONGER, EMPTY)
        daemon.expect(f"- 1 id=$id ids={LONGER_TEXT} snap=128:0", "[tok] id=$id at=0 ids=9", done())
        answer = await client.generate(LONGER, max_tokens=1)
        assert client.cache_stats()["stale_restores"] == 1
        return answer.ids


def test_the_asyncio_client_sends_again_too(daemon: FakeDaemon) -> None:
    import asyncio

    assert asyncio.run(_ask(daemon)) == (9,)
    daemon.assert_done()


# --------------------------------------------------------------------------------------------------
# On disk


def persistent(daemon: FakeDaemon, folder: Path) -> Client:
    return Client.attach(daemon.stdin, daemon.stdout, reply_timeout=5, prefix_slots=2, cache_dir=folder)


STORED_HELLO = HELLO.replace('"slots":8', '"slots":8,"verbs":["STORED"]')


def test_prefixes_come_back_from_the_daemons_disk(tmp_path: Path) -> None:
    with FakeDaemon(hello=STORED_HELLO) as daemon:
        daemon.expect(*LIST)
        daemon.expect("STORED id=$id", '[stored] {"id":"$id","files":[]}')
        with persistent(daemon, tmp_path) as client:
            assert client._cache._caches.identity is not None
            content = client._cache._caches.identity.content(client_bytes(IDS[:128]))
            daemon.expect(
                f"- 1 id=$id ids={TEXT} snap=128:0 tier=disk",
                f"[snap] inline slot=0 cur_pos=128 tier=disk hash={content} id=$id",
                done(),
            )
            client.generate(IDS, max_tokens=1)
        daemon.assert_done()
    assert len(list(tmp_path.iterdir())) == 2
    with FakeDaemon(hello=STORED_HELLO.replace('"b"', '"c"')) as daemon:
        daemon.expect(*LIST)
        daemon.expect("STORED id=$id", f'[stored] {{"id":"$id","files":[{{"hash":"{content}"}}]}}')
        daemon.expect(
            f"LOAD_SNAPSHOT 0 id=$id hash={content}",
            f"[snap] loaded slot=0 cur_pos=128 hash={content} id=$id", OK,
        )  # fmt: skip
        with persistent(daemon, tmp_path) as client:
            daemon.expect(RESTORE_LONGER, done(reused=128))
            client.generate(LONGER, max_tokens=1)
        daemon.assert_done()


def client_bytes(ids: list[int]) -> bytes:
    from slotd.client.cache_entries import as_bytes

    return as_bytes(ids)


@pytest.mark.parametrize("code", ["bad_snapshot", "unknown_snapshot", "wrong_snapshot"])
def test_a_bad_file_is_forgotten(tmp_path: Path, code: str) -> None:
    test_prefixes_come_back_from_the_daemons_disk(tmp_path)
    content = next(iter(tmp_path.glob("*.meta.json"))).read_text().partition('"content": "')[2][:32]
    with FakeDaemon(hello=STORED_HELLO) as daemon:
        daemon.expect(*LIST)
        daemon.expect("STORED id=$id", f'[stored] {{"id":"$id","files":[{{"hash":"{content}"}}]}}')
        daemon.expect(
            f"LOAD_SNAPSHOT 0 id=$id hash={content}", f"[done] id=$id status=err code={code} hash={content}"
        )
        daemon.expect("FREE_SNAPSHOT 0 id=$id", "[snap] freed slot=0 id=$id", "[done] id=$id status=ok")
        with persistent(daemon, tmp_path) as client:
            assert client.cache_stats()["prefix"] == {"slots": 2, "entries": 0, "tokens": 0, "cold": 0}
        daemon.assert_done()
    assert list(tmp_path.iterdir()) == []


def test_a_daemon_without_a_disk_and_a_folder_that_is_a_file(tmp_path: Path) -> None:
    with FakeDaemon(hello=STORED_HELLO) as daemon:
        daemon.expect(*LIST)
        daemon.expect("STORED id=$id", "[done] id=$id status=err code=no_slot_dir")
        with persistent(daemon, tmp_path / "new") as client:
            keep(daemon, client)  # no tier=disk
        daemon.assert_done()
    (tmp_path / "file").write_text("")
    with FakeDaemon(hello=STORED_HELLO) as daemon:
        daemon.expect(*LIST)
        with persistent(daemon, tmp_path / "file") as client:
            assert client.cache_stats()["active"]
        daemon.assert_done()
