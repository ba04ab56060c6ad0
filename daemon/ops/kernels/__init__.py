"""The CUDA kernels: one .cu file for each op family, compiled by NVRTC and launched through the driver.

``kernel("rows_norm").launch(grid, block, args)``. A file's kernels are called like the file, or like it with
_VARIANT behind; shared device code is in the .cuh files. Nothing here needs a GPU until `kernel` is called.
"""

from __future__ import annotations

from slotd.daemon.ops.kernels.build import Compiled, KernelCompileError, build_all, compile_cubin
from slotd.daemon.ops.kernels.launch import Kernel, KernelLaunchError
from slotd.daemon.ops.kernels.loading import kernel, load_all

__all__ = [
    "Compiled",
    "Kernel",
    "KernelCompileError",
    "KernelLaunchError",
    "build_all",
    "compile_cubin",
    "kernel",
    "load_all",
]
