"""Webhooks of calls of tools: how many are sent at once, and whose."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from executions.capabilities.tools import calls
from executions.capabilities.tools.models import ToolCall
from tests.support.sessions import wait_for


def test_webhooks_of_one_tenants_calls_leave_room_for_those_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A receiver that never answers has two threads, and what waits for them is asked again."""
    sender, ends, sent = calls._Sender(), threading.Event(), []

    def send(message: Any) -> int:
        sent.append(message)
        if message == "slow":
            assert ends.wait(60)
        return 200

    def told(number: int, tenant: str, message: Any, waits: bool = True) -> Any:
        call = ToolCall(tenant_slug=tenant)
        return calls._Notification(0.0, number, call, message, lambda: waits)

    monkeypatch.setattr(calls, "send", send)
    for number in range(calls.MOST_WAITING + 10):
        sender.take(told(number, "slow", "slow"))
    wait_for(lambda: len(sent) == calls.MOST_OF_ONE)
    sender.take(told(1000, "other", "quick"))
    sender.take(told(1001, "other", "over", waits=False))
    wait_for(lambda: "quick" in sent)
    assert sent.count("slow") == calls.MOST_OF_ONE
    assert len(sender._waiting["slow"]) <= calls.MOST_WAITING
    assert sender._threads <= calls.MOST
    ends.set()
    wait_for(lambda: not any(sender._waiting.values()))
    assert "over" not in sent
