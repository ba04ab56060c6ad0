"""From .cu files to machine code: NVRTC through CuPy's bindings, no GPU needed, results kept on disk."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from slotd.daemon.ops.kernels.cubin_cache import cache_folder, entry_path, load_entry, store_entry
from slotd.daemon.ops.kernels.sources import FOLDER, Source, check_arch, kernel_files, read_source

#: Options of every file. Subnormals are kept and divisions are exact (NVRTC's defaults), as in NumPy.
FLAGS = ("-std=c++17",)

#: Headers of the toolkit whose content is part of the key: kernels inline what is in them.
_TOOLKIT_HEADERS = ("cuda_fp16.h", "cuda_fp16.hpp", "cuda_bf16.h", "cuda_bf16.hpp")


class KernelCompileError(RuntimeError):
    """A .cu file that does not compile, or no compiler. Names the file and has the compiler's words."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """One file for one architecture.

    Attributes:
        path, arch: what was asked for.
        cubin: the machine code.
        seconds: how long it took.
        cached: whether it came from the disk.
        log: what the compiler said; empty when cached.
    """

    path: Path
    arch: str
    cubin: bytes
    seconds: float
    cached: bool
    log: str


def compile_cubin(path: Path, arch: str, folder: Path | None = None) -> bytes:
    """Machine code of one .cu file for an architecture such as sm_90; from the cache where it is there.

    folder: the cache; default: the user's.

    Raises:
        KernelCompileError: it does not compile, or NVRTC is not installed.
        FileNotFoundError: an included header is not beside the file.
        ValueError: a malformed architecture.
    """
    return build(path, arch, folder).cubin


def build(path: Path, arch: str, folder: Path | None = None, report: bool = False) -> Compiled:
    """As compile_cubin, with time and log. report: compile in any case and log each kernel's registers."""
    began = time.perf_counter()
    source = read_source(path)
    entry = entry_path(folder or cache_folder(), source.stem, check_arch(arch), _key(source, arch))
    if not report and (cubin := load_entry(entry)) is not None:
        return Compiled(path, arch, cubin, time.perf_counter() - began, True, "")
    cubin, log = _compile(source, arch, ("--ptxas-options=-v",) if report else ())
    store_entry(entry, cubin)
    return Compiled(path, arch, cubin, time.perf_counter() - began, False, log)


def build_all(
    archs: Iterable[str], folder: Path | None = None, sources: Path = FOLDER, report: bool = False
) -> list[Compiled]:
    """Every .cu file for each architecture, on all cores (NVRTC lets go of the GIL and runs in parallel).

    Raises:
        KernelCompileError: the complaints about all files that do not compile; the others are kept.
    """
    jobs = [(path, arch) for path in kernel_files(sources) for arch in archs]
    compiler_version()  # its absence is one complaint, not one for each file
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        started = [pool.submit(build, path, arch, folder, report) for path, arch in jobs]
    complaints = [str(future.exception()) for future in started if future.exception()]
    if complaints:
        raise KernelCompileError("\n\n".join(complaints))
    return [future.result() for future in started]


@cache
def compiler_version() -> tuple[int, int]:
    """Version of NVRTC.

    Raises:
        KernelCompileError: it is not installed.
    """
    try:
        from cupy_backends.cuda.libs import nvrtc

        major, minor = nvrtc.getVersion()
    except (ImportError, RuntimeError, OSError) as error:
        raise KernelCompileError(
            f"the CUDA kernels need CuPy and NVRTC: install slotd with its extra cuda13 or cuda12 ({error})"
        ) from None
    return int(major), int(minor)


@cache
def include_folders() -> tuple[Path, ...]:
    """Where cuda_fp16.h lies: the toolkit that CuPy finds, and the C++ headers that CuPy ships."""
    import cupy

    shipped = Path(cupy.__file__).parent / "_core" / "include" / "cupy" / "_cccl" / "libcudacxx"
    found = cupy.cuda.get_cuda_path()
    folders = [Path(found) / "include"] if found else []
    return tuple(folder for folder in (*folders, shipped) if folder.is_dir())


@cache
def _toolkit_digest() -> bytes:
    digest = hashlib.blake2b(repr(compiler_version()).encode(), digest_size=16)
    for name in _TOOLKIT_HEADERS:
        for folder in include_folders():
            if (folder / name).is_file():
                digest.update((folder / name).read_bytes())
                break
    return digest.digest()


def _key(source: Source, arch: str) -> str:
    """Hash of everything that decides about the machine code."""
    digest = hashlib.blake2b(_toolkit_digest(), digest_size=16)
    for part in (
        *FLAGS,
        source.target(arch),
        source.text,
        *(x for item in source.headers.items() for x in item),
    ):
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def _compile(source: Source, arch: str, more: tuple[str, ...]) -> tuple[bytes, str]:
    compiler_version()
    from cupy_backends.cuda.libs import nvrtc

    options = (
        *FLAGS,
        f"-arch={source.target(arch)}",
        *(f"-I{folder}" for folder in include_folders()),
        *more,
    )
    names = tuple(name.encode() for name in source.headers)
    texts = tuple(text.encode() for text in source.headers.values())
    program = nvrtc.createProgram(source.text, source.path.name, texts, names)
    try:
        try:
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program).strip("\0\n")
            raise KernelCompileError(f"{source.path.name} for {arch}: {error}\n{log}") from None
        return bytes(nvrtc.getCUBIN(program)), str(nvrtc.getProgramLog(program)).strip("\0\n")
    finally:
        nvrtc.destroyProgram(program)
