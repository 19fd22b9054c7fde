"""What the API server has of our objects: one list, and a watch that keeps it up to date.

As Kubernetes' own controllers do it: a list, then a watch from its resourceVersion on; bookmarks
move that on where nothing changes; a version that is too old (410) and a lost connection begin
anew with a list, after pauses that grow.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterator
from typing import Any

from providers.runtime.launchers.kubernetes.api import Api, ApiFailure, Object

logger = logging.getLogger(__name__)

# How long one watch goes on. The server ends it then, and the next goes on where it was: so a
# connection that is dead without a sign is noticed.
WATCH_SECONDS = 60
# The shortest and the longest pause after a failure.
PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.2, 30.0
# Of one page of a list.
PAGE = 500
_GONE = 410

Condition = Callable[[Object | None], bool]


class ObjectCache:
    """The objects of one kind with a label, by name. Used from one event loop only.

    `failure` is why the API server could not be asked last, empty while it can.
    """

    @property
    def _path(self) -> str:
        raise NotImplementedError

    def __init__(self, api: Api, selector: str) -> None:
        self.failure = ""
        self.lists = 0
        self._api = api
        self._selector = selector
        self._objects: dict[str, Object] = {}
        # Since the list that is under way has begun.
        self._put: dict[str, Object] = {}
        self._waiting: dict[str, list[tuple[Condition, asyncio.Future[Object | None]]]] = {}
        self._task: asyncio.Task[None] | None = None
        self._version = ""

    async def open(self) -> None:
        """Have the list, and keep it up to date from now on. Raises ApiFailure."""
        if self._task is None:
            await self._list()
            self._task = asyncio.ensure_future(self._follow())

    def close(self) -> None:
        """Stop. Whoever waits for an object waits in vain."""
        if self._task is not None:
            self._task.cancel()

    def get(self, name: str) -> Object | None:
        """Return an object as it was seen last, None for one that is gone."""
        return self._objects.get(name)

    def __iter__(self) -> Iterator[Object]:
        return iter(list(self._objects.values()))

    def put(self, found: Object) -> None:
        """Take what a call has answered, where the watch has not seen it yet."""
        name = found["metadata"]["name"]
        self._objects.setdefault(name, found)
        self._put[name] = found

    async def wait(self, name: str, condition: Condition) -> Object | None:
        """Wait until an object, or its absence (None), fulfils a condition. Return it."""
        found = self._objects.get(name)
        if condition(found):
            return found
        future: asyncio.Future[Object | None] = asyncio.get_running_loop().create_future()
        entry = condition, future
        self._waiting.setdefault(name, []).append(entry)
        try:
            return await future
        finally:
            waiting = self._waiting.get(name, [])
            if entry in waiting:
                waiting.remove(entry)
            if not waiting:
                self._waiting.pop(name, None)

    async def _follow(self) -> None:
        failures = 0
        while True:
            try:
                if not self._version:
                    await self._list()
                await self._watch()
                failures = 0
            except Exception as error:
                failures += 1
                # What has happened meanwhile is in the next list.
                self._version = ""
                is_gone = isinstance(error, ApiFailure) and error.status == _GONE
                if not is_gone:
                    self._note(error)
                elif failures == 1:
                    continue
            most = min(LONGEST_PAUSE_SECONDS, PAUSE_SECONDS * 2.0 ** min(failures, 10))
            await asyncio.sleep(random.uniform(most / 2, most))  # noqa: S311

    def _note(self, error: Exception) -> None:
        """Note why the server cannot be followed. An answer that is malformed ends nothing here."""
        why = str(error) if isinstance(error, ApiFailure) else f"malformed answer: {error!r}"
        if not self.failure:
            logger.warning("%s cannot be watched: %s", self._path, why)
        self.failure = why

    async def _list(self) -> None:
        found: dict[str, Object] = {}
        self._put.clear()
        query = {"labelSelector": self._selector, "limit": str(PAGE)}
        while True:
            answer = await self._api.call("GET", self._path, query=query)
            found.update((each["metadata"]["name"], each) for each in answer["items"])
            following = answer["metadata"].get("continue")
            if not following:
                break
            query["continue"] = following
        self.lists += 1
        self.failure = ""
        self._version = answer["metadata"]["resourceVersion"]
        for name, each in self._put.items():
            if _is_newer(each, self._version):
                found.setdefault(name, each)
        gone = self._objects.keys() - found.keys()
        self._objects = found
        for name in [*found, *gone]:
            self._notify(name)

    async def _watch(self) -> None:
        query = {
            "watch": "true",
            "labelSelector": self._selector,
            "resourceVersion": self._version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_SECONDS),
        }
        async for event in self._api.watch(self._path, query):
            self.failure = ""
            changed: dict[str, Any] = event["object"]
            metadata = changed["metadata"]
            self._version = metadata["resourceVersion"]
            if event["type"] == "BOOKMARK":
                continue
            name = metadata["name"]
            if event["type"] == "DELETED":
                self._objects.pop(name, None)
            else:
                self._objects[name] = changed
            self._notify(name)

    def _notify(self, name: str) -> None:
        found = self._objects.get(name)
        for condition, future in self._waiting.get(name, []):
            if not future.done() and condition(found):
                future.set_result(found)


def _is_newer(found: Object, version: str) -> bool:
    """Whether an object was made after a list of this version: the watch tells of its end."""
    own = str(found["metadata"].get("resourceVersion") or "")
    return not (own.isdigit() and version.isdigit()) or int(own) > int(version)


class PodCache(ObjectCache):
    """The Pods with a label."""

    @property
    def _path(self) -> str:
        return self._api.pods


class ClaimCache(ObjectCache):
    """The SandboxClaims with a label. It stays empty until it is opened."""

    @property
    def _path(self) -> str:
        return self._api.claims
