"""Compiling .cu files and keeping the results: a small kernel in a folder of the test."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slotd.daemon.ops.kernels import build
from slotd.daemon.ops.kernels.build import KernelCompileError, build_all, compile_cubin
from slotd.daemon.ops.kernels.cubin_cache import cache_folder, load_entry, store_entry
from slotd.daemon.ops.kernels.sources import file_of, kernel_files, read_source

SOURCE = """#include <cuda_fp16.h>
#include "probe.cuh"
extern "C" __global__ void probe(float *y, const half *x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = __half2float(x[i]) + SHIFT;
}
"""


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "probe.cu").write_text(SOURCE)
    (folder / "probe.cuh").write_text('#include "shift.cuh"\n')
    (folder / "shift.cuh").write_text("#define SHIFT 1.0f\n")
    return folder


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by the architecture of each file that is really compiled."""
    real, seen = build._compile, []  # type: ignore[var-annotated]

    def counting(source, arch, more):  # type: ignore[no-untyped-def]  # noqa: ANN202
        seen.append(arch)
        return real(source, arch, more)

    monkeypatch.setattr(build, "_compile", counting)
    return seen


def test_a_cubin_comes_from_the_disk_the_second_time(
    sources: Path, tmp_path: Path, compiles: list[str]
) -> None:
    first = compile_cubin(sources / "probe.cu", "sm_90", tmp_path / "cache")
    again = compile_cubin(sources / "probe.cu", "sm_90", tmp_path / "cache")
    assert first == again
    assert first.startswith(b"\x7fELF")
    assert b".text.probe\0" in first
    assert compiles == ["sm_90"]


@pytest.mark.parametrize("name", ["probe.cu", "probe.cuh", "shift.cuh"])
def test_any_changed_file_is_compiled_again(
    sources: Path, tmp_path: Path, compiles: list[str], name: str
) -> None:
    compile_cubin(sources / "probe.cu", "sm_90", tmp_path / "cache")
    (sources / name).write_text((sources / name).read_text() + "// changed\n")
    compile_cubin(sources / "probe.cu", "sm_90", tmp_path / "cache")
    assert compiles == ["sm_90", "sm_90"]


def test_architecture_and_flags_are_in_the_key(
    sources: Path, tmp_path: Path, compiles: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for arch in ("sm_80", "sm_90"):
        compile_cubin(sources / "probe.cu", arch, tmp_path / "cache")
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-lineinfo"))
    compile_cubin(sources / "probe.cu", "sm_90", tmp_path / "cache")
    assert compiles == ["sm_80", "sm_90", "sm_90"]


@pytest.mark.parametrize("damage", ["torn", "empty", "changed"])
def test_a_damaged_entry_is_compiled_again(
    sources: Path, tmp_path: Path, compiles: list[str], damage: str
) -> None:
    cache = tmp_path / "cache"
    good = compile_cubin(sources / "probe.cu", "sm_90", cache)
    (entry,) = cache.glob("*.cubin")
    content = bytearray(entry.read_bytes())
    content[len(content) // 2] ^= 1
    entry.write_bytes({"torn": content[:500], "empty": b"", "changed": content}[damage])
    assert compile_cubin(sources / "probe.cu", "sm_90", cache) == good
    assert len(compiles) == 2
    assert compile_cubin(sources / "probe.cu", "sm_90", cache) == good
    assert len(compiles) == 2


def test_the_same_source_gives_the_same_bytes(sources: Path, tmp_path: Path) -> None:
    """Also with another folder and another process beside it: nothing of the machine gets in."""
    kernels = (SOURCE.split("extern")[1].replace("probe(", f"probe_{i}(") for i in range(20))
    (sources / "probe.cu").write_text(SOURCE + "".join(f"extern {text}" for text in kernels))
    first, again = (compile_cubin(sources / "probe.cu", "sm_90", tmp_path / name) for name in "ab")
    assert first == again


def test_a_folder_that_cannot_be_written_only_costs_time(sources: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    assert compile_cubin(sources / "probe.cu", "sm_90", tmp_path / "file" / "cache").startswith(b"\x7fELF")


def test_long_unused_entries_go(tmp_path: Path) -> None:
    for name, age in (("old", 40), ("new", 10), ("read", 40)):
        store_entry(tmp_path / f"{name}.cubin", b"code")
        then = time.time() - age * 24 * 3600
        os.utime(tmp_path / f"{name}.cubin", (then, then))
    assert load_entry(tmp_path / "read.cubin") == b"code"
    store_entry(tmp_path / "another.cubin", b"code")
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["another", "new", "read"]


def test_all_files_for_all_architectures(sources: Path, tmp_path: Path) -> None:
    (sources / "second.cu").write_text(SOURCE.replace("probe(", "second("))
    compiled = build_all(["sm_80", "sm_90"], tmp_path / "cache", sources, report=True)
    assert [(one.path.stem, one.arch) for one in compiled] == [
        *(("probe", "sm_80"), ("probe", "sm_90")),
        *(("second", "sm_80"), ("second", "sm_90")),
    ]
    assert all("registers" in one.log for one in compiled)


def test_a_complaint_names_file_line_and_target(sources: Path, tmp_path: Path) -> None:
    (sources / "shift.cuh").write_text("#define SHIFT nothing\n")
    with pytest.raises(KernelCompileError, match=r"(?s)probe\.cu for sm_80.*probe\.cu\(5\).*nothing"):
        build_all(["sm_80"], tmp_path / "cache", sources)


def test_every_bad_file_is_named_and_the_good_ones_are_kept(
    sources: Path, tmp_path: Path, compiles: list[str]
) -> None:
    (sources / "first.cu").write_text("first nonsense\n")
    (sources / "second.cu").write_text('#include "nowhere.cuh"\n')
    with pytest.raises(KernelCompileError, match=r"(?s)first\.cu for sm_80.*second\.cu: #include .nowhere"):
        build_all(["sm_80"], tmp_path / "cache", sources)
    compiles.clear()
    compile_cubin(sources / "probe.cu", "sm_80", tmp_path / "cache")
    assert compiles == []


def test_a_missing_header_is_named(sources: Path) -> None:
    (sources / "shift.cuh").unlink()
    with pytest.raises(FileNotFoundError, match=r'probe\.cu: #include "shift\.cuh"'):
        read_source(sources / "probe.cu")


@pytest.mark.parametrize("arch", ["90", "sm_9", "sm_90a", "compute_90", ""])
def test_a_malformed_architecture_is_refused(sources: Path, tmp_path: Path, arch: str) -> None:
    with pytest.raises(ValueError, match="expected sm_"):
        compile_cubin(sources / "probe.cu", arch, tmp_path)


def test_a_file_can_ask_for_what_only_its_architecture_has(sources: Path, tmp_path: Path) -> None:
    path = sources / "probe.cu"
    path.write_text(
        "// arch-specific\n#ifdef __CUDA_ARCH_FEAT_SM90_ALL\n#define NAME probe_own\n#else\n"
        '#define NAME probe_generic\n#endif\nextern "C" __global__ void NAME() {}\n'
    )
    assert b"probe_own" in compile_cubin(path, "sm_90", tmp_path / "cache")
    assert b"probe_generic" in compile_cubin(path, "sm_80", tmp_path / "cache")


def test_the_longest_name_wins(tmp_path: Path) -> None:
    for stem in ("attention", "attention_prompt"):
        (tmp_path / f"{stem}.cu").write_text("")
    assert file_of("attention_d64", tmp_path).stem == "attention"
    assert file_of("attention", tmp_path).stem == "attention"
    assert file_of("attention_prompt_d64", tmp_path).stem == "attention_prompt"
    with pytest.raises(LookupError, match="kernel attentive"):
        file_of("attentive", tmp_path)


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "slotd" / "kernels"
    monkeypatch.setenv("SLOTD_HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / "kernels"
    monkeypatch.setenv("SLOTD_KERNEL_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"


@pytest.mark.timeout(600)  # minutes, when nothing is on disk yet
def test_the_command_compiles_without_a_gpu() -> None:
    """Into the user's cache, as the test of all kernels does: one of the two finds the other's work."""
    command = [sys.executable, "-m", "slotd.daemon.ops.kernels", "--arch"]
    done = subprocess.run([*command, "sm_90"], capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stderr.splitlines()) == len(kernel_files())
    refused = subprocess.run([*command, "90"], capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 2
    assert "expected sm_ and a number" in refused.stderr
