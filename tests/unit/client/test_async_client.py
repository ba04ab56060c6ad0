import asyncio
import os
import re
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from slotd.client import (
    AsyncClient,
    ClientClosedError,
    ConfigError,
    DaemonDiedError,
    DaemonStartError,
    DaemonTimeoutError,
    RequestError,
)
from tests.fakes.fake_daemon import FakeDaemon
from tests.fakes.tiny_gguf import FIRST_BYTE_TOKEN

Attach = Callable[..., Awaitable[AsyncClient]]

BAD = Path(__file__).parents[2] / "fakes" / "bad_daemons"
PROMPT = re.compile(r"- \d+ id=\S+ ids=.*")
END = "[done] id=$id status=length limit=n_gen"


def toks(*pieces: str | bytes) -> list[str]:
    """One [tok] line per piece, a token per byte."""
    at, lines = 0, []
    for piece in pieces:
        data = piece.encode() if isinstance(piece, str) else piece
        lines.append(f"[tok] id=$id at={at} ids={','.join(str(FIRST_BYTE_TOKEN + byte) for byte in data)}")
        at += len(data)
    return lines


def spawn(name: str, **settings) -> AsyncClient:
    return AsyncClient(command=[sys.executable, str(BAD / f"{name}.py")], **settings)


@pytest.fixture
def daemon() -> Iterator[FakeDaemon]:
    with FakeDaemon() as daemon:
        yield daemon


@pytest.fixture
def attach(daemon, tiny_llama) -> Attach:
    def attach(**settings) -> Awaitable[AsyncClient]:
        return AsyncClient.attach(daemon.stdin, daemon.stdout, model=tiny_llama, **settings)

    return attach


def test_generate_and_stream(daemon, attach) -> None:
    async def talk() -> None:
        async with await attach() as client:
            daemon.expect(PROMPT, "[prefill] id=$id at=1/1", *toks("a", "b"), END)
            daemon.expect(PROMPT, *toks("c", "🦊".encode()[:3], "🦊".encode()[3:]), END)
            seen = []
            done = await client.generate([5], on_progress=lambda at, of: seen.append((at, of)))
            assert (done.text, done.finish_reason, seen) == ("ab", "length", [(1, 1)])
            stream = client.stream("hello")
            assert [chunk.text async for chunk in stream] == ["c", "", "🦊"]
            assert (await stream.result()).text == "c🦊"
            assert stream.id == daemon.ids[-1]

    asyncio.run(talk())
    daemon.assert_done()


def test_a_stop_string_cancels(daemon, attach) -> None:
    async def talk() -> None:
        async with await attach() as client:
            daemon.expect(PROMPT, *toks("The br", "own", " fox"))
            daemon.expect("CANCEL id=$id", "[cancel] id=$id found=1", "[done] id=$id status=cancelled")
            done = await client.chat([{"role": "user", "content": "a"}], stop="own fox")
            assert (done.text, done.finish_reason, done.stop) == ("The br", "stop", "own fox")

    asyncio.run(talk())
    daemon.assert_done()


def test_many_streams_at_once_in_one_loop(daemon, attach) -> None:
    count = 12  # more than there are threads

    async def talk() -> None:
        async with await attach() as client:
            for _ in range(count):
                daemon.expect(PROMPT)
            tasks = [asyncio.create_task(client.generate([5])) for _ in range(count)]
            ids = (await asyncio.to_thread(daemon.wait_for_ids, 1 + count))[1:]
            for id in ids:
                daemon.say(*(line.replace("$id", id) for line in [*toks(id[-1], id[-2]), END]))
            done = await asyncio.gather(*tasks)
            assert {each.id: each.text for each in done} == {id: id[-1] + id[-2] for id in ids}

    asyncio.run(talk())


def test_the_short_verbs(daemon, attach) -> None:
    ok = "[done] id=$id status=ok"

    async def talk() -> None:
        async with await attach() as client:
            daemon.expect("SNAPSHOT 2 id=$id of=r", "[snap] slot=2 cur_pos=9 id=$id", ok)
            daemon.expect("LIST_SLOTS id=$id", "[snap] slots=2 id=$id", ok)
            daemon.expect("FREE_SNAPSHOT 2 id=$id", "[snap] freed slot=2 id=$id", ok)
            daemon.expect("STATUS id=$id", '[status] {"id":"$id","running":0}', ok)
            daemon.expect("PROPS id=$id", '[props] {"id":"$id","slots":8}', ok)
            daemon.expect("CANCEL id=other", "[cancel] id=other found=0")
            assert await client.snapshot(2, of="r") == 9
            assert await client.slots() == (2,)
            await client.free_slot(2)
            assert await client.status() == {"running": 0}
            assert await client.props() == {"slots": 8}
            assert await client.cancel("other") is False
            assert (client.hello, client.epoch, client.pid) == ({"max_ctx": 64, "epoch": 1}, 1, None)

    asyncio.run(talk())
    daemon.assert_done()


def test_errors_are_the_same(daemon, attach) -> None:
    async def talk() -> None:
        async with await attach() as client:
            with pytest.raises(TypeError, match=r"generate\(\) got an unexpected keyword argument 'x'"):
                await client.generate([5], x=1)
            with pytest.raises(ConfigError, match="temperature must be a number"):
                await client.generate([5], temperature="hot")
            daemon.expect(PROMPT, "[done] id=$id status=err code=overflow prompt=1")
            with pytest.raises(RequestError, match="overflow prompt=1"):
                await client.generate([5])

    asyncio.run(talk())


def test_a_cancelled_task_cancels_the_request(daemon, attach) -> None:
    async def talk() -> None:
        async with await attach() as client:
            daemon.expect(PROMPT, *toks("a"))
            daemon.expect("CANCEL id=$id", "[cancel] id=$id found=1", "[done] id=$id status=cancelled")
            task = asyncio.create_task(client.generate([5]))
            await asyncio.to_thread(daemon.wait_for_ids, 2)
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            daemon.assert_done()  # its last line was waited for

    asyncio.run(talk())
    daemon.assert_done()


def test_leaving_the_block_early_cancels(daemon, attach) -> None:
    async def talk() -> None:
        async with await attach() as client:
            daemon.expect(PROMPT, *toks("a"))
            daemon.expect("CANCEL id=$id", "[cancel] id=$id found=1", "[done] id=$id status=cancelled")
            async with client.stream([5]) as stream:
                async for _ in stream:
                    break
            assert (await stream.result()).finish_reason == "cancelled"

    asyncio.run(talk())
    daemon.assert_done()


def test_cancel_and_timeout(daemon, attach) -> None:
    async def talk() -> None:
        async with await attach() as client:
            for _ in range(2):
                daemon.expect(PROMPT, *toks("a"))
                daemon.expect("CANCEL id=$id", "[cancel] id=$id found=1", "[done] id=$id status=cancelled")
            async with client.stream([5]) as stream:
                assert (await anext(stream)).text == "a"
                assert await stream.cancel()
                assert (await stream.result()).finish_reason == "cancelled"
            with pytest.raises(DaemonTimeoutError, match="it was cancelled"):
                await client.generate([5], timeout=0.05)

    asyncio.run(talk())
    daemon.assert_done()


def test_silence_is_looked_into(daemon, attach) -> None:
    async def talk() -> None:
        async with await attach(reply_timeout=0.1) as client:
            daemon.expect(PROMPT)
            daemon.expect("STATUS id=$id", '[status] {"id":"$id"}', "[done] id=$id status=ok")
            daemon.expect("STATUS id=$id")
            with pytest.raises(DaemonTimeoutError, match="STATUS: no answer"):
                await client.generate([5])

    asyncio.run(talk())
    daemon.assert_done()


def test_death_and_restart() -> None:
    async def talk() -> None:
        async with spawn("dies_mid_answer") as client:
            first = client.pid
            with pytest.raises(DaemonDiedError, match="cannot go on"):
                await client.generate([1])
            assert await client.slots() == ()
            os.kill(client.pid, signal.SIGKILL)
            with pytest.raises(DaemonDiedError, match="SIGKILL"):
                await client.slots()
            assert await client.slots() == ()
            assert client.pid != first

    asyncio.run(talk())


def test_a_daemon_that_cannot_start() -> None:
    async def talk() -> None:
        with pytest.raises(DaemonStartError, match="the model cannot be used"):
            async with spawn("dies_at_once"):
                pass

    asyncio.run(talk())


def test_it_must_be_started() -> None:
    client = AsyncClient(command=["x"])
    with pytest.raises(DaemonDiedError, match="not started"):
        client.hello  # noqa: B018


def test_a_closed_client_says_so(daemon, attach) -> None:
    async def talk() -> None:
        async with await attach() as client:
            pass
        await client.close()  # again
        with pytest.raises(ClientClosedError, match="the client was closed"):
            await client.generate([5])
        with pytest.raises(ClientClosedError, match="the client was closed"):
            await client.slots()

    asyncio.run(talk())
