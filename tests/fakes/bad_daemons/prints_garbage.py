"""Between its answers: binary, unknown lines, broken lines of the protocol, a line of a megabyte."""

import re
import sys

out = sys.stdout.buffer


def say(data: bytes) -> None:
    out.write(data + b"\n")
    out.flush()


GARBAGE = (
    b"\xff\xfe\x00\x01",
    b"",
    b"UserWarning: something was imported",
    b"[snap] slot=x cur_pos=",
    b"[tok] id=nobody at=0 ids=1",
    b"[done] status=",
    b"[status] {not json",
    b"[from the future] a=1",
    b"z" * (1 << 20),
)

say(b"[daemon] ready")
for line in sys.stdin:
    for piece in GARBAGE:
        say(piece)
    found = re.search(r"id=(\S+)", line)
    id = found[1].encode() if found else b""
    if line.startswith("HELLO"):
        say(b'[hello] {"id":"%s","max_ctx":64}' % id)
    elif line.startswith("LIST_SLOTS"):
        say(b"[snap] slots=2 id=%s" % id)
    elif line.startswith("quit"):
        break
    say(b"[done] id=%s status=ok" % id)
