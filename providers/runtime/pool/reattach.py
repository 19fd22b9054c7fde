"""A kept sandbox that outlives its pool's process: how it is told, and how it is found again."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from providers.errors import CreationFailed
from providers.runtime.guest import wire
from providers.runtime.pool.conversation import Conversation, ConversationEnded, Refused
from providers.runtime.pool.kept import Kept
from providers.runtime.pool.launcher import Guest, Launcher
from providers.runtime.pool.sandbox import Sandbox
from providers.runtime.pool.state_store import GRACE_SECONDS, SandboxRecord
from providers.runtime.pool.template import Template

# Long enough that nobody guesses one, nor says one by chance.
MARK_BYTES = 32
# How long a guest may take to stop what ran, and to answer whoever has found it.
RESUME_SECONDS = 15.0


def new_marker() -> str:
    """In hexadecimal digits, as `protocol` has it."""
    return secrets.token_hex(MARK_BYTES)


def lasting(marker: str, seconds: float) -> Mapping[str, object]:
    """What a guest is told at first: `seconds` is its lease."""
    return {"marker": marker, "seconds": guest_seconds(seconds)}


def guest_seconds(left: float) -> float:
    """How long a guest lives by itself, when so much is left of its lease."""
    return max(0.0, left) + GRACE_SECONDS


async def find_again(launcher: Launcher, remembered: SandboxRecord, template: Template) -> Kept:
    """The sandbox as it was, without what was under way in it.

    Raises CreationFailed for one that has ended, is not what it was, or does not answer, and
    ProviderUnavailable where that cannot be known now.
    """
    echo = secrets.token_bytes(MARK_BYTES)
    guest = await launcher.adopt(remembered.container, remembered.runtime, remembered.found, echo)
    sandbox = await _opened(launcher, guest, template, remembered.runtime)
    try:
        conversation = Conversation(sandbox.keep())
        conversation.tell_bytes(bytes.fromhex(remembered.marker))
        asked = {"echo": echo.hex(), "seconds": guest_seconds(remembered.left)}
        await conversation.ask("resume", asked, seconds=RESUME_SECONDS)
    except (ConversationEnded, Refused, wire.FrameError, TimeoutError) as error:
        sandbox.leave()
        raise CreationFailed(f"It does not answer: {str(error) or 'it was silent'}.") from error
    except BaseException:
        sandbox.leave()
        raise
    return Kept(sandbox, conversation)


async def _opened(launcher: Launcher, guest: Guest, template: Template, runtime: str) -> Sandbox:
    channel = await guest.open()
    return Sandbox(template, guest, channel, runtime, launcher.enforced_by)
