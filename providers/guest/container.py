"""The first step of process 1 in a container, before it is the supervisor.

The engine has set up namespaces, limits and file systems. What is left is the system call filter.
"""

from . import kernel, notices, supervisor


def main(seccomp: bytes) -> None:
    """Filter system calls, supervise. Never returns."""
    descriptor = notices.open_notices()
    if seccomp:
        kernel.filter_system_calls(seccomp)
    supervisor.main(descriptor)
