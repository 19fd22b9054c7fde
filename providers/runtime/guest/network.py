"""The sandbox's way to the network: a socket on its loopback that is served on the host.

A program speaks to it as to an HTTP or SOCKS5 proxy. There is nothing else: no route, no name
server. Where descriptors can be handed over, the host accepts the connections itself, so that
nothing in the sandbox stands between a program and the rules.
"""

import os
import socket

from . import wire

TYPE_CHECKING = False  # as in typing, which is too dear to import here
if TYPE_CHECKING:
    from collections.abc import Mapping

ADDRESS = ("127.0.0.1", 3128)
# The variable by which the host hands over the certificate that programs are to trust.
AUTHORITY = "COFFERDAM_AUTHORITY"
_NODE_PROXY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "node_proxy.js")


def offer(channel: int) -> None:
    """Send the host a socket that is bound to ADDRESS. Until the host listens, nobody can connect.

    Raises OSError.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        # Or connections of a network that was closed would be in the way of the next one.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(ADDRESS)
        with socket.socket(fileno=os.dup(channel)) as to_host:
            socket.send_fds(to_host, [wire.LISTENER], [listener.fileno()])


def is_open(environment: "Mapping[str, str]") -> bool:
    """Whether programs with this environment may reach something."""
    return "HTTPS_PROXY" in environment


def complete(environment: "dict[str, str]") -> "dict[str, str]":
    """Add what leads programs to the proxy that do not read its variables, and to trust it."""
    certificate = environment.get(AUTHORITY)
    if certificate is not None:
        # Only here: most sandboxes have none.
        from .trust import extend

        environment = extend(
            {name: value for name, value in environment.items() if name != AUTHORITY}, certificate
        )
    if environment.get("NODE_USE_ENV_PROXY") != "1" or not os.path.exists(_NODE_PROXY):
        return environment
    options = f"{environment.get('NODE_OPTIONS', '')} --require={_NODE_PROXY}".strip()
    return {**environment, "NODE_OPTIONS": options}
