"""Redis as django-q's broker, where Redis may be away or hang.

Executions do not pass through a broker (see `executions.runs.queue`); what does are the tasks
of the schedule. So a Redis that does not answer must cost a worker nothing but these.
"""

from __future__ import annotations

from typing import Any

import redis
from django_q.brokers.redis_broker import Redis
from django_q.conf import Conf
from redis.backoff import NoBackoff
from redis.retry import Retry

# Longer than the second for which the broker waits for a task; the cluster's guard, which restarts
# workers that have died, is held up by it.
ANSWER_SECONDS = 3.0


class PatientRedis(Redis):  # type: ignore[misc]
    """django-q's own broker, which gives up waiting and does not end a cluster at its start."""

    @staticmethod
    def get_connection(list_key: str | None = None) -> Any:
        return redis.from_url(
            Conf.REDIS,
            socket_connect_timeout=ANSWER_SECONDS,
            socket_timeout=ANSWER_SECONDS,
            retry=Retry(NoBackoff(), 0),
        )

    def ping(self) -> bool:
        """Whoever takes tasks from it tries again every ten seconds."""
        return True
