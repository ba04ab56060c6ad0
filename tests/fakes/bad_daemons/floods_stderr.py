"""Writes 8 MiB to stderr, more than any pipe holds, half of it without a newline, before it is ready."""

import re
import sys

for number in range(40_000):
    sys.stderr.write(f"noise {number} {'x' * 90}\n")
sys.stderr.write("y" * (4 << 20))
sys.stderr.write("\nlast words\n")
sys.stderr.flush()
print("[daemon] ready", flush=True)
for line in sys.stdin:
    id = re.search(r"id=(\S+)", line)
    if line.startswith("HELLO") and id:
        print(f'[hello] {{"id":"{id[1]}","max_ctx":64}}\n[done] id={id[1]} status=ok', flush=True)
    elif line.startswith("quit"):
        break
