"""What a client sees of a model with recurrent layers: one story, told to a daemon on any device.

The answers that count as right are those of requests that started from nothing, which the daemon says
(`reused=0`). Everything is cut at multiples of 64 tokens, where both backends have the same bits either way.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np

from tests.fakes.daemon_process import DaemonProcess

N_GEN = 12


class Story:
    """A text, and the ways to ask for what follows its beginnings.

    Args:
        model: path of a GGUF with recurrent layers.
        folder: for `--slot-dir`.
        flags: of the daemon: device, exactness, K/V types.
        n_vocab: of the model.
    """

    def __init__(self, model: Path, folder: Path, *flags: str, n_vocab: int) -> None:
        self._model = model
        self._flags = (*flags, f"--slot-dir={folder}", "--max-ctx=512", "--host-cache=256MiB")
        self.text = np.random.default_rng(17).integers(3, n_vocab - 20, 400).tolist()
        self.branch = [*self.text[:192], 7, 8, 9]
        self._names = (
            f"r{number}" for number in itertools.count()
        )  # an id's last sequence is kept, no other

    def start(self, *more: str) -> DaemonProcess:
        return DaemonProcess(self._model, *self._flags, *more)

    def ask(
        self, daemon: DaemonProcess, ids: list[int], fields: str = "", slot: int | None = None
    ) -> tuple[list[int], int]:
        """(what follows, prompt tokens that were not computed)."""
        options = f"ignore_eos=1 {fields}".rstrip()
        produced, done = daemon.generate(ids, N_GEN, options, next(self._names), slot=slot)
        assert done.status == "length", (done, daemon.stderr[-2000:])
        assert len(produced) == N_GEN
        return produced, int(done.fields["reused"])

    def forget(self, daemon: DaemonProcess) -> None:
        """Displace the ended sequences: what comes next starts from a slot or from nothing."""
        for number in range(16):
            daemon.generate([number + 3, 7], 0, request_id=next(self._names))


def tell(story: Story) -> None:
    """Field reports 18, 24, 25 and 34, and what cannot be had.

    Raises:
        AssertionError: naming the answers that differ.
    """
    text, branch = story.text, story.branch
    with story.start("--checkpoint-every=0") as daemon:
        whole = story.ask(daemon, text)
        assert whole[1] == 0
        assert [story.ask(daemon, text) for _ in range(2)] == [whole] * 2  # 34
        fresh = story.ask(daemon, branch)
        assert fresh[1] == 0, "a shorter shared prefix has no state"  # 25
        longer = [*text, *whole[0], 5, 6]
        resumed = story.ask(daemon, longer)
        assert resumed[1] == len(text) + N_GEN - 1, resumed

        story.ask(daemon, text, "snap=192:1")
        story.ask(daemon, text, "snap=192:2 tier=host")
        story.ask(daemon, text, "snap=192:3 tier=disk")
        (name,) = (file["hash"] for file in daemon.wait_json_of("STORED", "stored")["files"])
        story.forget(daemon)
        found = {}
        for slot in (1, 2, 3):  # 24: a convolution whose past is zeros shows in the first token
            found[slot] = story.ask(daemon, branch, slot=slot)
            story.forget(daemon)
        assert found == dict.fromkeys((1, 2, 3), (fresh[0], 192))
        refused = {
            "SNAPSHOT_THIN": "SNAPSHOT_THIN 4 0 64",
            "RESTORE_CHAIN": f"RESTORE_CHAIN -1 - - 2 ids={','.join(map(str, branch))}",
        }
        for verb, line in refused.items():
            daemon.send(f"{line} id=no")
            fields = daemon.wait_done("no").fields
            assert (fields["code"], fields["verb"], fields["arch"]) == ("unsupported", verb, "qwen35")

    with story.start("--checkpoint-every=128") as daemon:  # 18
        assert story.ask(daemon, longer) == (resumed[0], 0)
        daemon.send(f"LOAD_SNAPSHOT 5 hash={name}")
        daemon.wait_line("[snap] loaded slot=5 cur_pos=192")
        assert story.ask(daemon, branch, slot=5) == (fresh[0], 192)
        story.forget(daemon)
        assert story.ask(daemon, text)[1] == 0
        other = [*text[:300], 7, 8, 9]
        again = story.ask(daemon, other)
        assert again[1] == 256, "the last checkpoint in front of 300"
        story.forget(daemon)
        assert story.ask(daemon, other) == (again[0], 0)
