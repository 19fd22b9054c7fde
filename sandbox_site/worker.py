"""What a worker may do: the tasks named here, and nothing else, whatever the queue's tables say.

django-q looks up whatever dotted name a row gives, in three places: the worker for a task, the
scheduler for a schedule, and a hook for a result. It also unpickles the results of former tasks,
which anybody who can write to the database could have written. Here a name is a key of TASKS, a
schedule row is only a clock, and results are not kept.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import django_q.cluster
import django_q.monitor
from django.db.models.signals import post_save
from django.utils import timezone
from django_q.models import Task
from django_q.signals import call_hook, post_execute
from django_q.worker import worker as run_worker

from executions import tasks as of_executions
from executions.runs.worker import enqueue_due, note_done
from providers import tasks as of_providers

logger = logging.getLogger(__name__)

_STOP = "STOP"


def _tasks_of(module: Any) -> dict[str, Callable[..., Any]]:
    return {
        f"{module.__name__}.{name}": value
        for name, value in vars(module).items()
        if isinstance(value, FunctionType) and value.__module__ == module.__name__
    }


TASKS: Mapping[str, Callable[..., Any]] = _tasks_of(of_executions) | _tasks_of(of_providers)


def restrict() -> None:
    """Have the clusters of this process do our tasks alone. Call it before one is started."""
    django_q.cluster.worker = work
    django_q.cluster.scheduler = enqueue_due
    django_q.monitor.save_task = _keep_nothing
    django_q.monitor.save_cached = _keep_nothing
    post_save.disconnect(call_hook, sender=Task)
    post_execute.connect(_note_done, dispatch_uid="schedules")


def work(task_queue: Any, result_queue: Any, timer: Any, timeout: int | None = None) -> None:
    """django-q's own worker, handed nothing but what `admitted` lets through."""
    run_worker(_Admitting(task_queue, result_queue), result_queue, timer, timeout)


def admitted(task: Any) -> dict[str, Any] | None:
    """The task with its function in the place of its name, and none of its options; or None."""
    if not isinstance(task, dict):
        return None
    name, arguments = task.get("func"), task.get("args")
    function = TASKS.get(name) if isinstance(name, str) else None
    if function is None or not isinstance(arguments, (tuple, list)) or task.get("kwargs"):
        return None
    if not all(isinstance(argument, str) for argument in arguments):
        return None
    return {**_facts(task), "func": function, "args": tuple(arguments), "kwargs": {}}


class _Admitting:
    """The queue as a worker sees it. What is not admitted is told of, and done with."""

    def __init__(self, tasks: Any, results: Any) -> None:
        self._tasks = tasks
        self._results = results

    def get(self) -> Any:
        while True:
            task = self._tasks.get()
            if isinstance(task, str) and task == _STOP:
                return task
            if (ours := admitted(task)) is not None:
                return ours
            self._refuse(task if isinstance(task, dict) else {})

    def _refuse(self, task: dict[str, Any]) -> None:
        name = repr(task.get("func"))[:200]
        logger.error(
            "a task in the queue does not belong to this service and was dropped: %s",
            name,
            extra={"alert": "unknown_task", "task": name},
        )
        refused = {"func": "refused", "args": (), "kwargs": {}, "stopped": timezone.now()}
        result = {"result": f"{name} is not a task of this service", "success": False}
        self._results.put({**_facts(task), **refused, **result})


def _facts(task: dict[str, Any]) -> dict[str, Any]:
    """What the queue needs to know of a task to be done with it."""
    return {
        "id": str(task.get("id"))[:32],
        "name": str(task.get("name"))[:100],
        "started": task.get("started"),
        "cluster": task.get("cluster"),
        "ack_id": task.get("ack_id"),
        "ack_failure": True,
    }


def _keep_nothing(task: Any, broker: Any) -> None:
    """Of what a task returned, the log says all that is needed."""


def _note_done(task: dict[str, Any], **signal: Any) -> None:
    """In the cluster's monitor, which is to go on monitoring."""
    name = next((name for name, function in TASKS.items() if function is task.get("func")), "")
    if not (name and task.get("success")):
        return
    try:
        note_done(name, task["started"])
    except Exception:
        logger.exception("%s is done, but this could not be recorded; it is run again", name)
