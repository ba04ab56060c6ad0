"""Becomes ready, answers HELLO, and then neither reads nor says anything, but lives on."""

import re
import sys
import time

print("[daemon] ready", flush=True)
id = re.search(r"id=(\S+)", sys.stdin.readline())
assert id is not None
print(f'[hello] {{"id":"{id[1]}","max_ctx":1000000}}\n[done] id={id[1]} status=ok', flush=True)
time.sleep(600)
