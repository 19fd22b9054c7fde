"""The pool services of one configuration, each on a host of its own: which of them is asked for a
new sandbox, and which one has a sandbox that is there already.

The emptier of two that are chosen at random is asked, by figures that are looked at behind the
requests. What it refuses goes to the next one while it is certain that nothing has run.
"""

from __future__ import annotations

import hashlib
import math
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar

from providers import waiting
from providers.addresses import normalized
from providers.credentials import Credential
from providers.errors import (
    ConnectionFailed,
    InvalidConfiguration,
    KeptFull,
    KeptSandboxLost,
    ProviderUnavailable,
    RateLimited,
    SandboxError,
    before_the_code,
)
from providers.schema import lines_of
from providers.self_managed.client import Handle, PoolClient, pause
from providers.self_managed.kept import ServiceSandbox
from providers.values import Emit, ExecutionResult, Job, SandboxSpec

T = TypeVar("T")

MOST_HOSTS = 32
# How old figures may be before they are looked at again, and how long one look may take.
LOOK_SECONDS = 0.25
ANSWER_SECONDS = 2.0
# A host that has not answered a look for so long is passed over until it does.
LATE_SECONDS = 1.0
# How long a host that failed is left alone: longer each time, until it answers.
FIRST_BACKOFF_SECONDS, LONGEST_BACKOFF_SECONDS = 0.5, 15.0
# How long the others are waited for once one host has answered.
OTHERS_SECONDS = 2.0

_NO_ANSWER = "It does not answer, or is no pool service. The log has the reason."
# What a sandbox's ref has between the key of its host and its name there.
_MARK = "."
_KEY_CHARACTERS = 16
# The figures of several hosts that are added up.
_SUMS = (
    *("capacity", "busy", "idle", "kept", "creating", "ending", "waiting", "started", "failed"),
    *("restarts", "refused", "instances", "sessions", "retired_pools"),
)
_OF_EACH = ("capacity", "busy", "waiting", "idle", "sessions", "instances", "runtime")


def key_of(address: str) -> str:
    """Return what names a host in the refs of its sandboxes, wherever it stands in the list."""
    return hashlib.sha256(normalized(address).encode()).hexdigest()[:_KEY_CHARACTERS]


def check_list(endpoint: object, drained: object) -> None:
    """Check the addresses of hosts, and those of them that are drained.

    Raises InvalidConfiguration with the field.
    """
    addresses = lines_of(endpoint)
    keys = [key_of(each) for each in addresses]
    if len(addresses) > MOST_HOSTS:
        _refuse("endpoint", f"Name {MOST_HOSTS} hosts at most.")
    for address, key in zip(addresses, keys, strict=True):
        if keys.count(key) > 1:
            _refuse("endpoint", f"{address} is named twice.")
    away = lines_of(drained)
    for address in away:
        if key_of(address) not in keys:
            _refuse("drained", f"{address} is not among the addresses of the pool services.")
    if addresses and {key_of(each) for each in away} == set(keys):
        _refuse("drained", "Leave one host that takes new sandboxes.")


def _refuse(field: str, problem: str) -> None:
    raise InvalidConfiguration(f"{field}: {problem}", field=field)


class Host:
    """One pool service, and what is known of it. Used from many threads."""

    def __init__(self, address: str, client: PoolClient, *, is_drained: bool = False) -> None:
        self.address = address
        self.key = key_of(address)
        self.client = client
        self.is_drained = is_drained
        self.problem = ""
        self._lock = threading.Lock()
        self._stats: Mapping[str, Any] | None = None
        self._told_at = float("-inf")
        self._asked_at: float | None = None
        # Sandboxes that were asked for since the figures were told.
        self._taken = 0
        self._failures = 0
        self._not_before = 0.0

    @property
    def stats(self) -> Mapping[str, Any]:
        """What it said last; nothing of a host that does not answer."""
        return self._stats or {}

    @property
    def is_alive(self) -> bool:
        """Whether it answers, as far as is known, and is not left alone for what it refused."""
        return self._answers and time.monotonic() >= self._not_before

    @property
    def _answers(self) -> bool:
        asked_at = self._asked_at
        is_late = asked_at is not None and time.monotonic() - asked_at > LATE_SECONDS
        return self._stats is not None and not is_late

    @property
    def load(self) -> float:
        """The part of it that is in use or waited for. More than 1 where callers wait."""
        capacity = _number(self.stats, "capacity")
        used = _number(self.stats, "busy") + _number(self.stats, "waiting") + self._taken
        return used / capacity if capacity else 0.0

    @property
    def is_full(self) -> bool:
        """Whether a caller would have to wait there."""
        return _number(self.stats, "capacity") > 0 and self.load >= 1

    @property
    def is_free(self) -> bool:
        """Whether it can be expected to have a sandbox at once."""
        return self.is_alive and self.stats.get("healthy") is True and not self.is_full

    @property
    def is_due(self) -> bool:
        """Whether it is to be looked at again."""
        if self._asked_at is not None:
            return False
        now = time.monotonic()
        rests = self._stats is None and now < self._not_before
        return not rests and now - self._told_at >= LOOK_SECONDS

    @property
    def free_again_at(self) -> float:
        return self._not_before

    def look(self) -> None:
        """Ask for its figures. What fails is noted."""
        try:
            self.ask(lambda: self.client.stats(ANSWER_SECONDS))
        except SandboxError:
            return

    def ask(self, call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the figures that a request has, and note them. Raises SandboxError."""
        with self._lock:
            taken, self._asked_at = self._taken, time.monotonic()
        try:
            stats = call()
        except SandboxError as error:
            self.note_failure(error)
            raise
        else:
            with self._lock:
                if self._stats is None:
                    self._failures, self._not_before = 0, 0.0
                self._stats, self._told_at = stats, time.monotonic()
                self._taken -= min(taken, self._taken)
                self.problem = str(stats.get("problem", ""))
            return stats
        finally:
            self._asked_at = None

    def note_start(self) -> None:
        """Count a sandbox that is being asked for."""
        with self._lock:
            self._taken += 1

    def note_success(self) -> None:
        """Note that it has handed out a sandbox."""
        with self._lock:
            self._failures, self._not_before = 0, 0.0

    def note_full(self) -> None:
        """Take it for full until it is looked at again."""
        with self._lock:
            self._taken += int(_number(self.stats, "capacity"))

    def note_failure(self, error: SandboxError) -> None:
        """Leave it alone for a while. One that has not answered itself is to be looked at first."""
        with self._lock:
            self._failures += 1
            longest = FIRST_BACKOFF_SECONDS * 2 ** min(self._failures - 1, 16)
            seconds = min(LONGEST_BACKOFF_SECONDS, longest) * random.uniform(0.75, 1.25)  # noqa: S311  no secret
            self._not_before = time.monotonic() + seconds
            # What else may be there is told to nobody who can enter an address.
            self.problem = error.message if error.answered == "proof" else _NO_ANSWER
            if error.answered != "proof":
                self._stats = None

    def described(self) -> dict[str, Any]:
        """Its address, its state, and its figures, for who configures it."""
        state = "full" if self.is_full else "ready"
        if not self._answers:
            state = "not answering"
        elif not self.is_alive or self.stats.get("healthy") is not True:
            state = "unhealthy"
        if self.is_drained:
            state = "drained" if self._answers else "drained, not answering"
        figures = {name: self.stats[name] for name in _OF_EACH if name in self.stats}
        return {"address": self.address, "state": state, "problem": self.problem, **figures}


class Hosts:
    """The pool services of one configuration. Has the methods of PoolClient, and its answers.

    With one alone there is no choice, and everything is as that client has it.
    """

    def __init__(self, hosts: Sequence[Host], retries: int, *, apart: bool = False) -> None:
        self.all = tuple(hosts)
        self.apart = apart
        self._retries = retries
        self._by_key = {host.key: host for host in self.all}
        self._open = tuple(host for host in self.all if not host.is_drained)

    @classmethod
    def of(
        cls, config: Mapping[str, Any], connect: Callable[[str, int | None], PoolClient]
    ) -> Hosts:
        """The hosts of a configuration; `connect` makes the client of an address, with how often it
        is to try a start again."""
        away = {key_of(each) for each in lines_of(config.get("drained"))}
        addresses = lines_of(config["endpoint"])
        # Of several, the next one is tried instead.
        own_retries = None if len(addresses) == 1 else 0
        hosts = [
            Host(each, connect(each.rstrip("/"), own_retries), is_drained=key_of(each) in away)
            for each in addresses
        ]
        return cls(hosts, config["max_retries"], apart=hosts[0].client.apart)

    def push(self) -> dict[str, Any]:
        """Have each service run with our configuration; their figures.

        Raises SandboxError where none of them does.
        """
        return self._of_any(self._open, lambda host: host.ask(host.client.push))

    def stats(self) -> dict[str, Any]:
        """The figures of all, now. Raises SandboxError where none answers."""
        return self._of_any(self.all, lambda host: host.ask(host.client.stats))

    def create(self, spec: SandboxSpec, owner: str) -> Handle:
        """A fresh instance at one of them. Raises SandboxError; nothing has run then."""
        host, handle = self._start(lambda client: client.create(spec, owner))
        return replace(handle, host=host.key)

    def keep(self, spec: SandboxSpec, owner: str) -> ServiceSandbox:
        """A new kept sandbox at one of them. Raises SandboxError; nothing has run then."""
        host, described = self._start(lambda client: client.keep(spec, owner, None))
        return ServiceSandbox(host.client, described, host.key + _MARK)

    def attach(self, ref: str) -> ServiceSandbox:
        """The kept sandbox of this ref, at its host. Raises KeptSandboxLost, also where its host is
        not one of ours."""
        host, name = self._place_of(ref)
        described = host.client.ask_of("GET", name)
        return ServiceSandbox(host.client, described, host.key + _MARK)

    def standing_of(self, ref: str) -> Literal["stays", "moves", "gone"]:
        """As `SandboxProvider.standing_of`."""
        key, mark, _ = ref.partition(_MARK)
        if not mark:
            # Of a release that had one host.
            return "stays"
        host = self._by_key.get(key)
        return "gone" if host is None else "moves" if host.is_drained else "stays"

    def run(self, handle: Handle, job: Job, emit: Emit | None = None) -> ExecutionResult:
        """As `PoolClient.run`, at the host of the instance."""
        host = self._host_of(handle)
        try:
            return host.client.run(handle, job, emit)
        except SandboxError as error:
            if error.answered != "proof" and isinstance(error, ConnectionFailed):
                host.note_failure(error)
            raise

    def destroy(self, handle: Handle) -> bool:
        """False when its service had no such instance."""
        return self._host_of(handle).client.destroy(handle)

    def change_credentials(self, changes: Mapping[str, Credential | None]) -> None:
        """Have all of them put in other versions of credentials.

        Raises SandboxError where one has not, once all were asked.
        """
        for done in self._at_once(self.all, lambda host: host.client.change_credentials(changes)):
            done.result()

    @property
    def is_full(self) -> bool:
        """Whether all that answer are full, as they had it a quarter of a second ago at most."""
        for host in self._open:
            if host.is_due:
                host.look()
        alive = [host for host in self._open if host.is_alive]
        return bool(alive) and all(host.is_full for host in alive)

    @property
    def are_several(self) -> bool:
        return len(self.all) > 1

    def close(self) -> None:
        for host in self.all:
            host.client.close()

    def _start(self, start: Callable[[PoolClient], T]) -> tuple[Host, T]:
        """What the first host that can hands out. Raises SandboxError; nothing has run then."""
        if not self.are_several:
            return self.all[0], start(self.all[0].client)
        began = time.monotonic()
        for attempt in range(self._retries + 1):
            refused: SandboxError | None = None
            full: RateLimited | None = None
            for host in self._order():
                if full is not None and not (host.is_free or isinstance(full, KeptFull)):
                    continue
                host.note_start()
                try:
                    started = start(host.client)
                except RateLimited as error:
                    full = error
                    if not isinstance(error, KeptFull):
                        host.note_full()
                        if time.monotonic() - began > LATE_SECONDS:
                            # It was waited for in one queue: nobody waits in all of them in turn.
                            raise
                except InvalidConfiguration:
                    raise
                except SandboxError as error:
                    host.note_failure(error)
                    refused = error
                    if error.started:
                        raise
                else:
                    host.note_success()
                    return host, started
            if full is not None:
                raise full
            if refused is None:
                raise ProviderUnavailable("No host takes new sandboxes.")
            if attempt == self._retries or not refused.may_retry:
                raise refused
            pause(attempt)
        raise AssertionError("unreachable")

    def _order(self) -> list[Host]:
        """In which order they are asked: those that are free, then those that are not. One that
        does not answer is asked only where no other does."""
        self._look_behind()
        free = [host for host in self._open if host.is_free]
        random.shuffle(free)
        free[:2] = sorted(free[:2], key=lambda host: host.load)
        taken = [host for host in self._open if host.is_alive and host not in free]
        taken.sort(key=lambda host: (host.stats.get("healthy") is not True, host.load))
        if found := free + taken:
            return found
        now = time.monotonic()
        due = [host for host in self._open if host.free_again_at <= now]
        return due or [min(self._open, key=lambda host: host.free_again_at)]

    def _look_behind(self) -> None:
        """Have figures that have grown old looked at, while requests go on with what is known."""
        for host in self._open:
            if host.is_due:
                try:
                    waiting.submit(host.look, may_refuse=True)
                except RateLimited:
                    # Too much is waited for: the figures stay as old as they are.
                    return

    def _of_any(
        self, hosts: Sequence[Host], ask: Callable[[Host], dict[str, Any]]
    ) -> dict[str, Any]:
        """The figures of all that answer soon. Raises SandboxError where none does."""
        if not self.are_several:
            return ask(self.all[0])
        begun = self._at_once(hosts, ask)
        if answered := [host for host in hosts if host.is_alive]:
            return merged(self.all, answered)
        for each in begun:
            if each.done():
                each.result()
        raise ProviderUnavailable("No pool service answers in time.")

    def _at_once(self, hosts: Iterable[Host], ask: Callable[[Host], T]) -> list[Future[T]]:
        """Ask all side by side. Once one has answered, the rest is waited for a little; what has
        not ended by then goes on."""
        begun = [waiting.submit(partial(ask, host)) for host in hosts]
        left = set(begun)
        while left:
            done, left = wait_for(left, return_when="FIRST_COMPLETED")
            if any(each.exception() is None for each in done):
                break
        wait_for(left, OTHERS_SECONDS)
        return begun

    def _host_of(self, handle: Handle) -> Host:
        return self._by_key[handle.host]

    def _place_of(self, ref: str) -> tuple[Host, str]:
        """A sandbox's host and its name there. Raises KeptSandboxLost.

        A ref says where a sandbox is among the hosts that are configured, and no address.
        """
        key, mark, name = ref.partition(_MARK)
        host = self._by_key.get(key)
        if not mark and not self.are_several:
            host, name = self.all[0], ref
        if host is None:
            with before_the_code():
                raise KeptSandboxLost(
                    "The sandbox does not exist any more: its host was removed from the "
                    "configuration."
                )
        return host, name


def merged(hosts: Sequence[Host], answered: Sequence[Host]) -> dict[str, Any]:
    """The figures of several hosts in one, and each of `hosts` by itself. What takes no new
    sandboxes is in no sum."""
    open_ones = [host for host in answered if not host.is_drained] or list(answered)
    told = [host.stats for host in open_ones]
    healthy = [each for each in told if each.get("healthy") is True]
    problems = [f"{host.address}: {host.problem}" for host in open_ones if host.problem]
    enforced: dict[str, str] = {}
    for each in told:
        for name, by in dict(each.get("enforced_by") or {}).items():
            if str(by) not in enforced.setdefault(name, str(by)).split(" / "):
                enforced[name] += f" / {by}"
    return {
        **{name: sum(_number(each, name) for each in told) for name in _SUMS},
        "creation_ms": max(_number(each, "creation_ms") for each in told),
        "healthy": bool(healthy),
        "problem": "" if healthy else " ".join(problems),
        "launcher": _together(told, "launcher"),
        "runtime": _together(told, "runtime"),
        "enforced_by": enforced,
        "languages": _common(told, "languages"),
        "template_bases": _common(told, "template_bases"),
        "network": all(each.get("network") is True for each in told),
        "has_templates": all(each.get("has_templates") is True for each in told),
        "hosts": [host.described() for host in hosts],
    }


def _together(told: Sequence[Mapping[str, Any]], name: str) -> str:
    return " and ".join(sorted({str(each[name]) for each in told if each.get(name)}))


def _common(told: Sequence[Mapping[str, Any]], name: str) -> list[str]:
    first, *others = ([str(value) for value in each.get(name) or ()] for each in told)
    return [value for value in first if all(value in other for other in others)]


def _number(stats: Mapping[str, Any], name: str) -> int | float:
    value = stats.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return 0
    return value if 0 < value < math.inf else 0
