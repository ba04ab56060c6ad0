"""Answers HELLO and LIST_SLOTS; a prompt gets two tokens, and then the process kills itself."""

import os
import re
import signal
import sys


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


say("[daemon] ready")
for line in sys.stdin:
    verb = line.split()[0]
    id = re.search(r"id=(\S+)", line)
    name = id[1] if id else ""
    if verb == "HELLO":
        say(f'[hello] {{"id":"{name}","max_ctx":64,"epoch":0,"boot":"{os.getpid()}"}}')
        say(f"[done] id={name} status=ok")
    elif verb == "LIST_SLOTS":
        say(f"[snap] slots= id={name}")
        say(f"[done] id={name} status=ok")
    elif verb == "-":
        say(f"[prefill] id={name} at=2/2")
        say(f"[tok] id={name} at=0 ids=5,6")
        print("cannot go on", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    elif verb == "quit":
        break
