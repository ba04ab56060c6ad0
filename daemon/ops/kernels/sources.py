"""The kernel sources in this folder: which there are, what they include, what they ask of the compiler."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent

#: A file that starts with this line is compiled with the features that only its own architecture has (wgmma):
#: sm_90 becomes sm_90a. It guards them by __CUDA_ARCH_FEAT_SM90_ALL and has a generic path beside them.
ARCH_SPECIFIC = "// arch-specific"

#: Architectures with such features, and those of them that this project compiles for.
_HAVE_OWN_FEATURES = frozenset({"sm_90", "sm_100", "sm_103", "sm_120", "sm_121"})

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)
_ARCH = re.compile(r"sm_[1-9]\d{1,2}")


@dataclass(frozen=True, slots=True)
class Source:
    """One .cu file with all that decides about its machine code.

    Attributes:
        path: the file.
        text: its content.
        headers: name in ``#include "NAME"`` -> content, of every header reached from it.
    """

    path: Path
    text: str
    headers: dict[str, str]

    @property
    def stem(self) -> str:
        """The op family; its kernels are called `stem` or `stem`_VARIANT."""
        return self.path.stem

    def target(self, arch: str) -> str:
        """What the compiler is told for the architecture `arch`."""
        wanted = self.text.startswith(ARCH_SPECIFIC) and arch in _HAVE_OWN_FEATURES
        return arch + "a" if wanted else arch


def kernel_files(folder: Path = FOLDER) -> list[Path]:
    """Every .cu file of a folder, by name."""
    return sorted(folder.glob("*.cu"))


def file_of(name: str, folder: Path = FOLDER) -> Path:
    """The .cu file that the kernel `name` is in: the longest stem that the name is or starts with.

    Raises:
        LookupError: no such file.
    """
    fitting = [path for path in kernel_files(folder) if name == path.stem or name.startswith(path.stem + "_")]
    if not fitting:
        raise LookupError(f"kernel {name}: no .cu file has this name or the start of it as its own")
    return max(fitting, key=lambda path: len(path.stem))


def read_source(path: Path) -> Source:
    """A .cu file and the headers beside it that it reaches.

    Raises:
        FileNotFoundError: an included file is not in the folder.
    """
    text = path.read_text(encoding="utf-8")
    headers: dict[str, str] = {}
    reached = _INCLUDE.findall(text)
    while reached:
        name = reached.pop()
        if name in headers:
            continue
        try:
            headers[name] = (path.parent / name).read_text(encoding="utf-8")
        except FileNotFoundError:
            raise FileNotFoundError(f'{path.name}: #include "{name}" is not in {path.parent}') from None
        reached += _INCLUDE.findall(headers[name])
    return Source(path, text, dict(sorted(headers.items())))


def check_arch(arch: str) -> str:
    """`arch` itself.

    Raises:
        ValueError: not of the form sm_90.
    """
    if not _ARCH.fullmatch(arch):
        raise ValueError(f"architecture {arch!r}: expected sm_ and a number, such as sm_90")
    return arch
