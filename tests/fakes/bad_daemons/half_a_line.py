"""Becomes ready, prints half of a line, and ends."""

import re
import sys

print("[daemon] ready", flush=True)
for line in sys.stdin:
    id = re.search(r"id=(\S+)", line)
    if line.startswith("HELLO") and id:
        print(f'[hello] {{"id":"{id[1]}","max_ctx":64}}\n[done] id={id[1]} status=ok', flush=True)
    else:
        sys.stdout.write(f"[snap] slots=0,1 id={id[1] if id else ''}")
        sys.stdout.flush()
        sys.exit(1)
