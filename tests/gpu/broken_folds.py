"""Kernels whose order of sums depends on the launch, made of the sources by one replacement each.

With them the tests of equal bits have to fail: test_fold_order.py. Nothing here needs a GPU.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from slotd.daemon.ops.kernels import loading
from slotd.daemon.ops.kernels.sources import FOLDER, file_of


@dataclass(frozen=True, slots=True)
class BrokenFold:
    """One change of one kernel file.

    Attributes:
        file: its name.
        replacements: text that stands in it once -> what stands there instead.
        left_out: lines of entry points that are not compiled, as a pattern: it is quicker.
        entries: the file with these lines, where it is another one.
    """

    file: str
    replacements: dict[str, str]
    left_out: str
    entries: str = ""

    def texts(self) -> dict[str, str]:
        """The broken sources. Raises ValueError when a source has changed and the break no longer fits."""
        entries = self.entries or self.file
        texts = {file: (FOLDER / file).read_text(encoding="utf-8") for file in (self.file, entries)}
        for old, new in self.replacements.items():
            count = texts[self.file].count(old)
            if count != 1:
                raise ValueError(f"{self.file}: {old!r} is there {count} times, not once")
            texts[self.file] = texts[self.file].replace(old, new)
        texts[entries], n = re.subn(self.left_out, "", texts[entries], flags=re.MULTILINE)
        if not n:
            raise ValueError(f"{entries}: no line is {self.left_out!r}")
        return texts


_OTHER_FORMATS = r"^ENTRIES\((?!u4_h32).*\n"
_OTHER_HEADS = r'^extern "C" .*\battention_(\w+_128|\w+_any_64)\(.*\n'

#: The order is the right one for a lone row, and the reverse for a row among others (that of segments: among
#: more than eight, for which there is another kernel).
BROKEN_FOLDS = {
    "segments": BrokenFold(
        "linear.cu",
        {"(from + i * OF_ONE)": "(from + (count - 1 - i) * OF_ONE)"},
        _OTHER_FORMATS,
    ),
    "splits": BrokenFold(
        "attention_step.cuh",
        {
            "sum = __fmaf_rn(weights[i].x, sums[i][lane], sum);": (
                "const int at = gridDim.z == 1 ? i : n - 1 - i;\n"
                "sum = __fmaf_rn(weights[at].x, sums[at][lane], sum);"
            ),
            "l = __fmaf_rn(weights[i].x, weights[i].y, l);": (
                "l = __fmaf_rn(weights[at].x, weights[at].y, l);"
            ),
        },
        _OTHER_HEADS,
        "attention.cu",
    ),
    "tiles": BrokenFold(
        "attention_step.cuh",
        {
            "x[i] = __ldcg(part_sums + (first + i) * stride);": (
                "const int at = first + (gridDim.z == 1 ? i : count - 1 - i);\n"
                "x[i] = __ldcg(part_sums + at * stride);"
            ),
            "w[i] = __ldcg(part_weights + static_cast<u64>(first + i) * heads.n_head);": (
                "w[i] = __ldcg(part_weights + static_cast<u64>(at) * heads.n_head);"
            ),
        },
        _OTHER_HEADS,
        "attention.cu",
    ),
}


def copy_sources(folder: Path, broken: BrokenFold | None) -> None:
    """All kernel sources into a folder, one of them broken."""
    for source in (*FOLDER.glob("*.cu"), *FOLDER.glob("*.cuh")):
        shutil.copy(source, folder)
    if broken is not None:
        for file, text in broken.texts().items():
            (folder / file).write_text(text, encoding="utf-8")


@contextmanager
def kernels_of(folder: Path) -> Iterator[None]:
    """Kernels that are asked for inside come from the sources in `folder`."""
    before = loading._kernels, loading._modules, loading.file_of
    loading._kernels, loading._modules = {}, {}
    loading.file_of = lambda name: file_of(name, folder)
    try:
        yield
    finally:
        loading._kernels, loading._modules, loading.file_of = before
