"""What a worker may do: the tasks named here, and nothing else, whatever the queue's tables say.

django-q looks up whatever dotted name a row gives, in three places: the worker for a task, the
scheduler for a schedule, and a hook for a result. It also unpickles the results of former tasks,
which anybody who can write to the database could have written. Here a name is a key of TASKS, a
schedule row is only a clock (`runs/worker.py`), and results are not kept: of django-q's processes
only its worker runs here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from types import FunctionType
from typing import Any

from django.utils.module_loading import import_string
from django_q.brokers import get_broker
from django_q.signing import SignedPackage
from django_q.worker import worker as run_worker

from executions import tasks as of_executions
from executions.runs.worker import record_done, recurring_tasks
from providers import draining
from providers import tasks as of_providers

logger = logging.getLogger(__name__)

# After a broker that could not be reached.
RETRY_SECONDS = 10.0

_STOP = "STOP"


def _tasks_of(module: Any) -> dict[str, Callable[..., Any]]:
    return {
        f"{module.__name__}.{name}": value
        for name, value in vars(module).items()
        if isinstance(value, FunctionType) and value.__module__ == module.__name__
    }


def find_tasks() -> dict[str, Callable[..., Any]]:
    """Return our tasks, and those that installed capabilities name."""
    named = {name: import_string(name) for name in recurring_tasks()}
    return {**named, **_tasks_of(of_executions), **_tasks_of(of_providers)}


TASKS: Mapping[str, Callable[..., Any]] = find_tasks()


def work(timer: Any, timeout: int) -> None:
    """Do the tasks of the broker in django-q's own worker until the process is told to stop."""
    tasks = _Tasks()
    run_worker(tasks, tasks, timer, timeout)


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


class _Tasks:
    """The broker as both queues of django-q's worker: the tasks, and the results.

    A task is taken when the worker is free for it. What is not admitted is told of, and done with.
    """

    @cached_property
    def _broker(self) -> Any:
        # It asks the database or Redis at once, which may be away.
        return get_broker()

    def get(self) -> Any:
        """Wait for a task, with its function, or for _STOP."""
        while not draining.is_draining():
            try:
                taken = self._broker.dequeue()
            except Exception:
                logger.exception("the tasks of the schedule cannot be read; it is tried again")
                _rest()
                continue
            # The broker waits by itself when there is nothing, and gives one at a time (`bulk`).
            for ack_id, package in taken or ():
                if (task := self._read(ack_id, package)) is not None:
                    return task
        return _STOP

    def put(self, task: dict[str, Any]) -> None:
        """Have the broker forget a task that is done."""
        try:
            if task["ack_id"]:
                self._broker.acknowledge(task["ack_id"])
        except Exception:
            logger.exception("a task is done, but the broker did not remove it; it may come again")
        if task["success"]:
            _note_done(task)
        else:
            logger.error("the task %s failed: %s", task["name"], task["result"])

    def _read(self, ack_id: Any, package: Any) -> dict[str, Any] | None:
        try:
            task = SignedPackage.loads(package)
        except Exception:
            # Whoever can write to the queue decides what is in it.
            logger.exception("a task in the queue was not signed by this service and was dropped")
            self._drop(ack_id)
            return None
        task = {**task, "ack_id": ack_id} if isinstance(task, dict) else {"ack_id": ack_id}
        if (ours := admitted(task)) is None:
            self._refuse(task)
        return ours

    def _drop(self, ack_id: Any) -> None:
        try:
            self._broker.fail(ack_id)
        except Exception:
            logger.exception("the broker could not be notified that a task was dropped")

    def _refuse(self, task: dict[str, Any]) -> None:
        name = repr(task.get("func"))[:200]
        logger.error(
            "a task in the queue does not belong to this service and was dropped: %s",
            name,
            extra={"alert": "unknown_task", "task": name},
        )
        result = {"result": f"{name} is not a task of this service", "success": False}
        self.put({**_facts(task), **result})


def _rest() -> None:
    end = time.monotonic() + RETRY_SECONDS
    while time.monotonic() < end and not draining.is_draining():
        time.sleep(0.2)


def _facts(task: dict[str, Any]) -> dict[str, Any]:
    """What the queue needs to know of a task to be done with it."""
    return {
        "id": str(task.get("id"))[:32],
        "name": str(task.get("name"))[:100],
        "started": task.get("started"),
        "ack_id": task.get("ack_id"),
    }


def _note_done(task: dict[str, Any]) -> None:
    name = next((name for name, function in TASKS.items() if function is task.get("func")), "")
    if not (name and task.get("success")):
        return
    try:
        record_done(name, task["started"])
    except Exception:
        logger.exception("%s is done, but this could not be recorded; it is run again", name)
