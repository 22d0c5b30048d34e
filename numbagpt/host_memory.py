"""How much main memory can still be had, where a container allows less than the machine has.

A container's limit is that of a control group of Linux, or of one above it. The groups appear as
folders; version 2 and version 1 of them, which may both be there, name their files differently.
"""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def free_memory(root: Path = Path("/")) -> int | None:
    """Bytes that can still be had, or None where that is not known.

    root  folder in which proc and sys are looked for
    """
    try:
        machine = _numbers(root / "proc/meminfo")["MemAvailable:"] * 1024
    except (OSError, KeyError):
        return None
    return max(0, min([machine, *_left_by_groups(root)]))


def _left_by_groups(root: Path) -> Iterator[int]:
    """Bytes that each limit on this process, or on what it is part of, leaves it."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        # In a container the path may be one that only the host sees: its group then is the top one.
        group = PurePosixPath(path.lstrip("/"))
        for part in (group, *group.parents):
            if not controllers:
                yield from _left(root / "sys/fs/cgroup" / part, "memory.max", "memory.current")
            elif "memory" in controllers.split(","):
                folder = root / "sys/fs/cgroup/memory" / part
                yield from _left(folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def _left(folder: Path, limit: str, usage: str, prefix: str = "") -> Iterator[int]:
    """What a group's limit leaves; nothing where it has none ("max").

    What is used includes files that were read, which make way for anything else.
    """
    try:
        left = int((folder / limit).read_text()) - int((folder / usage).read_text())
        kept = _numbers(folder / "memory.stat")
    except (OSError, ValueError):
        return
    yield left + sum(kept.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))


def _numbers(file: Path) -> dict[str, int]:
    """The lines of a file, each a name, a number and perhaps a unit."""
    lines = map(str.split, file.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines}
