"""The web server: gunicorn with one process of threads.

Threads, because the short synchronous path is what is fast on them; one process, because the
warm sandboxes belong to a process and are of most use when they are not spread over several.
gunicorn sets TCP_NODELAY itself, so no answer waits for a delayed acknowledgement.
"""

from __future__ import annotations

import gc
import logging
import logging.config
import os
from typing import Any

from gunicorn import glogging

from sandbox_site import settings
from sandbox_site.processes import die_with_parent

logger = logging.getLogger("sandbox_site.web")

worker_class = "gthread"
workers = settings.env.bounded("WEB_CONCURRENCY", default=1, low=1, high=64)
threads = settings.env.bounded("WEB_THREADS", default=16, low=1, high=256)
keepalive = 65
timeout = 60
# Less than `up` grants before it kills.
graceful_timeout = 3
preload_app = False
control_socket_disable = True
# For the scheme alone, and of the same proxies: sandbox_site.client_address reads the rest.
forwarded_allow_ips = ",".join(map(str, settings.TRUSTED_PROXIES))
# The worker's heartbeat is a file; on a busy disk it could look dead.
worker_tmp_dir = "/dev/shm" if os.path.isdir("/dev/shm") else None  # noqa: S108
accesslog = "-" if settings.env.bool("ACCESS_LOG", default=False) else None


class Logger(glogging.Logger):  # type: ignore[misc]
    """Writes through the project's own logging."""

    def setup(self, cfg: Any) -> None:
        logging.config.dictConfig(settings.LOGGING)


logger_class = Logger


def post_fork(server: Any, worker: Any) -> None:
    die_with_parent(server.pid)


def post_worker_init(worker: Any) -> None:
    """Have warm sandboxes before the first request; without them it is slower, not wrong."""
    from django.urls import get_resolver

    from providers.manager import manager
    from providers.services.kept import renew_in_background

    get_resolver().url_patterns  # noqa: B018  loads every view
    try:
        manager.warm()
    except Exception:
        logger.exception("The active provider could not be started; the first request tries again")
    # What is loaded now stays. To walk it in a full collection would hold every request for 40 ms.
    gc.collect()
    gc.freeze()
    renew_in_background()


def worker_exit(server: Any, worker: Any) -> None:
    from providers.manager import manager

    manager.close()
