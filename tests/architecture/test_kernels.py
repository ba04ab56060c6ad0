"""One name runs through a CUDA kernel: file stem = kernel = wrapper = test.

Names that a macro puts together are checked where they are compiled (test_kernels_compile.py).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.sources import ROOT

BOUNDS = re.compile(r"__launch_bounds__\s*\([^)]*\)")
KERNEL = re.compile(r'extern\s+"C"\s+__global__\s+void\s+(\w+)\s*\(')


def violations(root: Path) -> Iterator[str]:
    """What is wrong with the kernels of a tree: names that do not fit, missing wrappers and tests."""
    kernels = root / "daemon" / "ops" / "kernels"
    modules = (root / "daemon" / "ops").glob("cuda_*.py")
    wrappers = {name for module in modules for name in _functions(module)}
    for path in sorted(kernels.glob("*.cu")):
        stem = path.stem
        text = path.read_text(encoding="utf-8")
        names = KERNEL.findall(BOUNDS.sub("", text))
        if 'extern "C" __global__' not in text:
            yield f'{path.name}: no extern "C" __global__ function'
        for name in names:
            if name != stem and not name.startswith(stem + "_"):
                yield f"{path.name}: kernel {name} is not called {stem} or {stem}_VARIANT"
        if stem not in wrappers:
            yield f"{path.name}: no ops/cuda_*.py has a function {stem}"
        if not (root / "tests" / "gpu" / f"test_{stem}.py").is_file():
            yield f"{path.name}: tests/gpu/test_{stem}.py is not there"


def _functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def write_tree(root: Path, *, kernel: str = "rope", wrapper: str = "rope", test: str = "rope") -> None:
    """A small tree with one kernel file, rope.cu."""
    for folder in ("daemon/ops/kernels", "tests/gpu"):
        (root / folder).mkdir(parents=True)
    source = f'extern "C" __global__ void __launch_bounds__(128)\n{kernel}(float *x, int n) {{}}\n'
    (root / "daemon/ops/kernels/rope.cu").write_text(source)
    (root / "daemon/ops/cuda_ops.py").write_text(f"class CudaOps:\n    def {wrapper}(self) -> None: ...\n")
    (root / f"tests/gpu/test_{test}.py").write_text("")


def test_this_tree() -> None:
    assert (ROOT / "daemon" / "ops").is_dir()
    found = list(violations(ROOT))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("kernel", ["rope", "rope_half"])
def test_a_good_tree_passes(tmp_path: Path, kernel: str) -> None:
    write_tree(tmp_path, kernel=kernel)
    assert list(violations(tmp_path)) == []


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        ({"kernel": "rotate"}, "kernel rotate is not called"),
        ({"wrapper": "rotate"}, "has a function rope"),
        ({"test": "rotate"}, "test_rope.py is not there"),
    ],
)
def test_each_rule_sees_its_offender(tmp_path: Path, broken: dict[str, str], complaint: str) -> None:
    write_tree(tmp_path, **broken)
    assert [complaint in found for found in violations(tmp_path)] == [True]


def test_a_file_without_a_kernel_is_seen(tmp_path: Path) -> None:
    write_tree(tmp_path)
    (tmp_path / "daemon/ops/kernels/rope.cu").write_text("__device__ float half(float x);\n")
    assert [found.split(":")[0] for found in violations(tmp_path)] == ["rope.cu"]
