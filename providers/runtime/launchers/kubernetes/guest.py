"""A running Pod as the pool sees it: its channel, what is known of it, and its end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from providers.runtime.launchers.container_guest import After
from providers.runtime.launchers.kubernetes.api import AttachedStream, Object
from providers.runtime.launchers.kubernetes.manifest import CONTAINER
from providers.runtime.pool.cgroup import ResourceUsage
from providers.runtime.pool.launcher import Guest
from providers.runtime.pool.protocol import GuestChannel

_OUT_OF_MEMORY = "OOMKilled"
# Why a Pod ends that is the cluster's doing, and none of its code's.
_DISRUPTIONS = frozenset(
    {"Evicted", "Preempting", "Preempted", "NodeLost", "NodeShutdown", "Shutdown", "Terminated"}
)


@dataclass(frozen=True)
class End:
    """How a Pod ended. `lost` is why the cluster ended it, empty where its code or we did."""

    out_of_memory: bool = False
    exit_code: int | None = None
    lost: str = ""


def end_of(pod: Object | None) -> End:
    """Return how a Pod ended. Without an exit code its container is not known to have ended."""
    if pod is None:
        return End(lost="The Pod was deleted")
    metadata, status = pod["metadata"], pod.get("status") or {}
    reason, message = str(status.get("reason") or ""), str(status.get("message") or "")
    disrupted = [
        condition
        for condition in status.get("conditions") or ()
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True"
    ]
    if disrupted:
        return End(lost=f"The cluster ended the Pod: {disrupted[0].get('reason')}")
    if reason in _DISRUPTIONS:
        return End(lost=f"The cluster ended the Pod: {reason} {message}".strip())
    if metadata.get("deletionTimestamp"):
        return End(lost="The Pod was deleted")
    ended = terminated_state(pod)
    if ended is None:
        return End()
    code = ended.get("exitCode")
    return End(ended.get("reason") == _OUT_OF_MEMORY, code if type(code) is int else None)


def terminated_state(pod: Object) -> Mapping[str, Any] | None:
    """Return the state of the sandbox's container where it has ended."""
    for each in (pod.get("status") or {}).get("containerStatuses") or ():
        if each["name"] == CONTAINER:
            found: Mapping[str, Any] | None = (each.get("state") or {}).get("terminated")
            return found
    return None


class KubernetesGuest(Guest):
    """A Pod with a guest in it. `facts` belong into the metadata of every result.

    `destroy` removes the Pod, `end_of` asks for the API server's record of its end, and `stay` has
    it outlive this process. `echo` is what a guest says that another process has left, when it has
    heard us.
    """

    def __init__(
        self,
        stream: AttachedStream,
        *,
        container: str,
        found: Mapping[str, Any],
        facts: Mapping[str, Any],
        destroy: Callable[[], Awaitable[None]],
        end_of: Callable[[], Awaitable[End]],
        stay: Callable[[], Awaitable[None]],
        claim: Callable[[str], None],
        echo: bytes = b"",
    ) -> None:
        self.facts, self.container, self.found = facts, container, found
        self._stream = stream
        self._after = After(echo)
        self._destroy, self._ask_for_end, self._stay, self._claim = destroy, end_of, stay, claim
        self._channel: GuestChannel | None = None
        self._end = End()
        self._gone: asyncio.Future[None] | None = None

    async def open(self) -> GuestChannel:
        self._channel = await GuestChannel.open(
            self._stream.end, self._after.feed, self._note_the_end, greets=self._after.is_found
        )
        return self._channel

    async def stay(self) -> None:
        """Outlive this process, from now on. Raises SandboxError."""
        await self._stay()

    def leave(self) -> None:
        """Let go of it, and of nothing that is in it."""
        if self._gone is None:
            self._gone = asyncio.get_running_loop().create_future()
            self._gone.set_result(None)
            self._close()

    def evidence(self) -> ResourceUsage:
        return ResourceUsage(out_of_memory=self._end.out_of_memory)

    def memory_bytes(self) -> int | None:
        return None

    def complaint(self) -> str:
        return self._stream.complaint

    def last_words(self) -> str | None:
        if self._end.lost or self._end.exit_code is None:
            return None
        return f"Its container ended with exit code {self._end.exit_code}"

    @property
    def is_cut(self) -> bool:  # type: ignore[override]
        """Whether the connection has ended, and the Pod is not known to have."""
        channel = self._channel
        if channel is None or not (channel.ending or channel.closed.done()):
            return False
        return not self._end.lost and self._end.exit_code is None

    def watch(self, is_running: bool) -> None:
        """Nothing of a Pod is gone at its end that could be seen before."""

    def yield_processors(self, *, yields: bool) -> None:
        """Its weight is what its requests say."""

    def note_owner(self, owner: str) -> None:
        self._claim(owner)

    async def destroy(self) -> None:
        if self._gone is None:
            self._close()
            self._gone = asyncio.ensure_future(self._destroy())
        await asyncio.shield(self._gone)

    def _close(self) -> None:
        (self._channel or self._stream.end).close()

    async def _note_the_end(self) -> None:
        self._end = await self._ask_for_end()
