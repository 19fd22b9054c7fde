"""The Q_CLUSTER setting: django-q's workers, and the queue of the schedule's tasks.

Executions wait in their own table (see `executions.runs.queue`), not in this queue.
"""

from __future__ import annotations

import hashlib
from typing import Any

from django.core.exceptions import ImproperlyConfigured

from sandbox_site.environment import StrictEnv


def queue_name(secret_key: str) -> str:
    """The name of the queue of those who share this key.

    What a cluster cannot verify it deletes. Under a name of its own a cluster with another key, or
    with the one before a rotation, is never sent it.
    """
    digest = hashlib.sha256(b"cofferdam queue\0" + secret_key.encode()).hexdigest()
    return f"cofferdam-{digest[:12]}"


def cluster(env: StrictEnv, secret_key: str, task_seconds: int) -> dict[str, Any]:
    """`task_seconds` is what a task may take at most. Raises ImproperlyConfigured."""
    workers = env.number("Q_WORKERS")
    configured: dict[str, Any] = {
        # The first is what signatures are salted with, the second is the queue.
        "name": "cofferdam",
        "cluster_name": queue_name(secret_key),
        "workers": workers,
        "bulk": 1,
        "timeout": task_seconds,
        # A worker takes a task when it is free for it. After this it was lost with its worker.
        "retry": 3 * task_seconds + 60,
        "ack_failures": True,
        "max_attempts": 1,
        "catch_up": False,
        "save_limit": 250,
    }
    if env.choice("Q_BROKER") == "orm":
        # Seconds between looks for tasks of the schedule, which nobody waits for.
        return configured | {"orm": "default", "poll": 1}
    if not (redis_url := env.secret("REDIS_URL")):
        raise ImproperlyConfigured("Q_BROKER=redis needs REDIS_URL or REDIS_URL_FILE")
    broker = "sandbox_site.brokers.PatientRedis"
    return configured | {"redis": redis_url, "broker_class": broker}
