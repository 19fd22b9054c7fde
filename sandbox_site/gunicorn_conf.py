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
import os
from typing import Any

from gunicorn import glogging

from sandbox_site import settings
from sandbox_site.processes import die_with_parent

logger = logging.getLogger("sandbox_site.web")

# After the sandboxes have ended, for the records of what ran in them.
DRAIN_SECONDS = 0.5

worker_class = "sandbox_site.web.connections.Worker"
asgi_loop = "asyncio"
asgi_lifespan = "off"
workers = settings.env.bounded("WEB_CONCURRENCY", default=1, low=1, high=64)
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
    """End the sandboxes, however the worker ends, and let the records of what ran be closed."""
    from sandbox_site.web.connections import end_sandboxes

    end_sandboxes()
    if (bridge := getattr(worker, "asgi", None)) and not bridge.drain(DRAIN_SECONDS):
        logger.warning("%d requests were cut off", bridge.open)
