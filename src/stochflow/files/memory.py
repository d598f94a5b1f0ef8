"""How much memory there is, asked before something large is begun: a refusal with a figure beats a killed process."""

from __future__ import annotations

import os
from pathlib import Path

from stochflow.errors import UserError

GB = 1 << 30


def free_memory() -> int | None:
    """Bytes that can still be had, the limits of control groups and of the process respected; None where nobody says."""
    found = [n for n in (_of_machine(), _of_group(), _of_process()) if n is not None]
    return min(found) if found else None


def need(bytes_: float, what: str, remedy: str, free: int | None = None) -> None:
    """UserError where `what` needs more memory than there is, with both figures and what to change."""
    have = free_memory() if free is None else free
    if have is not None and bytes_ > have:
        raise UserError(f"{what} needs about {amount(bytes_)} of memory, but {amount(have)} are free: {remedy}")


def amount(bytes_: float) -> str:
    """`"1.5 GB"`."""
    return f"{bytes_ / GB:.3g} GB" if bytes_ < 1e6 * GB else "more than a million GB"


def _of_machine() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
        return None
    except (OSError, ValueError, IndexError):
        try:
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (OSError, ValueError, AttributeError):
            return None


def _of_group(root: str = "/sys/fs/cgroup", own: str = "/proc/self/cgroup") -> int | None:
    """What the control groups above this process leave: version 2, then version 1."""
    found = []
    try:
        lines = Path(own).read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers not in ("", "memory") and "memory" not in controllers.split(","):
            continue
        base = Path(root) if controllers == "" else Path(root) / "memory"
        names = (
            ("memory.max", "memory.current")
            if controllers == ""
            else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        )
        here = base / path.lstrip("/")
        for folder in (here, *here.parents):
            if folder == base.parent:
                break
            limit, used = (_number(folder / name) for name in names)
            if limit is not None and limit < 1 << 60:
                found.append(max(0, limit - (used or 0) + _cache(folder)))
    return min(found) if found else None


def _cache(folder: Path) -> int:
    """Pages that the system gives back when they are wanted: of files, read lately or not, and of its own tables."""
    try:
        words = (folder / "memory.stat").read_text().split()
        found = dict(zip(words[::2], map(int, words[1::2]), strict=False))
    except (OSError, ValueError):
        return 0
    whole = "total_" if "total_inactive_file" in found else ""  # version 1: with the groups below
    return sum(found.get(whole + name, 0) for name in ("inactive_file", "active_file")) + found.get(
        "slab_reclaimable", 0
    )


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _of_process() -> int | None:
    """What `ulimit -v` leaves."""
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit in (resource.RLIM_INFINITY, -1):
            return None
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        return max(0, limit - used)
    except (ImportError, OSError, ValueError, IndexError):
        return None
