"""The first step of process 1 in a container, before it is the supervisor.

The engine has set up namespaces, limits and file systems. What is left is the system call filter.
"""

import os
import sys

from . import kernel, network, notices, root, supervisor, wire


def main(seccomp: "bytes | None" = None) -> None:
    """Filter system calls by this program, or by that of argv[2], supervise. Never returns."""
    described: "dict[str, object]" = wire.loads(sys.argv[1])  # type: ignore[assignment]
    # A kubelet adds the address of its API server, whatever a Pod asks for.
    for name in [each for each in os.environ if each.startswith("KUBERNETES_")]:
        del os.environ[name]
    if described.get("makes_runs"):
        # It filters the calls of those, and not its own.
        from . import tenant_kernel

        tenant_kernel.main()
    if described.get("offers_network"):
        network.offer(1)
    if seccomp is None:
        seccomp = bytes.fromhex(sys.argv[2])
    root.require_one_home(str(described["workspace"]))
    descriptor = notices.open_notices()
    if seccomp:
        kernel.filter_system_calls(seccomp)
    supervisor.main(descriptor)
