"""What benchmarks of single kernels share: parts by name, lines that were asked for, a draft tree."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tests.bench.gpu_linear import copy_bandwidth


def draft_tree(n: int) -> list[int]:
    """Parents of n rows: a few long branches, as a draft tree has them."""
    return [-1, *(row - 1 if row % 4 else row // 2 for row in range(1, n))]


class Report:
    """Prints lines that were asked for: those that contain `only`."""

    def __init__(self, only: str) -> None:
        self.only = only
        self.copy = copy_bandwidth()
        print(f"copy {self.copy / 1e9:.0f} GB/s")

    def wanted(self, name: str) -> bool:
        return self.only in name

    def line(self, name: str, us: float, n_bytes: float, flop: float | None = None) -> None:
        rate = n_bytes / us * 1e6
        shown = f"{name:44} {us:10.2f} us {rate / 1e9:8.0f} GB/s {100 * rate / self.copy:5.1f} % of copy"
        print(shown if flop is None else f"{shown} {flop / us / 1e6:8.1f} TFLOP/s", flush=True)


def run_parts(parts: Mapping[str, Callable[[Report], None]], arguments: Sequence[str]) -> None:
    """The parts that the command line names, or all: ``[PART]... [only=TEXT]``."""
    only = next((a.removeprefix("only=") for a in arguments if a.startswith("only=")), "")
    report = Report(only)
    for name, part in parts.items():
        if name in arguments or not any(a in parts for a in arguments):
            part(report)
