"""kill -9 of the daemon in the middle of things, and of the client: what is promised afterwards.

In the middle of a save: test_disk_tier; between two calls, and the reply of the caches: test_client_caches.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from slotd.client import Client, DaemonDiedError
from slotd.client.stream import Stream
from slotd.protocol.messages import Prefill
from tests.fakes.tiny_gguf import write_tiny_llama

#: Bound of every wait, in seconds.
PATIENCE = 30.0

FLAGS = ("--max-ctx=32768", "--chunk=64")
LONG = [(7 * i) % 290 + 3 for i in range(12_000)]
SHORT = [(11 * i) % 290 + 3 for i in range(200)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("kills") / "model.gguf", n_ctx=32768)


def begin_prefill(client: Client) -> Stream:
    """A long prompt of which a part is computed."""
    progress: list[Prefill] = []
    client.register_event_callback(Prefill, progress.append)
    stream = client.stream(LONG, max_tokens=4)
    end = time.monotonic() + PATIENCE
    while len(progress) < 2:
        assert time.monotonic() < end
        time.sleep(0.005)
    return stream


def begin_stream(client: Client) -> Stream:
    """An answer that has begun."""
    stream = client.stream(SHORT, max_tokens=20_000, ignore_eos=True)
    next(stream)
    return stream


@pytest.mark.parametrize("begin", [begin_prefill, begin_stream])
def test_kill_9_of_the_daemon_in_mid_request(model: Path, begin: Callable[[Client], Stream]) -> None:
    """The request fails at once and by name, the next one is answered by a new daemon with empty slots."""
    with Client(model, daemon_args=FLAGS, prefix_slots=2) as client:
        expected = client.generate(SHORT, max_tokens=4, ignore_eos=True).ids
        first = client.pid
        stream = begin(client)
        assert first is not None
        os.kill(first, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(DaemonDiedError, match="SIGKILL"):
            stream.result()
        assert time.monotonic() - began < PATIENCE / 3
        again = client.generate(SHORT, max_tokens=4, ignore_eos=True)
        assert client.pid not in (None, first)
        assert (again.ids, again.cached_tokens) == (expected, 0)
        assert client.cache_stats()["pending"] == 0
        assert client.generate(SHORT, max_tokens=4, ignore_eos=True).cached_tokens > 0


#: A client of its own process: it says its daemon's id when the request is under way.
CLIENT = """
import sys
from slotd.client import Client
from slotd.protocol.messages import Prefill
model, folder, what = sys.argv[1:]
client = Client(model, daemon_args=["--max-ctx=32768", "--chunk=64", f"--slot-dir={folder}"], prefix_slots=2)
client.generate([(11 * i) % 290 + 3 for i in range(200)], max_tokens=1)
say = lambda *_: print(client.pid, flush=True)
if what == "prefill":
    client.register_event_callback(Prefill, say)
    client.generate([(7 * i) % 290 + 3 for i in range(12_000)], max_tokens=4)
elif what == "stream":
    for _ in client.stream([5, 6, 7], max_tokens=30_000, ignore_eos=True):
        say()
else:
    say()
    sys.stdin.read()
"""


@pytest.mark.parametrize("what", ["prefill", "stream", "idle"])
def test_kill_9_of_the_client(model: Path, tmp_path: Path, what: str) -> None:
    """The daemon ends by itself and lets everything go, the folder of snapshots too; a new client is fine."""
    folder = tmp_path / "slots"
    argv = [sys.executable, "-c", CLIENT, str(model), str(folder), what]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as killed:
        assert killed.stdout is not None
        daemon = int(killed.stdout.readline())
        killed.kill()
    end = time.monotonic() + PATIENCE
    while is_running(daemon):
        assert time.monotonic() < end, "the daemon outlives its client"
        time.sleep(0.02)
    flags = [*FLAGS, f"--slot-dir={folder}"]
    with Client(model, daemon_args=flags, prefix_slots=2, cache_dir=tmp_path / "ids") as client:
        assert client.slots() == ()
        first = client.generate(SHORT, max_tokens=4, ignore_eos=True)
        assert first.cached_tokens == 0
        assert client.generate([*SHORT, 5, 6], max_tokens=4, ignore_eos=True).cached_tokens > 0
    assert list(folder.rglob("*.slot"))  # which only the one writer of the folder writes


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
