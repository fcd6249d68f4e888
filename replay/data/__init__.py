"""Resources that travel with the package: SYCL sources, captures, bench files (links to the top-level folders)."""

from pathlib import Path


def path(*parts: str) -> Path:
    """The path of a shipped resource, ``path("sycl", "shim.cpp")``; the package is always unpacked on disk."""
    return Path(__file__).resolve().parent.joinpath(*parts)
