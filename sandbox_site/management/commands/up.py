"""Start everything, end everything."""

from __future__ import annotations

import argparse
import errno
import logging.config
import os
import shlex
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DatabaseError, connection

from executions.kernel.own_process import die_with_parent
from executions.kernel.processes import (
    RESTART_SECONDS,
    ForkedProcess,
    ProcessGroup,
)
from providers import draining
from providers.checks import BEFORE_WORK
from providers.errors import ProviderUnavailable
from providers.runtime.service import unix_socket
from providers.runtime.service.docker_check import Docker, find_docker
from sandbox_site import parent
from sandbox_site.private_files import tighten

logger = logging.getLogger(__name__)

POOL_START_SECONDS = 10.0
# Where nothing runs: the next one is told some ten seconds later.
_QUIET_TELLINGS = 2
# For a process to exit after it has ended all that it runs.
EXIT_SECONDS = 5.0


class Command(BaseCommand):
    # A process of their own makes them, which loads the apps and ends.
    requires_system_checks = []
    help = (
        "Run the service: the web server, the worker and the pool service. The pool uses "
        "POOL_LAUNCHER, or else containers if a Docker engine answers, and also serves the "
        "sessions of the local provider. If one of these ends, all end. Ctrl-C stops all in order; "
        "a second Ctrl-C stops them at once."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--host", default=settings.HOST, help="address to listen on (HOST)")
        parser.add_argument("--port", type=int, default=settings.PORT, help="port (PORT)")
        parser.add_argument(
            "--packages",
            action="store_true",
            help="also install common packages for programs in Python (manage.py packages)",
        )
        parser.add_argument(
            "--claude-worker",
            action="append",
            default=[],
            metavar="ARGUMENTS",
            help="also serve an environment of Claude: the arguments of claude_worker as one text, "
            "such as 'demo/agents --key claude'; may be repeated. One that ends is started again",
        )

    def run_from_argv(self, argv: list[str]) -> None:
        _set_environment(argv[2:])
        logging.config.dictConfig(settings.LOGGING)
        try:
            super().run_from_argv(argv)
            return
        except ForkedProcess as forked:
            run = forked.run
        run()

    def handle(self, *args: Any, host: str, port: int, packages: bool, **options: Any) -> None:
        manage = str(settings.BASE_DIR / "manage.py")
        claude = _claude_workers(options["claude_worker"], manage)
        # `python -m gunicorn` finds the project where it stands.
        os.chdir(settings.BASE_DIR)
        _refuse_taken_port(host, port)
        tighten(settings.DATA_DIR)
        bind = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        os.environ |= {"HOST": host, "PORT": str(port)}
        environment = os.environ
        _check([sys.executable, manage, "check", *(f"--tag={tag}" for tag in BEFORE_WORK)])
        has_environment = packages and self._make_environment()
        with ProcessGroup() as processes:
            if has_environment:
                processes.start_helper([sys.executable, manage, "packages"], environment)
            pool = [sys.executable, manage, "pool"]
            local = [] if unix_socket.is_taken(_socket()) else ["--socket"]
            launcher = _launcher()
            has_pool = bool(launcher) and not _is_listening()
            if has_pool:
                processes.start("pool", [*pool, "--launcher", launcher, *local], environment)
                _wait_until_listening()
            elif local:
                processes.start("pool", [*pool, "--no-port"], environment)
            server = parent.load(bind)
            processes.fork("web", partial(parent.run_web_server, server, bind))
            processes.fork("worker", parent.run_cluster)
            for name, command in claude.items():
                # Its key is a tenant's, who may revoke it: that ends nothing of others.
                processes.start(name, command, environment, restarts=True)
            self._say(f"Cofferdam: http://{bind}/ (Ctrl-C to stop)")
            ended = processes.wait(self._say_restart)
            self._stop(processes, list(claude), in_order=ended is None)
        if ended:
            name, code = ended
            raise CommandError(f"The {name} process ended (exit code {code}), so all were stopped.")

    def _make_environment(self) -> bool:
        """Make the empty environment that the processes are to find; tell whether it is there."""
        if settings.SANDBOX_LOCAL_PYTHON not in ("", str(settings.PACKAGES_DIR / "bin/python")):
            return False
        # Not otherwise: this process holds what it imports for as long as the service runs.
        from providers.local.packages import create

        try:
            create(settings.PACKAGES_DIR)
        except ProviderUnavailable as error:
            self.stdout.write(f"Packages: none are installed. {error.message}")
            return False
        return True

    def _say_restart(self, name: str, code: int) -> None:
        self._say(
            f"The {name} process ended (exit code {code}). It is started again in "
            f"{RESTART_SECONDS:.0f} s."
        )

    def _say(self, line: str) -> None:
        self.stdout.write(line)
        self.stdout.flush()

    def _stop(self, processes: ProcessGroup, others: list[str], *, in_order: bool) -> None:
        """The pool last, so that what runs in it can finish. Without one of them there is no
        service to finish anything for."""
        self._tellings = 0
        if in_order:
            self._say("Stopping. Press Ctrl-C again to stop now.")
        seconds = (
            settings.SHUTDOWN_DELAY_SECONDS
            + settings.SHUTDOWN_GRACE_SECONDS
            + draining.ENDING_SECONDS
            + EXIT_SECONDS
        )
        processes.stop(
            [["web", "worker", *others], ["pool"]]
            if in_order
            else [["web", "worker", *others, "pool"]],
            seconds=seconds if in_order else 0,
            ending_seconds=draining.ENDING_SECONDS + EXIT_SECONDS,
            tell=self._tell,
        )

    def _tell(self, names: list[str], left: float) -> None:
        """Say what is waited for: runs, or a process that should have ended by now."""
        self._tellings += 1
        if self._tellings > _QUIET_TELLINGS or _has_runs():
            self._say(
                f"Stopping; waiting for {' and '.join(names)} (max {left:.0f} s). Press Ctrl-C "
                "again to stop now."
            )


def _set_environment(arguments: list[str]) -> None:
    """Have the settings, which are read after this, be those of the arguments."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--host")
    parser.add_argument("--port")
    given, _ = parser.parse_known_args(arguments)
    os.environ |= {name.upper(): value for name, value in vars(given).items() if value is not None}
    # There is a pool service beside the web server.
    os.environ["POOL_AUTOSTART"] = "false"


def _check(command: list[str]) -> None:
    """End with the exit code of the checks, which have said why, unless they found nothing."""
    parent = os.getpid()
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        preexec_fn=lambda: die_with_parent(parent),
        check=False,
    )
    if done.returncode:
        sys.exit(abs(done.returncode))


def _has_runs() -> bool:
    """Whether anything runs in a process of this host, as far as the database tells."""
    try:
        from executions.runs.models import Execution

        running = Execution.objects.filter(
            finished_at=None, process__instance=settings.INSTANCE, process__ended_at=None
        )
        return running.exists()
    except DatabaseError:
        return True
    finally:
        connection.close()


def _claude_workers(wanted: list[str], manage: str) -> dict[str, list[str]]:
    """The command of each worker of an environment of Claude, by the name of its process."""
    try:
        return {
            # Two of them may be alike.
            f"claude worker {number} ({text})": [
                *(sys.executable, manage, "claude_worker"),
                *shlex.split(text),
            ]
            for number, text in enumerate(wanted, 1)
        }
    except ValueError as error:
        raise CommandError(f"--claude-worker: {error}.") from None


def _launcher() -> str:
    """What the pool service that listens on a port is started with; "" where it is not."""
    if settings.POOL_LAUNCHER != "auto":
        return str(settings.POOL_LAUNCHER)
    return "docker" if find_docker() is Docker.READY else ""


def _socket() -> Path:
    return unix_socket.socket_path(settings.DATA_DIR)


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
