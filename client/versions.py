"""Versions of what matters, read from package metadata so that nothing has to be imported."""

from __future__ import annotations

from importlib import metadata

_CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy-cuda11x", "cupy-rocm-7-0", "cupy-rocm-5-0", "cupy")


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cupy_version() -> str | None:
    """Version of the CuPy that is installed, under whichever of its package names."""
    return next((found for name in _CUPY if (found := version_of(name)) is not None), None)
