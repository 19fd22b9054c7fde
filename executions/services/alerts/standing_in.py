"""Watching and telling in a web process, for as long as no worker does."""

from __future__ import annotations

import logging
import threading

from django.db import Error as DatabaseFailure
from django.db import close_old_connections

from executions.services.alerts.watching import watch_without_workers
from sandbox_site import draining

logger = logging.getLogger(__name__)

EVERY_SECONDS = 60.0


def watch_in_background() -> None:
    """Start the thread. Several processes may have one: a rule opens one alert of a subject."""
    threading.Thread(target=_watch_forever, name="alerts-stand-in", daemon=True).start()


def _watch_forever() -> None:
    stop = threading.Event()
    while not (stop.wait(EVERY_SECONDS) or draining.is_draining()):
        try:
            watch_without_workers()
        except DatabaseFailure as error:
            logger.info("alerts could not be checked: %s", error)
        except Exception:
            logger.exception("alerts could not be checked")
        close_old_connections()
