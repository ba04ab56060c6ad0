"""Compiled kernels on disk: a folder of cubins, each under the hash of all that went into it.

An entry is the BLAKE2b-256 of the cubin and then the cubin, so a torn or damaged one is noticed and compiled
again. Entries appear by rename: readers and writers in other processes never see half of one.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from pathlib import Path

#: Where the cache is, in place of the user's cache folder.
VARIABLE = "SLOTD_KERNEL_CACHE"

_DIGEST = 32

#: Entries that nobody has read for so long belong to sources that are gone.
_UNUSED_SECONDS = 30 * 24 * 3600


def cache_folder() -> Path:
    """SLOTD_KERNEL_CACHE, else `kernels` in SLOTD_HOME or in the user's cache folder."""
    if named := os.environ.get(VARIABLE):
        return Path(named).expanduser()
    if home := os.environ.get("SLOTD_HOME"):
        return Path(home).expanduser() / "kernels"
    import platformdirs  # only here: most calls name the folder

    return platformdirs.user_cache_path("slotd", appauthor=False) / "kernels"


def entry_path(folder: Path, stem: str, arch: str, key: str) -> Path:
    """Where the cubin of a file, an architecture and a hash of its inputs lies."""
    return folder / f"{stem}-{arch}-{key}.cubin"


def load_entry(path: Path) -> bytes | None:
    """The cubin, None when there is none or it is damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, cubin = content[:_DIGEST], content[_DIGEST:]
    if not cubin or hashlib.blake2b(cubin, digest_size=_DIGEST).digest() != digest:
        return None
    try:
        os.utime(path)
    except OSError:  # somebody else's folder: good to read
        pass
    return cubin


def store_entry(path: Path, cubin: bytes) -> bool:
    """Keep a cubin; entries of its folder that are long unused go. False when it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=".new-", dir=path.parent)
    except OSError:
        return False
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.blake2b(cubin, digest_size=_DIGEST).digest())
            file.write(cubin)
        os.replace(temporary, path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        return False
    _drop_unused(path.parent)
    return True


def _drop_unused(folder: Path) -> None:
    oldest = time.time() - _UNUSED_SECONDS
    for pattern in ("*.cubin", ".new-*"):
        for path in folder.glob(pattern):
            try:
                if path.stat().st_mtime < oldest:
                    path.unlink()
            except OSError:  # another process was first
                continue
