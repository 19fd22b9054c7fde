"""One sandbox: warmed up, given its request or its owner's requests, destroyed."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from providers.errors import (
    CreationFailed,
    ProviderUnavailable,
    before_the_code,
)
from providers.network import NETWORK, Attempt
from providers.runtime.guest import wire
from providers.runtime.pool.cgroup import ResourceUsage
from providers.runtime.pool.claims import LiveRun, observed, read_answer, readable
from providers.runtime.pool.launcher import (
    Guest,
    Starter,
    exhausted,
    hurried_when_late,
    start_deadline,
)
from providers.runtime.pool.network_access import FrameCarrier, NetworkAccess
from providers.runtime.pool.protocol import ChannelClosed, Frame, GuestChannel
from providers.runtime.pool.requests import answer_bytes, request_frame
from providers.runtime.pool.template import Template
from providers.sandbox import tell_afterwards
from providers.values import SANDBOX_ENDED, Emit, Event, ExecutionResult, Job, note

logger = logging.getLogger(__name__)

START_SECONDS = 30.0

# How long a guest may take to be clean and warm again after a run.
RENEWAL_SECONDS = 5.0

# How long after its deadline a guest may take to answer before the host ends it.
ANSWER_GRACE_SECONDS = 0.7

# How long after its end it may take to learn what a guest ended of: a busy engine needs it.
EVIDENCE_SECONDS = 3.0

# The exit code of a program that SIGKILL ended, as it does with all in a sandbox that ends.
KILLED = 137

_numbers = itertools.count(1)


class Sandbox:
    """A started guest, from warm to gone.

    It serves one request in its life, or those of one owner with a clean child for each.
    """

    def __init__(
        self,
        template: Template,
        guest: Guest,
        channel: GuestChannel,
        runtime: str,
        enforced_by: Mapping[str, str],
    ) -> None:
        self.number = next(_numbers)
        self.template = template
        self.runtime = runtime
        self.enforced_by = enforced_by
        self.owner = ""
        self.reusable = False
        self.kept = False
        self.running = False
        self.answered = False
        self.started_at = self.used_at = self.handed_out_at = time.monotonic()
        self._guest = guest
        self._channel = channel
        self._runs = 0
        self._refused_before = 0
        self._destroyed = False
        self._renewal: asyncio.Task[bool] | None = None
        self.network = NetworkAccess(guest.listener, runtime)

    @classmethod
    async def start(cls, launcher: Starter, template: Template) -> Sandbox:
        """A warm sandbox. Raises CreationFailed, saying what went wrong inside or outside.

        Raises RateLimited where the machine had too little left for it.
        """
        guest = await launcher.start(template)
        channel = None
        try:
            channel = await guest.open()
            async with start_deadline(START_SECONDS):
                # What a guest says once it is warm, or that it cannot be.
                with hurried_when_late(guest):
                    header, _ = await channel.receive()
            if header.get("type") == "failed":
                reason = f"Template {template.name!r}: {header.get('reason')}"
                raise exhausted(reason) if header.get("exhausted") else CreationFailed(reason)
            if header.get("type") != "ready":
                raise wire.FrameError("the guest's first frame is not 'ready'")
        except BaseException as error:
            complaint = guest.complaint()
            if channel is not None:
                # Before its socket is, whose number the next one may get.
                channel.close()
            await guest.destroy()
            if isinstance(error, ChannelClosed | wire.FrameError | TimeoutError):
                reason = complaint or str(error) or type(error).__name__
                raise CreationFailed(
                    f"{launcher.runtime}: sandbox did not start: {reason}"
                ) from error
            raise
        return cls(template, guest, channel, launcher.runtime, launcher.enforced_by)

    @property
    def alive(self) -> bool:
        return not self._channel.closed.done()

    @property
    def silent(self) -> bool:
        """Alive, and it has not said what nobody asked for."""
        return self._channel.silent

    @property
    def closed(self) -> asyncio.Future[None]:
        """Done when the guest has ended, whoever ended it."""
        return self._channel.closed

    def give_to(self, owner: str, *, reusable: bool) -> None:
        """Let it serve `owner`, and when `reusable` more than once. Never another owner again."""
        if self.owner and owner != self.owner:
            raise ValueError("a sandbox never serves two owners")
        self.owner = owner
        self.reusable = reusable and bool(owner)
        self.used_at = self.handed_out_at = time.monotonic()

    def hand_out(self, owner: str, *, reusable: bool) -> None:
        """The same, and now: what runs in it from here on is a caller's."""
        self.give_to(owner, reusable=reusable)
        self._guest.note_owner(owner)
        self._guest.yield_processors(yields=False)

    async def run(self, job: Job, emit: Emit | None = None) -> ExecutionResult:
        """Run it, and tell `emit` what it puts out as it comes.

        A sandbox that ends or misbehaves during the run is a verdict on the run.

        Raises ProviderUnavailable with `started` False when the sandbox cannot take the request,
        and with `started` True when it was we who ended it during the run.
        """
        with before_the_code():
            if self.running:
                raise ProviderUnavailable("The sandbox is running something already.")
        self.running = True
        try:
            with before_the_code():
                if self._runs and not (self.reusable and await self.renewed()):
                    raise ProviderUnavailable("The sandbox has had its one run.")
            if not self.network.is_open:
                return await self._run(job, emit)
            job = replace(job, environment=self.network.extend(job.environment))
            with self.network.watched(_noticed_by(emit)):
                try:
                    result = await self._run(job, emit)
                finally:
                    await self.network.close()
            result.metadata[NETWORK] = self.network.take_attempts().to_json()
            return result
        finally:
            self.running = False
            self.used_at = time.monotonic()

    async def renewed(self) -> bool:
        """Whether it is as it was before the last run, waiting until that is known."""
        if self._runs and self._renewal is None:
            return False
        return self._renewal is None or await asyncio.shield(self._renewal)

    @property
    def sharing(self) -> str:
        """Whom its owner's other runs find here, by a name of `providers.isolation.SHARINGS`."""
        return "tenant" if self.reusable else self._guest.sharing

    @property
    def has_run(self) -> bool:
        return self._runs > 0

    @property
    def destroyed(self) -> bool:
        """Whether it was we who ended it."""
        return self._destroyed

    @property
    def guest(self) -> Guest:
        """The hold on what is in it."""
        return self._guest

    def keep(self) -> GuestChannel:
        """Let it stay, for whoever speaks over the channel from now on. Nothing has run in it."""
        if self._runs:
            raise ValueError("a sandbox that has run code cannot become persistent")
        self._runs = 1
        self.kept = True
        self.reusable = False
        return self._channel

    def leave(self) -> None:
        """Let go of one that outlives this process. Raises TypeError for one that does not."""
        self._guest.leave()
        self._channel.close()

    async def destroy(self) -> None:
        """End it and everything in it."""
        self._destroyed = True
        self._guest.yield_processors(yields=True)
        self._channel.close()
        await self._guest.destroy()
        await self.network.close()

    async def _run(self, job: Job, emit: Emit | None) -> ExecutionResult:
        # Not to be guessed: what a guest says before it has the request cannot be its answer.
        request_id = secrets.randbits(53)
        live = LiveRun(request_id, job.limits, emit) if emit is not None else None
        carrier = self.network.carrier
        if carrier is not None:
            # Frames of the network may be under way when it has answered.
            self.reusable = False
            carrier.begin(self._channel)
        silent_end = partial(self.silent_end, live=live)
        with before_the_code():
            frame = request_frame(
                job,
                request_id,
                self.template.limits.memory_bytes,
                again=self.reusable,
                live=live is not None,
                network=carrier is not None,
            )
        self._runs += 1
        self._renewal = None
        before = self._guest.evidence()
        self._refused_before = before.refused_processes
        with before_the_code():
            try:
                self._channel.send(
                    frame,
                    answer_bytes(job.limits),
                    answers=2 if self.reusable else 1,
                    take_event=_receiver(live, carrier),
                )
            except (ChannelClosed, wire.FrameError) as error:
                raise ProviderUnavailable("The sandbox ended before the code was sent.") from error
        began = time.monotonic()
        self._guest.watch(True)
        try:
            answer = await self._answer_within(job.timeout + ANSWER_GRACE_SECONDS)
        except TimeoutError:
            return silent_end(time.monotonic() - began, timed_out=True)
        except ChannelClosed as error:
            seconds = time.monotonic() - began
            if self._destroyed:
                raise ProviderUnavailable(
                    "The sandbox was ended by the service during the run.", started=True
                ) from error
            if self._guest.evidence().out_of_memory:
                return silent_end(seconds, out_of_memory=True)
            if (seen := self._guest.last_words()) is None:
                raise ProviderUnavailable(
                    "The connection to the sandbox was lost during the run.", started=True
                ) from error
            return silent_end(seconds, ended=seen)
        except wire.FrameError as error:
            return silent_end(
                time.monotonic() - began,
                ended=f"It broke the protocol and was ended: {error}",
            )
        finally:
            self._guest.watch(False)
        if answer[0].get("type") != "result" or answer[0].get("id") != request_id:
            return silent_end(
                time.monotonic() - began,
                ended="It answered an unknown request, and was ended",
            )
        self.answered = True
        if not self.reusable:
            self._guest.yield_processors(yields=True)
        evidence = self._guest.evidence()
        if self.reusable and not evidence.out_of_memory:
            self._renewal = asyncio.get_running_loop().create_task(self._renew())
        if before.cpu_seconds is not None and evidence.cpu_seconds is not None:
            evidence = replace(evidence, cpu_seconds=evidence.cpu_seconds - before.cpu_seconds)
        evidence = self._of_this_run(evidence)
        if self._runs > 1:
            # The kernel's figure is the peak of all runs so far, the guest's that of this one.
            evidence = replace(evidence, memory_peak_bytes=None)
        result = read_answer(answer, job.limits, evidence, self.metadata())
        # A guest that was told nothing of events tells with its answer.
        return result if live is not None and live.has_told else tell_afterwards(result, emit)

    async def _answer_within(self, seconds: float) -> Frame:
        """The guest's answer. Raises TimeoutError, ChannelClosed, FrameError."""
        try:
            async with asyncio.timeout(seconds):
                return await self._channel.receive()
        except TimeoutError:
            if not self._channel.ending:
                raise
        # It ended in time; what it ended of is known a moment later.
        async with asyncio.timeout(EVIDENCE_SECONDS):
            return await self._channel.receive()

    def _of_this_run(self, evidence: ResourceUsage) -> ResourceUsage:
        """The kernel counts what it refused over all runs of the sandbox."""
        refused = max(0, evidence.refused_processes - self._refused_before)
        return replace(evidence, refused_processes=refused)

    async def _renew(self) -> bool:
        try:
            async with asyncio.timeout(RENEWAL_SECONDS):
                header, _ = await self._channel.receive()
        except (ChannelClosed, wire.FrameError, TimeoutError):
            return False
        if header.get("type") != "ready":
            logger.info(
                "sandbox not reused",
                extra={"template": self.template.name, "reason": str(header.get("reason"))},
            )
        return header.get("type") == "ready"

    def metadata(self) -> dict[str, Any]:
        """What is known of it before anything has run."""
        limits = self.template.limits
        return {
            "runtime": self.runtime,
            "template": self.template.name,
            "interpreter": self.template.interpreter,
            "enforced_by": dict(self.enforced_by),
            "limits": {"memory_bytes": limits.memory_bytes, "processes": limits.processes},
            **self._guest.facts,
        }

    def silent_end(
        self,
        seconds: float,
        *,
        live: LiveRun | None = None,
        timed_out: bool = False,
        out_of_memory: bool = False,
        ended: str = "",
    ) -> ExecutionResult:
        """The guest could not answer, and this is what the host itself saw of its end.

        What it had put out is in it where that was told. Whatever code does to its sandbox is the
        code's doing: `ended` says what was seen where neither time nor memory is known to be the
        reason.
        """
        evidence = self._guest.evidence()
        metadata = self.metadata()
        metadata["memory_peak_bytes"] = evidence.memory_peak_bytes
        # Of one that stays nobody knows what of it was this run's doing.
        if not self.kept:
            seen = self._of_this_run(evidence)
            note(metadata, observed({}, seen, self.template.limits.processes))
        stdout = stderr = ""
        outputs: list[dict[str, Any]] = []
        if live is not None:
            stdout, stderr = (readable(bytes(text)) for text in live.printed.values())
            outputs = [dict(output) for output in live.outputs]
        if ended:
            metadata[SANDBOX_ENDED] = ended
            stderr += f"The sandbox ended during the run. {ended}.\n"
        return ExecutionResult(
            stdout,
            stderr,
            KILLED if ended else None,
            seconds,
            metadata,
            timed_out=timed_out,
            out_of_memory=out_of_memory,
            outputs=outputs,
        )


def _noticed_by(emit: Emit | None) -> Callable[[Attempt], None] | None:
    if emit is None:
        return None
    return lambda attempt: emit(Event("network", attempt=attempt.to_json()))


def _receiver(live: LiveRun | None, carrier: FrameCarrier | None) -> Callable[[Frame], None] | None:
    """Return what takes the events of a run, None where none is due."""
    take = live.take if live is not None else None
    if carrier is None:
        return take

    def receive(frame: Frame) -> None:
        if frame[0].get("event") == "network":
            carrier.receive(frame)
        elif take is None:
            raise wire.FrameError("the guest sent an unrequested event")
        else:
            take(frame)

    return receive
