"""The web server: gunicorn with one asynchronous process, and threads behind it.

Reading requests and sending answers is asynchronous, so that slow clients cost a socket and nothing
else. Requests are handled on threads, because the short synchronous path is what is fast on them,
and runs wait without one (`sandbox_site.web`). One process, because the warm sandboxes belong to a
process and are of most use when they are not spread over several. asyncio sets TCP_NODELAY itself,
so no answer waits for a delayed acknowledgement.
"""

from __future__ import annotations

import gc
import logging
import logging.config
import math
import os
import signal
import sys
from contextlib import suppress
from typing import Any
from urllib.parse import unquote

from django.apps import apps
from gunicorn import glogging
from gunicorn.arbiter import Arbiter

from executions.kernel.own_process import die_with_parent, give_back_large_blocks
from executions.kernel.postgresql import expect_answers_within
from executions.runs import standby
from providers import draining
from sandbox_site import settings

# The worker's class reads settings before the application is loaded.
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "sandbox_site.settings")

logger = logging.getLogger("sandbox_site.web")

# For the answers of a worker that ends by itself.
DRAIN_SECONDS = 0.5
# For a worker's end after its last answer: then the master kills it.
EXIT_SECONDS = 5

worker_class = "sandbox_site.web.connections.Worker"
asgi_loop = "asyncio"
asgi_lifespan = "off"
workers = settings.WEB_CONCURRENCY
keepalive = 65
# A path has 4096 bytes, and three characters for each where it is sent percent-encoded. Beside it a
# list may have the path where it goes on, whose own `%` is sent as three.
limit_request_line = 36 * 1024
# A worker that is busy for so long loses its lease too: until then nobody's run ends for it.
timeout = math.ceil(standby.HELD_SECONDS)
# Until the master kills. A worker keeps its own time and needs less.
graceful_timeout = math.ceil(
    settings.SHUTDOWN_DELAY_SECONDS
    + settings.SHUTDOWN_GRACE_SECONDS
    + draining.ENDING_SECONDS
    + EXIT_SECONDS
)
preload_app = False
control_socket_disable = True
# For the scheme alone, and of the same proxies: sandbox_site.client_address reads the rest.
forwarded_allow_ips = ",".join(map(str, settings.TRUSTED_PROXIES))
# The worker's heartbeat is a file; on a busy disk it could look dead.
worker_tmp_dir = "/dev/shm" if os.path.isdir("/dev/shm") else None  # noqa: S108
accesslog = "-" if settings.ACCESS_LOG else None


class Logger(glogging.Logger):  # type: ignore[misc]
    """Writes through the project's own logging."""

    def setup(self, cfg: Any) -> None:
        if apps.ready:
            # The process that this one was forked from has configured the rest. To do it again
            # writes to pages that they share.
            self.error_log.propagate = self.access_log.propagate = True
        else:
            logging.config.dictConfig(settings.LOGGING)

    def access(self, resp: Any, req: Any, environ: Any, request_time: Any) -> None:
        """A path of Codex's door may have a capability in it, however the path is written."""
        raw = str(environ.get("RAW_URI", ""))
        if "codex/" in unquote(unquote(raw)).lower():
            masked = dict.fromkeys(("RAW_URI", "PATH_INFO"), "/codex/...")
            environ = {**environ, **masked, "HTTP_REFERER": "-"}
        super().access(resp, req, environ, request_time)


logger_class = Logger


def when_ready(server: Any) -> None:
    """SIGTERM and SIGINT stop in order; again, or SIGQUIT, means now. gunicorn alone would not
    hear a second SIGTERM, and has other times for the rest."""

    def told(number: int, frame: Any) -> None:
        is_now = draining.is_draining() or number == signal.SIGQUIT
        if not draining.is_draining():
            server.signal(signal.SIGTERM, frame)
        draining.begin(for_all=True)
        # Not only when the master comes to it: while it reloads, it waits for former workers.
        for pid in list(server.WORKERS):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGQUIT if is_now else signal.SIGTERM)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, told)


def post_fork(server: Any, worker: Any) -> None:
    die_with_parent(server.pid)
    give_back_large_blocks()


def post_worker_init(worker: Any) -> None:
    """Have warm sandboxes before the first request; without them it is slower, not wrong."""
    from django.urls import get_resolver

    from executions.capabilities.alerts.service import watch_in_background
    from executions.runs import heartbeat, journal
    from executions.runs.models import Process
    from executions.sessions import maintenance
    from providers.manager import manager
    from providers.services.preload import start_ahead
    from providers.services.settings_cache import renew_in_background

    expect_answers_within(settings.DATABASE_WAIT_SECONDS)
    _refuse_foreign_instance()
    get_resolver().url_patterns  # noqa: B018  loads every view
    try:
        manager.warm()
    except Exception:
        logger.exception("The active provider could not be started; the first request tries again")
    # What is loaded now stays. To walk it in a full collection would hold every request for 40 ms.
    gc.collect()
    gc.freeze()
    renew_in_background()
    start_ahead()
    heartbeat.begin(Process.Kind.WEB)
    journal.start()
    maintenance.end_on_time()
    watch_in_background()


def _refuse_foreign_instance() -> None:
    from sandbox_site import installation

    try:
        installation.join()
    except installation.DoesNotFit as error:
        logger.critical("this instance does not start: %s", error)
        sys.exit(Arbiter.WORKER_BOOT_ERROR)


def worker_exit(server: Any, worker: Any) -> None:
    """Whatever ends the worker, runs are ended, recorded and saved first."""
    from executions.kernel import background
    from executions.runs import active_runs

    active_runs.end_all(DRAIN_SECONDS)
    if (bridge := getattr(worker, "asgi", None)) and not bridge.drain(DRAIN_SECONDS):
        logger.warning("%d requests were cut off", bridge.open)
    background.wait_for_keyed_work(background.LAST_SECONDS)
    active_runs.shutdown()
