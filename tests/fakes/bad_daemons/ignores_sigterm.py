"""Ignores SIGTERM, quit and the end of its input; a child of its own does the same."""

import re
import signal
import subprocess
import sys
import time

signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(
    [sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"]
)
print(f"child {child.pid}", file=sys.stderr, flush=True)
print("[daemon] ready", flush=True)
for line in sys.stdin:
    id = re.search(r"id=(\S+)", line)
    if line.startswith("HELLO") and id:
        print(f'[hello] {{"id":"{id[1]}","max_ctx":64}}\n[done] id={id[1]} status=ok', flush=True)
time.sleep(600)
