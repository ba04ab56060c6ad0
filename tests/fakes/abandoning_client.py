"""A client that starts a daemon, has it answer, and waits to be killed: `MODEL LINE stream|lines|nothing`.

It reads one value of the token stream, one line, or nothing, then prints the daemon's process id.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time


def main(model: str, line: str, reads: str) -> None:
    read, write = os.pipe()
    daemon = subprocess.Popen(
        [sys.executable, "-m", "slotd.daemon", "daemon", model, "--max-ctx=100000", f"--stream-fd={write}"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(write,),
    )  # fmt: skip
    os.close(write)
    assert daemon.stdin is not None
    assert daemon.stdout is not None
    assert daemon.stdout.readline() == b"[daemon] ready\n"
    daemon.stdin.write(line.encode() + b"\n")
    daemon.stdin.flush()
    if reads == "stream":
        os.read(read, 4)
    elif reads == "lines":
        daemon.stdout.readline()
    else:
        time.sleep(0.3)  # long enough for its pipes to be full
    print(daemon.pid, flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main(*sys.argv[1:])
