"""Compile every kernel, without a GPU: ``python -m slotd.daemon.ops.kernels --arch sm_80 sm_90 [-v]``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from slotd.daemon.ops.kernels.build import KernelCompileError, build_all
from slotd.daemon.ops.kernels.sources import check_arch


def main() -> int:
    """0 when everything compiles, 1 when something does not; 2 for a wrong argument."""
    parser = argparse.ArgumentParser(prog="python -m slotd.daemon.ops.kernels", description=__doc__)
    parser.add_argument("--arch", nargs="+", default=["sm_80", "sm_90"], metavar="sm_XX")
    parser.add_argument("--cache", type=Path, help="folder of compiled kernels [default: the user's cache]")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="compile all anew, show registers, stack and spills"
    )
    chosen = parser.parse_args()
    try:
        for arch in chosen.arch:
            check_arch(arch)
    except ValueError as error:
        parser.error(str(error))
    try:
        compiled = build_all(chosen.arch, chosen.cache, report=chosen.verbose)
    except KernelCompileError as error:
        print(error, file=sys.stderr)
        return 1
    for one in compiled:
        how = "from the cache" if one.cached else f"{one.seconds:6.1f} s"
        print(f"{one.path.name:<28} {one.arch:<7} {len(one.cubin):>9} bytes  {how}", file=sys.stderr)
        if one.log:
            print(one.log, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
