"""Processes wait for a client whose connection broke, and end when it does not come back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any
from uuid import UUID

import pytest

from executions.doors.codex import attachments
from executions.doors.codex.attachments import Attachment, Attachments
from executions.doors.codex.messages import Failure

SESSION = UUID("01a1fd3e-5869-7be3-b4ad-c3848c823008")


class _Holder:
    async def notify(self, method: str, params: Mapping[str, Any]) -> None:
        raise AssertionError("nothing is told")


async def _call(work: Callable[[], Any], /) -> Any:
    raise AssertionError("nothing is done")


def watch_end(attachment: Attachment) -> asyncio.Event:
    """Set when its processes are ended."""
    ended = asyncio.Event()

    async def end(on_session: Any) -> None:
        ended.set()

    attachment.processes.end = end  # type: ignore[method-assign]
    return ended


def test_processes_end_when_nobody_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attachments, "DETACHED_SECONDS", 0.01)

    async def leave() -> None:
        known = Attachments()
        attachment = known.attach(SESSION, _Holder(), _call)
        ended = watch_end(attachment)
        known.detach(attachment)
        await asyncio.wait_for(ended.wait(), 60)
        # Whoever comes later has the session, and no processes of before.
        assert known.attach(SESSION, _Holder(), _call) is not attachment

    asyncio.run(leave())


def test_who_comes_back_in_time_finds_them() -> None:
    async def come_back() -> None:
        known = Attachments()
        attachment = known.attach(SESSION, _Holder(), _call)
        ended = watch_end(attachment)
        known.detach(attachment)
        expiry = attachment.expiry
        assert known.attach(SESSION, _Holder(), _call) is attachment
        assert expiry is not None
        assert expiry.cancelled()
        assert not ended.is_set()

    asyncio.run(come_back())


def test_a_session_has_one_connection() -> None:
    async def attach_twice() -> None:
        known = Attachments()
        known.attach(SESSION, _Holder(), _call)
        with pytest.raises(Failure, match="already attached") as problem:
            known.attach(SESSION, _Holder(), _call)
        assert problem.value.code == -32010

    asyncio.run(attach_twice())
