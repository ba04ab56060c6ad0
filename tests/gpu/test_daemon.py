"""The daemon on a GPU: a lost device, a full card, parking. The model is a random one of SmolLM2's shape."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from tests.bench.synthetic_gguf import PRESETS, write_synthetic
from tests.fakes.daemon_process import DaemonProcess

LIMIT = 5.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "135m.gguf"
    write_synthetic(path, PRESETS["135m"], seed=3)
    return path


@pytest.fixture(scope="module")
def answers(model: Path) -> dict[int, list[int]]:
    """Of a daemon to which nothing happens, by the length of the prompt."""
    with DaemonProcess(model, "--device=0") as daemon:
        return {n: daemon.generate(ids(n), 16)[0] for n in (50, 900, 6000)}


def ids(n: int) -> list[int]:
    return np.random.default_rng(n).integers(300, 30_000, n).tolist()


def start(model: Path, *flags: str, **env: str) -> DaemonProcess:
    return DaemonProcess(model, "--device=0", *flags, env=env)


def test_an_illegal_address_costs_the_request_that_ran(model: Path, answers: dict[int, list[int]]) -> None:
    with start(model, SLOTD_FAULT="device_lost:6") as daemon:
        props = daemon.wait_json_of("PROPS", "props")
        assert props["backend"]["name"] == "cuda"
        daemon.generate(ids(900), 0, "snap=900:2 tier=host", "take")
        _, done = daemon.generate(ids(50), 64, request_id="lost")
        assert done.fields["code"] == "device_lost"
        assert "IllegalAddress" in str(done.fields) or "illegal" in str(done.fields).lower()
        began = time.monotonic()
        assert daemon.generate(ids(50), 16, request_id="next")[0] == answers[50]
        seconds = time.monotonic() - began
        assert seconds < LIMIT
        cleared = [line for line in daemon.lines if line.startswith("[snap] all-cleared")]
        assert len(cleared) == 1
        assert "kept=2" in cleared[0]
        listed = ",".join(map(str, ids(900)))
        daemon.send(f"RESTORE 2 - 16 ids={listed} id=back")
        assert daemon.wait_done("back").fields["reused"] == 900
        assert daemon.wait_json_of("PROPS", "props")["pid"] == props["pid"]
        print(f"served {seconds:.2f} s after the loss")


def test_a_full_card(model: Path, answers: dict[int, list[int]]) -> None:
    """Somebody else takes all memory: the prompt that no longer fits gets it from a slot, and is answered."""
    import cupy

    held = []
    with start(model, "--max-ctx=8192") as daemon:
        daemon.generate(ids(6001)[:6000], 1, "snap=6000:1", "other")  # 140 MB of K/V in a slot
        daemon.generate(ids(900), 1, request_id="warm")
        while True:
            free = cupy.cuda.runtime.memGetInfo()[0]
            if free < 96 << 20:
                break
            try:
                held.append(cupy.cuda.runtime.malloc(max(free // 2, 32 << 20)))
            except cupy.cuda.runtime.CUDARuntimeError:
                break
        produced, done = daemon.generate(ids(6000), 16, request_id="full")
        status = daemon.wait_json_of("STATUS", "status")
        for block in held:
            cupy.cuda.runtime.free(block)
        print(done.status, done.fields, status["recovery"])
        if done.status == "err":
            assert done.fields["code"] == "oom"
        else:
            assert produced == answers[6000]
        assert daemon.generate(ids(50), 16, request_id="after")[0] == answers[50]
        assert daemon.process.poll() is None


def test_park_gives_the_memory_back(model: Path, answers: dict[int, list[int]]) -> None:
    import cupy

    with start(model) as daemon:
        assert daemon.generate(ids(900), 16, "snap=900:3")[0] == answers[900]
        before = cupy.cuda.runtime.memGetInfo()[0]
        daemon.send("park id=p")
        daemon.wait_done("p")
        freed = cupy.cuda.runtime.memGetInfo()[0] - before
        assert freed > 100 << 20, freed
        daemon.send("unpark id=u")
        daemon.wait_done("u")
        daemon.send(f"RESTORE 3 - 16 ids={','.join(map(str, ids(900)))} id=back")
        assert daemon.wait_done("back").fields["reused"] == 900
        assert daemon.generate(ids(900), 16, request_id="again")[0] == answers[900]
        print(f"park freed {freed >> 20} MiB")


def test_field_report_66_idle_weights_leave_the_device(model: Path, answers: dict[int, list[int]]) -> None:
    import cupy

    with start(model, "--idle-unload=2") as daemon:
        assert daemon.generate(ids(900), 16, "snap=900:3")[0] == answers[900]
        before = cupy.cuda.runtime.memGetInfo()[0]
        for number in range(2):
            end = time.monotonic() + 30
            while (status := daemon.wait_json_of("STATUS", "status"))["target"] != "unloaded":
                assert time.monotonic() < end, status
                time.sleep(0.05)
            freed = cupy.cuda.runtime.memGetInfo()[0] - before
            print(f"idle freed {freed >> 20} MiB; {status['memory']}")
            # The driver's figure is of all processes: it is printed. Nothing is kept back from it here.
            assert (status["memory"]["live"]["weights"], status["memory"]["cached"]) == (0, 0)
            daemon.send(f"RESTORE 3 - 16 ids={','.join(map(str, ids(900)))} id=back{number}")
            done = daemon.wait_done(f"back{number}")
            print(done.fields)
            assert done.fields["reused"] == 900
            assert float(done.fields["load_s"]) > 0
        assert daemon.generate(ids(900), 16, request_id="again")[0] == answers[900]
        assert "idle: the weights are unloaded" in daemon.stderr


@pytest.mark.parametrize("pool", ["legacy", "vmm"])
def test_field_report_62_cached_blocks_are_released_in_a_long_prompt(
    model: Path, answers: dict[int, list[int]], pool: str
) -> None:
    """Pieces of any size, trims between them: the same answer, and the trims of the interval are counted."""
    flags = ("--prefill-pool-trim-tokens=1024", "--chunk=512", f"--pool={pool}")
    with start(model, *flags) as daemon:
        produced, done = daemon.generate(ids(6000), 16)
        assert (done.status, produced) == ("length", answers[6000])
        status = daemon.wait_json_of("STATUS", "status")
        print(status["recovery"], status["memory"])
        trims = status["recovery"]["trims"]
        if pool == "vmm":  # the driver's pool needs none
            assert trims == {}
        else:
            assert trims["interval"]["count"] == 6000 // 1024
            assert trims["end"]["count"] >= 1
        assert status["recovery"]["oom"] == {}


def test_field_report_67_restore_into_a_nearly_full_pool_then_prefill(
    model: Path, answers: dict[int, list[int]]
) -> None:
    """Thirty slots want 620 MB of pages where 400 are: restores and long prompts go on, and are exact."""
    texts = [ids(1000 + slot)[:900] for slot in range(30)]
    with start(model, "--memory-limit=8GiB") as daemon:  # room for everything
        effective = daemon.wait_json_of("PROPS", "props")["effective"]["memory"]["effective"]
        held = sum(daemon.wait_json_of("STATUS", "status")["memory"]["live"].values())
        expected = [
            daemon.generate([*text, 7, 8, 9], 16, request_id=f"e{n}")[0] for n, text in enumerate(texts)
        ]
    limit = (8 << 30) - effective + held + (400 << 20)
    with start(model, f"--memory-limit={limit}", "--slots=30", "--host-cache=2GiB") as daemon:
        for slot, text in enumerate(texts):
            daemon.send(f"- 0 ids={','.join(map(str, text))} snap=900:{slot} id=f{slot}")
            assert daemon.wait_done(f"f{slot}").status == "ok"
        for slot in (0, 15, 29):
            produced, done = daemon.generate(ids(6000), 16, request_id=f"long{slot}")
            assert (done.status, produced) == ("length", answers[6000]), done.fields
            listed = ",".join(map(str, [*texts[slot], 7, 8, 9]))
            daemon.send(f"RESTORE {slot} - 16 ids={listed} id=r{slot}")
            said = daemon.answers([f"r{slot}"])[f"r{slot}"]
            assert said == expected[slot], slot
        status = daemon.wait_json_of("STATUS", "status")
        print(limit, status["recovery"], status["memory"], status["host_tier"])
        assert sum(status["recovery"]["oom"].values()) > 0
        assert status["recovery"]["all_cleared"] == 0
        assert daemon.process.poll() is None
