"""One sandbox: warmed up, given one request, destroyed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import mimetypes
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from providers.base import ArtifactFile, ExecutionResult, InputFile, Limits
from providers.errors import CreationFailed, InvalidConfiguration, ProviderUnavailable
from providers.guest import wire
from providers.pool.channel import ChannelClosed, Frame, GuestChannel
from providers.pool.launcher import Guest, Launcher
from providers.pool.template import Template

START_SECONDS = 30.0

# How long after its deadline a guest may take to answer before the host ends it.
ANSWER_GRACE_SECONDS = 0.7

_numbers = itertools.count(1)


@dataclass(frozen=True)
class RunRequest:
    """What one sandbox is asked to run. `timeout` is seconds."""

    code: str
    entrypoint: str
    timeout: float
    arguments: Mapping[str, Any] | None
    files: Sequence[InputFile]
    limits: Limits

    @property
    def answer_bytes(self) -> int:
        """The most that an answer within the limits can hold."""
        limits = self.limits
        return 2 * limits.output_bytes + limits.result_bytes + limits.artifacts_total_bytes

    def frame(self, request_id: int) -> bytes:
        """The request as the guest reads it. Raises InvalidConfiguration naming the field."""
        limits = self.limits
        header = {
            "id": request_id,
            "entrypoint": self.entrypoint,
            "timeout": self.timeout,
            "limits": {
                "memory_bytes": limits.memory_bytes,
                "output_bytes": limits.output_bytes,
                "result_bytes": limits.result_bytes,
                "artifact_count": limits.artifact_count,
                "artifact_bytes": limits.artifact_bytes,
                "artifacts_total_bytes": limits.artifacts_total_bytes,
            },
        }
        with _refusing("code"):
            parts = [("code", self.code.encode())]
        if self.arguments:
            with _refusing("arguments"):
                parts.append(("arguments", wire.dumps(dict(self.arguments)).encode()))
        parts += [(f"file:{file.path}", file.content) for file in self.files]
        with _refusing("files"):
            frame = wire.pack(header, parts)
            names = int.from_bytes(frame[:4], "big")
            if names > wire.HEADER_LIMIT or len(frame) - names > wire.REQUEST_LIMIT:
                raise ValueError("too many or too large")
        return frame


@contextlib.contextmanager
def _refusing(field: str) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidConfiguration(f"{field}: cannot be sent: {error}", field=field) from error


class Sandbox:
    """A started guest, from warm to gone. Serves one request in its life."""

    def __init__(
        self, template: Template, guest: Guest, channel: GuestChannel, runtime: str
    ) -> None:
        self.number = next(_numbers)
        self.template = template
        self.runtime = runtime
        self.started_at = time.monotonic()
        self._guest = guest
        self._channel = channel
        self._used = False

    @classmethod
    async def start(cls, launcher: Launcher, template: Template) -> Sandbox:
        """A warm sandbox. Raises CreationFailed, with what the isolation tool complained of."""
        guest = await launcher.start(template)
        channel = None
        try:
            channel = await GuestChannel.open(guest.channel)
            async with asyncio.timeout(START_SECONDS):
                header, _ = await channel.receive()
            if header.get("type") != "ready":
                raise wire.FrameError("the guest's first frame is not 'ready'")
        except BaseException as error:
            complaint = guest.complaint()
            if channel:
                channel.close()
            await guest.destroy()
            if isinstance(error, ChannelClosed | wire.FrameError | TimeoutError):
                reason = complaint or str(error) or type(error).__name__
                raise CreationFailed(
                    f"{launcher.runtime}: sandbox did not start: {reason}"
                ) from error
            raise
        return cls(template, guest, channel, launcher.runtime)

    @property
    def alive(self) -> bool:
        return self._channel.silent

    @property
    def closed(self) -> asyncio.Future[None]:
        """Done when the guest has ended, whoever ended it."""
        return self._channel.closed

    async def run(self, request: RunRequest) -> ExecutionResult:
        """Run it. Raises ProviderUnavailable when the sandbox ends or misbehaves without a verdict.

        One that was used already or ended before it had the request raises with `started` False:
        nothing of the request ran.
        """
        if self._used:
            raise ProviderUnavailable("The sandbox has had its one run.")
        frame = request.frame(self.number)
        self._used = True
        try:
            self._channel.send(frame, request.answer_bytes)
        except (ChannelClosed, wire.FrameError) as error:
            raise ProviderUnavailable("The sandbox ended before the code was sent.") from error
        began = time.monotonic()
        try:
            async with asyncio.timeout(request.timeout + ANSWER_GRACE_SECONDS):
                answer = await self._channel.receive()
        except TimeoutError:
            return self._silent_end(time.monotonic() - began, timed_out=True)
        except ChannelClosed as error:
            if self._guest.evidence().out_of_memory:
                return self._silent_end(time.monotonic() - began, out_of_memory=True)
            raise ProviderUnavailable(
                "The sandbox was ended from outside during the run.", started=True
            ) from error
        except wire.FrameError as error:
            raise ProviderUnavailable(
                f"The sandbox broke the protocol and was ended: {error}", started=True
            ) from error
        return self._read_answer(answer, request)

    async def destroy(self) -> None:
        """End it and everything in it."""
        self._channel.close()
        await self._guest.destroy()

    def _metadata(self, limits: Limits) -> dict[str, Any]:
        return {
            "runtime": self.runtime,
            "template": self.template.name,
            "limits": {"memory_bytes": limits.memory_bytes, "processes": limits.processes},
        }

    def _silent_end(
        self, seconds: float, *, timed_out: bool = False, out_of_memory: bool = False
    ) -> ExecutionResult:
        """The guest could not answer, but the host itself saw why it ended."""
        evidence = self._guest.evidence()
        metadata = self._metadata(self.template.limits)
        metadata["memory_peak_bytes"] = evidence.memory_peak_bytes
        return ExecutionResult(
            "", "", None, seconds, metadata, timed_out=timed_out, out_of_memory=out_of_memory
        )

    def _read_answer(self, frame: Frame, request: RunRequest) -> ExecutionResult:
        header, parts = frame
        if header.get("type") != "result" or header.get("id") != self.number:
            raise ProviderUnavailable("The sandbox answered another request.", started=True)
        evidence = self._guest.evidence()
        exit_code = _exit_code(header.get("exit_code"))
        timed_out = header.get("timed_out") is True
        out_of_memory = header.get("out_of_memory") is True
        if evidence.out_of_memory and exit_code != 0 and not timed_out:
            out_of_memory = True
        if timed_out or out_of_memory:
            exit_code = None
        metadata = self._metadata(request.limits)
        claimed_peak = _measured(header.get("memory_peak_bytes"))
        metadata["memory_peak_bytes"] = evidence.memory_peak_bytes or claimed_peak
        metadata["cpu_seconds"] = _measured(header.get("cpu_seconds"))
        if skipped := _skipped(header.get("artifacts_skipped")):
            metadata["artifacts_skipped"] = skipped
        bound = request.limits.output_bytes
        stdout, stderr = parts.get("stdout", b""), parts.get("stderr", b"")
        result = ExecutionResult(
            stdout=_readable(stdout[:bound]),
            stderr=_readable(stderr[:bound]),
            exit_code=exit_code,
            execution_time=float(_measured(header.get("seconds")) or 0),
            metadata=metadata,
            stdout_truncated=header.get("stdout_truncated") is True or len(stdout) > bound,
            stderr_truncated=header.get("stderr_truncated") is True or len(stderr) > bound,
            timed_out=timed_out,
            out_of_memory=out_of_memory,
            artifacts=_artifacts(parts, request.limits),
        )
        if "result" in parts and exit_code == 0:
            try:
                result.result = _parse_result(parts["result"], request.limits.result_bytes)
                result.has_result = True
            except (ValueError, RecursionError) as error:
                result.exit_code = 1
                result.stderr += f"\nthe returned value is not JSON: {error}"
        return result


def _readable(output: bytes) -> str:
    """Text that every database can hold: invalid UTF-8 and NUL become U+FFFD."""
    return output.decode("utf-8", "replace").replace("\0", "\ufffd")


def _exit_code(claimed: object) -> int | None:
    return claimed if type(claimed) is int and 0 <= claimed <= 255 else None


def _measured(claimed: object) -> int | float | None:
    if type(claimed) in (int, float) and 0 <= claimed < 2**53:  # type: ignore[operator]
        return claimed  # type: ignore[return-value]
    return None


def _skipped(claimed: object) -> list[list[str]]:
    """The [name, reason] pairs of what was not taken, as far as they are that."""
    return [
        [entry[0][:200], entry[1][:200]]
        for entry in (claimed[:50] if isinstance(claimed, list) else [])
        if isinstance(entry, list)
        and len(entry) == 2
        and all(isinstance(text, str) and text.isprintable() for text in entry)
    ]


def _parse_result(text: bytes, limit: int) -> Any:
    """The value of a JSON text. Raises ValueError or RecursionError when it is not JSON."""
    if len(text) > limit:
        raise ValueError(f"{len(text)} bytes are over the limit of {limit}")
    value = json.loads(text.decode())
    # Writing it again refuses what the parser let through: NaN, 1e999 and lone surrogates.
    json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    return value


def _artifacts(parts: Mapping[str, bytes], limits: Limits) -> list[ArtifactFile]:
    """The claimed artifacts that keep to the limits. A name is only a name: no path comes of it."""
    found: list[ArtifactFile] = []
    room = limits.artifacts_total_bytes
    for part, content in parts.items():
        name = part.removeprefix("artifact:")
        safe = name.isprintable() and ".." not in name.split("/") and not name.startswith("/")
        if part == name or not safe or not 0 < len(name) <= 500:
            continue
        if len(found) >= limits.artifact_count or len(content) > min(limits.artifact_bytes, room):
            continue
        room -= len(content)
        mime_type = mimetypes.guess_type(name)[0] or "application/octet-stream"
        found.append(ArtifactFile(name, mime_type, content))
    return found
