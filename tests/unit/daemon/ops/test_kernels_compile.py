"""Every CUDA kernel compiles, without a GPU, for the oldest architecture and for Hopper.

The results are kept on disk, so that only changed files cost time the next time.
"""

from __future__ import annotations

import re

import pytest

from slotd.daemon.ops.kernels import build_all
from slotd.daemon.ops.kernels.build import Compiled
from slotd.daemon.ops.kernels.sources import file_of, kernel_files

pytestmark = pytest.mark.timeout(600)  # two cores take minutes when nothing is on disk yet

ARCHS = ("sm_80", "sm_90")

#: The section of an ELF file that holds the code of one kernel.
CODE = re.compile(rb"\0\.text\.(\w+)(?=\0)")


@pytest.fixture(scope="module")
def compiled() -> list[Compiled]:
    return build_all(ARCHS)


def entry_points(cubin: bytes) -> set[str]:
    """Names of the kernels in machine code."""
    return {name.decode() for name in CODE.findall(cubin)}


def test_every_file_compiles_for_both(compiled: list[Compiled]) -> None:
    assert {(one.path, one.arch) for one in compiled} == {
        (path, arch) for path in kernel_files() for arch in ARCHS
    }
    assert compiled


def test_every_kernel_is_found_by_its_name(compiled: list[Compiled]) -> None:
    """What macros and templates made counts, not what a search in the source sees."""
    for one in compiled:
        names = entry_points(one.cubin)
        assert names, one.path.name
        assert {name: file_of(name) for name in names} == dict.fromkeys(names, one.path)


def test_both_architectures_have_the_same_kernels(compiled: list[Compiled]) -> None:
    names = {(one.path, one.arch): entry_points(one.cubin) for one in compiled}
    for path in kernel_files():
        assert names[path, ARCHS[0]] == names[path, ARCHS[1]]
