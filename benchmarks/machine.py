"""The facts a number depends on: processor, memory, storage, versions.

Not here: anything that is measured.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("holdfast", "torch", "numpy", "numba", "fsspec", "xxhash", "safetensors")


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a run took place."""

    processor: str
    cores: int
    memory_gb: float
    system: str
    storage: str
    versions: tuple[tuple[str, str], ...]

    def lines(self) -> list[tuple[str, str]]:
        """Name and value of every fact, for people."""
        packages = ", ".join(f"{name} {version}" for name, version in self.versions)
        return [
            ("processor", f"{self.processor}, {self.cores} cores"),
            ("memory", f"{self.memory_gb:.0f} GiB"),
            ("storage", self.storage),
            ("system", self.system),
            ("versions", packages),
        ]


def describe_machine(folder: Path) -> Machine:
    """The facts of this machine and of the file system that ``folder`` lies on."""
    versions = [("python", platform.python_version())]
    for name in PACKAGES:
        try:
            versions.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            continue
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Machine(
        processor=_processor(),
        cores=os.cpu_count() or 1,
        memory_gb=memory / 2**30,
        system=f"{platform.system()} {platform.release()}",
        storage=_storage(folder),
        versions=tuple(versions),
    )


def _processor() -> str:
    for line in _lines(Path("/proc/cpuinfo")):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _storage(folder: Path) -> str:
    mounts = [tuple(line.split()[:3]) for line in _lines(Path("/proc/mounts"))]
    kind, device = file_system(folder.resolve(), [m for m in mounts if len(m) == 3])
    name = Path(device).name
    is_rotating = any(line == "1" for line in _lines(Path(f"/sys/block/{name}/queue/rotational")))
    extra = ", reported as rotating" if is_rotating else ""
    return f"{kind}{extra}"


def file_system(folder: Path, mounts: Iterable[tuple[str, ...]]) -> tuple[str, str]:
    """The kind and the device of the innermost mount that holds a folder.

    >>> mounts = [("/dev/a", "/", "ext4"), ("tmpfs", "/tmp", "tmpfs")]
    >>> file_system(Path("/tmp/x"), mounts), file_system(Path("/home"), mounts)
    (('tmpfs', 'tmpfs'), ('ext4', '/dev/a'))
    """
    found = ("unknown", "an unknown device")
    depth = -1
    for device, point, kind in mounts:
        parts = len(Path(point).parts)
        if folder.is_relative_to(point) and parts > depth:
            found, depth = (kind, device), parts
    return found


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
