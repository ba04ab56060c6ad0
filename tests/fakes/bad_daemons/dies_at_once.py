"""Says why on stderr and ends with the exit code of an unusable model."""

import sys

print("tensor blk.0.attn_q.weight is missing", file=sys.stderr)
sys.exit(3)
