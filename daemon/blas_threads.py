"""How many threads the BLAS under NumPy may use. Import this before NumPy: it is read at load time."""

from __future__ import annotations

import os
from pathlib import Path

#: Read by OpenBLAS, MKL and OpenMP builds of NumPy.
VARIABLES = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")


def usable_cores(cpu_max: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Cores this process may really use: its affinity, cut to the quota of its control group.

    More threads than that only wait for each other, which costs a matrix product a multiple of its time.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = cpu_max.read_text().split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass  # no control group, or another version of them
    return cores


#: An idle thread of OpenBLAS spins for 2^N cycles before it sleeps. The default of 2^26 takes the cores of a
#: busy machine from the very threads it waits for; 2^20 covers the gaps between two products of a step, so
#: that no thread has to be woken for each (2^4 would double the time of a step on an idle machine).
SPIN_VARIABLE, SPIN = "OPENBLAS_THREAD_TIMEOUT", "20"

_chosen_here = False


def limit_blas_threads() -> None:
    """Set the thread count for every BLAS, unless the user has set one."""
    global _chosen_here
    if not any(name in os.environ for name in VARIABLES):
        _chosen_here = True
        for name in VARIABLES:
            os.environ[name] = str(usable_cores())
        os.environ.setdefault(SPIN_VARIABLE, SPIN)


def chosen_by_user() -> bool:
    """Whether the thread count came from outside, and is to stay what it is."""
    return not _chosen_here


def environment() -> dict[str, str]:
    """This process's environment without what was set here: another process chooses for itself."""
    set_here = (*VARIABLES, SPIN_VARIABLE) if _chosen_here else ()
    return {name: value for name, value in os.environ.items() if name not in set_here}
