"""The worker of one self-hosted environment: takes agents' sessions from its queue and serves them.

Several workers can serve one environment: the queue gives each item to one of them.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from contextlib import suppress
from functools import partial
from uuid import uuid4

from django.db import Error as DatabaseFailure
from django.db import close_old_connections

from executions.doors.claude.calls import NotPermitted, Place, valid_key
from executions.doors.claude.client import Client, Refused, Unavailable, Work
from executions.doors.claude.environment import Environment, NoEnvironment, open_environment
from executions.doors.claude.serving import Pace, Serving
from providers.addresses import rules
from providers.remote.receiver import Receiver
from providers.threads import NoThreadLeft, start_thread

logger = logging.getLogger(__name__)

# Between polls that found nothing, so that workers do not meet, and after one that failed.
_EMPTY_SECONDS = (1.0, 3.0)
_MOST_PAUSE = 60.0
_END_SECONDS = 60.0
_LOOK_SECONDS = 0.2


class Worker:
    """Serves at most `most` sessions at once, with the power of one API key."""

    def __init__(
        self,
        tenant_slug: str,
        name: str,
        place: Place,
        *,
        most: int = 4,
        pace: Pace | None = None,
        receiver: Receiver | None = None,
    ) -> None:
        self._tenant_slug = tenant_slug
        self._name = name
        self._place = place
        self._pace = pace or Pace()
        self._receiver = receiver or Receiver(rules())
        self._places = threading.BoundedSemaphore(most)
        self._most = most
        self._lock = threading.Lock()
        self._servings: set[Serving] = set()
        self._is_stopping = self._is_hurried = False
        self._failures = 0
        self._id = f"cofferdam-{uuid4().hex[:12]}"

    def stop(self, *, at_once: bool = False) -> None:
        """Have `run` return soon; `at_once`, or when called again, without waiting for what runs.
        Safe in a signal handler: it takes no lock."""
        self._is_hurried = self._is_hurried or at_once or self._is_stopping
        self._is_stopping = True

    def run(self) -> None:
        """Serve until stopped. What keeps it from that is logged, and it is tried again."""
        try:
            while not self._is_stopping:
                if self._places.acquire(timeout=_LOOK_SECONDS):
                    self._rest(self._serve_next())
        finally:
            self._end_all()

    def _end_all(self) -> None:
        self._stop_all(self._pace.grace)
        left, end = self._most, time.monotonic() + self._pace.grace + _END_SECONDS
        # All have ended when all places are free.
        while left and time.monotonic() < end:
            if self._is_hurried:
                self._stop_all(0.0)
            left -= self._places.acquire(timeout=_LOOK_SECONDS)
        if left:
            logger.error("%d sessions of agents did not come to an end", left)

    def _stop_all(self, seconds: float) -> None:
        with self._lock:
            servings = list(self._servings)
        for each in servings:
            each.stop(seconds)

    def _rest(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self._is_stopping and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, _LOOK_SECONDS))

    def _serve_next(self) -> float:
        """Have the next item served, if there is one. Return seconds until the next look."""
        work = None
        try:
            close_old_connections()
            environment = self._permitted()
            client = Client(environment.address, environment.key, self._receiver)
            work = self._take(client, environment)
        except (NoEnvironment, NotPermitted, Refused, Unavailable) as error:
            return self._pause_after(error)
        except Exception as error:
            # The worker serves other sessions meanwhile, and `up` would end the service with it.
            logger.exception("the environment %s could not be asked for work", self._name)
            return self._pause_after(error)
        finally:
            if work is None:
                self._places.release()
        self._failures = 0
        if work is None:
            return random.uniform(*_EMPTY_SECONDS)  # noqa: S311  not to meet others
        try:
            start_thread(
                "claude session",
                partial(self._serve, client, environment, work),
                at_end=self._places.release,
            )
        except NoThreadLeft as error:
            return self._pause_after(error)
        return 0.0

    def _pause_after(self, error: Exception) -> float:
        self._failures += 1
        logger.error("the environment %s is not served now: %s", self._name, error)
        pause: float = min(2.0 ** min(self._failures, 10), _MOST_PAUSE)
        return pause * random.uniform(0.5, 1)  # noqa: S311  not to meet others

    def _permitted(self) -> Environment:
        """Return the environment as it is now. Raises NoEnvironment, NotPermitted, Unavailable."""
        try:
            key = valid_key(self._place)
            if key.tenant.slug != self._tenant_slug:
                raise NotPermitted("The API key is not of the environment's tenant.")
            return open_environment(self._tenant_slug, self._name)
        except DatabaseFailure as error:
            raise Unavailable(f"The database does not answer: {type(error).__name__}.") from None

    def _take(self, client: Client, environment: Environment) -> Work | None:
        """Take an item that is to be served."""
        work = client.poll(environment.id, self._id)
        if work is None:
            return None
        try:
            client.acknowledge(environment.id, work)
        except Refused as error:
            logger.error("the item %s cannot be taken: %s", work.id, error)
            _stop(client, environment, work)
            return None
        if not work.session_id:
            _stop(client, environment, work)
            return None
        return work

    def _serve(self, client: Client, environment: Environment, work: Work) -> None:
        def ensure_permitted() -> None:
            close_old_connections()
            if self._permitted().version != environment.version:
                raise NoEnvironment("The key of the environment was changed.")

        serving = Serving(client, environment.id, work, self._place, ensure_permitted, self._pace)
        with self._lock:
            self._servings.add(serving)
        try:
            if self._is_stopping:
                serving.stop(self._pace.grace)
            serving.run()
        finally:
            with self._lock:
                self._servings.discard(serving)


def _stop(client: Client, environment: Environment, work: Work) -> None:
    with suppress(Refused, Unavailable):
        client.stop(environment.id, work)
