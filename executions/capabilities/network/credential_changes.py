"""Changed and revoked credentials, on their way to sandboxes that run.

Who changes one in this process has it sent to the providers of this process at once. For changes
of other processes a thread looks each second, as long as there is a run that was given some.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from weakref import WeakKeyDictionary, WeakSet

from django.views.decorators.debug import sensitive_variables

from executions.capabilities.network import credentials
from providers.base import SandboxProvider
from providers.credentials import Credential, changes_to_json
from providers.errors import SandboxError
from providers.manager import loaded
from providers.threads import Loop, NoThreadLeft, reset_after_fork, start_thread

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
# How long an administrator, or the next look, waits for providers.
SEND_SECONDS = 3.0
# Of one message: services take bodies of a mebibyte, and of so many values.
MESSAGE_BYTES = 256 * 1024
MESSAGE_CREDENTIALS = 500


class Holder:
    """A run whose sandbox was given credentials: their versions by id."""

    def __init__(self, provider: SandboxProvider, versions: Mapping[str, int]) -> None:
        self.provider = provider
        self.versions = dict(versions)


_holders: set[Holder] = set()
_busy: WeakSet[SandboxProvider] = WeakSet()
# What came meanwhile for those that are busy: the newest of each credential.
_waiting: WeakKeyDictionary[SandboxProvider, dict[str, Credential | None]] = WeakKeyDictionary()
_lock = threading.Lock()


def register(holder: Holder) -> None:
    """Have changes of its credentials sent to its provider, until it is taken out."""
    with _lock:
        _holders.add(holder)
    _loop.start_if_possible()


def unregister(holder: Holder) -> None:
    with _lock:
        _holders.discard(holder)


def spread(credential_id: str) -> None:
    """Send one credential, as it is in force now, to all providers of this process.

    What fails is logged.
    """
    # What is kept of all may have been looked up before the commit, by another thread.
    change = {credential_id: credentials.read_in_force(credential_id)}
    providers = {id(lease.provider): lease.provider for lease in loaded()}
    send(dict.fromkeys(providers.values(), change))


def look() -> float | None:
    """Send what has changed since runs of this process were given credentials.

    Returns the pause until the next look, None without such a run.
    """
    with _lock:
        holders = list(_holders)
    if not holders:
        return None
    in_force = credentials.all_in_force()
    now = {holder: _versions(holder.versions, in_force) for holder in holders}
    changes: dict[SandboxProvider, dict[str, Credential | None]] = {}
    for holder, versions in now.items():
        for each, version in versions.items():
            if version != holder.versions[each]:
                changes.setdefault(holder.provider, {})[each] = in_force.get(each)
    took = send(changes)
    for holder, versions in now.items():
        if holder.provider in took:
            holder.versions = versions
    return LOOK_SECONDS


def _versions(ids: Iterable[str], in_force: Mapping[str, Credential]) -> dict[str, int]:
    """Their versions in force, -1 of those that are not."""
    return {each: in_force[each].version if each in in_force else -1 for each in ids}


def send(
    changes: Mapping[SandboxProvider, Mapping[str, Credential | None]],
    seconds: float = SEND_SECONDS,
) -> set[SandboxProvider]:
    """Send changes to each provider in a thread of its own, and return those that have taken them.

    Waits for `seconds` at most. What fails or hangs is logged; one that hangs gets no second
    thread, and the changes when it has taken the former ones.
    """
    took: set[SandboxProvider] = set()
    threads = []
    for provider, wanted in changes.items():
        if (thread := _start(provider, wanted, took)) is not None:
            threads.append(thread)
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        logger.error("A provider takes longer than %g s for changed credentials.", seconds)
    return set(took)


def _start(
    provider: SandboxProvider,
    changes: Mapping[str, Credential | None],
    took: set[SandboxProvider],
) -> threading.Thread | None:
    with _lock:
        if provider in _busy:
            _waiting.setdefault(provider, {}).update(changes)
            logger.error("The provider %r still hangs over changed credentials.", provider.id)
            return None
        _busy.add(provider)
    return _begin(provider, changes, took)


def _begin(
    provider: SandboxProvider,
    changes: Mapping[str, Credential | None],
    took: set[SandboxProvider],
) -> threading.Thread | None:
    try:
        return start_thread(
            "credential-change",
            partial(_send, provider, changes, took),
            at_end=partial(_note_end, provider),
        )
    except NoThreadLeft as error:
        logger.error("%s", error.message)
        return None


def _send(
    provider: SandboxProvider,
    changes: Mapping[str, Credential | None],
    took: set[SandboxProvider],
) -> None:
    has_all = True
    for part in _parts(changes):
        try:
            provider.change_credentials(part)
        except SandboxError as error:
            # What it does not take must not hold up a revocation in another part.
            has_all = False
            logger.error(
                "The provider %r did not take changed credentials: %s", provider.id, error.message
            )
    if has_all:
        took.add(provider)


@sensitive_variables()
def _parts(changes: Mapping[str, Credential | None]) -> Iterator[dict[str, Credential | None]]:
    """Changes in messages of a bounded size, those that take a credential away first."""
    part: dict[str, Credential | None] = {}
    room = MESSAGE_BYTES
    for each, now in sorted(changes.items(), key=lambda change: change[1] is not None):
        size = len(json.dumps(changes_to_json({each: now})))
        if part and (size > room or len(part) >= MESSAGE_CREDENTIALS):
            yield part
            part, room = {}, MESSAGE_BYTES
        part[each] = now
        room -= size
    if part:
        yield part


def _note_end(provider: SandboxProvider) -> None:
    with _lock:
        waiting = _waiting.pop(provider, None)
        if waiting is None:
            _busy.discard(provider)
            return
    _begin(provider, waiting, set())


def _forget() -> None:
    global _lock
    _lock = threading.Lock()
    _holders.clear()
    _busy.clear()
    _waiting.clear()


_loop = Loop("credential-changes", look)
reset_after_fork(_forget)
credentials.on_change(spread)
