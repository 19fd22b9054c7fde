"""The first steps of process 1 in a container, before it is the supervisor.

The engine has set up namespaces, limits and file systems. What is left: the system call filter,
and the content that an image may bring along for /tmp, which is empty otherwise.
"""

import sys

from . import kernel, supervisor, wire
from .image_content import fill_tmp


def main(seccomp: bytes) -> None:
    """Filter system calls, fill /tmp, supervise. Never returns."""
    template: "dict[str, object]" = wire.loads(sys.argv[1])  # type: ignore[assignment]
    if seccomp:
        kernel.filter_system_calls(seccomp)
    fill_tmp(template["uid"])  # type: ignore[arg-type]
    supervisor.main()
