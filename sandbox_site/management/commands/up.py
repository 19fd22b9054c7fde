"""Start everything, end everything."""

from __future__ import annotations

import errno
import os
import socket
import sys
import time
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser

from providers.pool.service.docker_check import Docker, find_docker
from sandbox_site.private_files import tighten
from sandbox_site.processes import ProcessGroup

POOL_START_SECONDS = 10.0


class Command(BaseCommand):
    help = (
        "Serve: the web server, the worker and, where a Docker engine answers, the pool service. "
        "The end of one ends all; Ctrl-C ends all."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--host", default=settings.HOST, help="address to listen on (HOST)")
        parser.add_argument("--port", type=int, default=settings.PORT, help="port (PORT)")

    def handle(self, *args: Any, host: str, port: int, **options: Any) -> None:
        _refuse_taken_port(host, port)
        tighten(settings.DATA_DIR)
        bind = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        environment = os.environ | {"HOST": host, "PORT": str(port)}
        manage = str(settings.BASE_DIR / "manage.py")
        with ProcessGroup() as processes:
            if find_docker() is Docker.READY and not _is_listening():
                command = [sys.executable, manage, "pool", "--launcher", "docker"]
                processes.start("pool", command, environment)
                _wait_until_listening()
            processes.start("web", _web_server(bind), environment)
            processes.start("worker", [sys.executable, manage, "qcluster"], environment)
            self.stdout.write(f"Cofferdam: http://{bind}/ (Ctrl-C ends it)")
            self.stdout.flush()
            ended = processes.wait()
        if ended:
            name, code = ended
            raise CommandError(f"The {name} process ended (exit code {code}), so all did.")


def _web_server(bind: str) -> list[str]:
    return [
        *(sys.executable, "-m", "gunicorn"),
        *("--config", "python:sandbox_site.gunicorn_conf"),
        *("--chdir", str(settings.BASE_DIR)),
        *("--bind", bind),
        "sandbox_site.asgi:application",
    ]


def _is_listening() -> bool:
    """Whether there is a pool service already, as one that was started by itself."""
    try:
        socket.create_connection((settings.POOL_HOST, settings.POOL_PORT), timeout=1).close()
    except OSError:
        return False
    return True


def _wait_until_listening() -> None:
    """The web server's provider asks the pool at once, and when refused not again for seconds."""
    deadline = time.monotonic() + POOL_START_SECONDS
    while not _is_listening() and time.monotonic() < deadline:
        time.sleep(0.05)


def _refuse_taken_port(host: str, port: int) -> None:
    """Say so at once, in one line: the web server would try for five seconds first."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        hint = " Choose another with PORT." if error.errno == errno.EADDRINUSE else ""
        raise CommandError(
            f"Cannot listen on {host} port {port}: {error.strerror}.{hint}"
        ) from None
