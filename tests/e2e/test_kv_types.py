"""K/V types through the real daemon: what it says of them, and slots that keep them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.daemon_process import DaemonProcess
from tests.fakes.tiny_gguf import write_tiny_llama

PROMPT = ",".join(str(5 + i % 200) for i in range(90))
MORE = PROMPT + ",7,8,9"

#: Bytes that one row of 64 numbers takes.
PAIRS = [("f32", 256, "bf16", 128), ("bf16", 128, "q5_1", 48), ("q8_0", 68, "q4_0", 36)]
PAIRS += [("q4_1", 40, "q5_0", 44), ("q4_0", 36, "q8_0", 68), ("f16", 128, "f16", 128)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, one key and value head of 64."""
    return write_tiny_llama(tmp_path_factory.mktemp("kv") / "m.gguf", n_embd=128, n_head=2, n_head_kv=1)


@pytest.mark.parametrize(("k", "k_bytes", "v", "v_bytes"), PAIRS)
def test_hello_inspect_and_the_pages_agree(model: Path, k: str, k_bytes: int, v: str, v_bytes: int) -> None:
    per_token = 2 * (k_bytes + v_bytes)
    argv = [sys.executable, "-m", "slotd.daemon", "inspect", str(model), "-ctk", k, "-ctv", v, "--json"]
    found = subprocess.run(argv, capture_output=True, check=True, timeout=60)
    assert json.loads(found.stdout)["memory"]["kv_per_token"] == per_token
    with DaemonProcess(model, "-ctk", k, "-ctv", v) as daemon:
        daemon.send("HELLO", "- 1 ids=5,6,7 id=r")
        kv = daemon.wait_json("hello")["kv"]
        assert (kv["k"], kv["v"], kv["bytes_per_token"]) == (k, v, per_token)
        assert daemon.wait_done("r").fields["gen"] == 1
        daemon.send("STATUS")
        assert daemon.wait_json("status")["memory"]["page_bytes"] == 64 * per_token


@pytest.mark.parametrize("kv", ["q8_0", "q5_1", "bf16"])
def test_a_snapshot_on_disk_keeps_the_stored_bytes(model: Path, tmp_path: Path, kv: str) -> None:
    """Another process goes on from it with the bits of the first one; a daemon of other types refuses it."""
    flags = (f"--slot-dir={tmp_path}", "--exact")
    ask = f"- 20 ids={MORE} id=r ignore_eos=1 logprobs=3"
    with DaemonProcess(model, *flags, "-ctk", kv, "-ctv", kv) as daemon:
        daemon.send(ask)
        daemon.wait_done("r")
        expected = [line for line in daemon.lines if line.startswith("[tok]")]
        daemon.send(f"- 0 ids={PROMPT} id=f snap=90:0")
        daemon.wait_done("f")
        daemon.send("SNAPSHOT 0 held=1 tier=disk")
        name = daemon.wait_line("[snap] slot=0").rpartition(" hash=")[2]
    with DaemonProcess(model, *flags, "-ctk", "f16", "-ctv", kv) as daemon:
        daemon.send(f"LOAD_SNAPSHOT 3 hash={name}")
        daemon.wait_line("err wrong_snapshot")
    with DaemonProcess(model, *flags, "-ctk", kv, "-ctv", kv) as daemon:
        daemon.send(f"LOAD_SNAPSHOT 3 hash={name}")
        daemon.wait_line("[snap] loaded slot=3 cur_pos=90")
        daemon.send("RESTORE 3 " + ask)
        assert daemon.wait_done("r").fields["reused"] == 90
        assert [line for line in daemon.lines if line.startswith("[tok]")] == expected


@pytest.mark.parametrize("kv", ["q8_0", "tq3_0", "bf16"])
def test_a_restored_answer_is_the_computed_one(tmp_path: Path, kv: str) -> None:
    """Bit by bit, as the sampler sees it: log-probabilities too. Heads of 128, as tq3_0 needs them."""
    model = write_tiny_llama(tmp_path / "m.gguf", n_embd=256, n_head=2, n_head_kv=1)
    with DaemonProcess(model, "--exact", "-ctk", kv, "-ctv", kv) as daemon:
        daemon.send(f"- 20 ids={MORE} id=plain ignore_eos=1 logprobs=3")
        daemon.wait_done("plain")
        daemon.send(f"- 0 ids={PROMPT} id=fill snap=90:2")
        daemon.wait_done("fill")
        for number in range(16):  # displace the ended sequences, which hold more than the slot
            daemon.generate([number, 7], 0, request_id=f"other{number}")
        daemon.send(f"RESTORE 2 - 20 ids={MORE} id=again ignore_eos=1 logprobs=3")
        done = daemon.wait_done("again")
        assert (done.status, done.fields["reused"]) == ("length", 90)
        answers = {name: [line.partition(" at=")[2] for line in daemon.lines if f"[tok] id={name} " in line]
                   for name in ("plain", "again")}  # fmt: skip
        assert len("".join(answers["plain"])) > 100
        assert answers["again"] == answers["plain"]
