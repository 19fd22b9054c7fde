"""The process of a guest that works on files."""

from __future__ import annotations

from tests.support.kept_frames import Rooms


def worker(rooms: Rooms) -> str:
    """The number by which programs see the process, the latest that the supervisor started."""
    rooms.call("file.stat", path="")
    rooms.shell("true")
    script = "for s in /proc/[0-9]*/stat; do set -- $(cat $s); [ $4 = 1 ] && echo $1; done"
    listed = rooms.shell(f"exec 2>/dev/null; {script}; echo me $$").split()
    me = listed[-1]
    return max((pid for pid in listed[:-2] if pid not in ("1", me)), key=int)
