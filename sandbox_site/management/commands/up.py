"""Start everything, end everything."""

from __future__ import annotations

import errno
import os
import socket
import sys
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser

from sandbox_site.processes import ProcessGroup


class Command(BaseCommand):
    help = "Serve: the web server and the worker. The end of one ends both; Ctrl-C ends all."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--host", default=settings.HOST, help="address to listen on (HOST)")
        parser.add_argument("--port", type=int, default=settings.PORT, help="port (PORT)")

    def handle(self, *args: Any, host: str, port: int, **options: Any) -> None:
        _refuse_taken_port(host, port)
        bind = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        environment = os.environ | {"HOST": host, "PORT": str(port)}
        manage = str(settings.BASE_DIR / "manage.py")
        with ProcessGroup() as processes:
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
        "sandbox_site.wsgi:application",
    ]


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
