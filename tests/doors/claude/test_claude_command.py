"""`manage.py claude_worker`, and `up`, which starts it: what they are told wrongly."""

from __future__ import annotations

from typing import Any

import pytest
from django.core.management import CommandError, call_command

from executions.tenants import keys
from sandbox_site.management.commands.up import _claude_workers
from tests.conftest import Caller


@pytest.mark.parametrize(
    ("arguments", "options", "problem"),
    [
        ("agents", {}, "TENANT/NAME"),
        ("wonderland/", {}, "TENANT/NAME"),
        ("wonderland/agents", {"parallel": 0}, "--parallel"),
        ("wonderland/agents", {"parallel": 1000}, "--parallel"),
        ("wonderland/agents", {"key": "no"}, "no valid API key 'no'"),
        ("elsewhere/agents", {}, "no valid API key"),
        ("wonderland/agents", {"network": "a b"}, "network"),
        ("wonderland/agents", {"idle_seconds": "soon"}, "idle_seconds"),
    ],
)
def test_what_it_is_told_wrongly_is_said(
    alice: Caller, arguments: str, options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(CommandError, match=problem):
        call_command("claude_worker", arguments, **{"key": "alice", **options})


def test_a_key_that_is_revoked_starts_no_worker(alice: Caller) -> None:
    keys.revoke(keys.create_api_key(alice.tenant, "former")[0])
    with pytest.raises(CommandError, match="no valid API key"):
        call_command("claude_worker", "wonderland/agents", key="former")


def test_the_service_starts_a_worker_for_each_text() -> None:
    texts = ["demo/a --key 'my key'", "demo/b --key b", "demo/b --key b"]
    found = _claude_workers(texts, "manage.py")
    assert [command[2:] for command in found.values()] == [
        ["claude_worker", "demo/a", "--key", "my key"],
        ["claude_worker", "demo/b", "--key", "b"],
        ["claude_worker", "demo/b", "--key", "b"],
    ]


def test_a_text_that_cannot_be_read_starts_nothing() -> None:
    with pytest.raises(CommandError, match="--claude-worker"):
        _claude_workers(["demo/a --key 'my key"], "manage.py")
