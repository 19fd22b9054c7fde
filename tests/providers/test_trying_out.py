"""Trying a configuration really runs code, disturbs nobody, ends in time and tells no secret."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from django.db import connection

from providers import registry
from providers.errors import InvalidConfiguration
from providers.models import ProviderHealth
from providers.services import save_config, trial
from providers.services.breaker import NOT_REACHABLE
from providers.services.health import check_all
from providers.services.trial import try_provider
from tests.conftest import Caller
from tests.support.provider_package import Packages, install_probe
from tests.support.running import LOCAL, run

pytestmark = pytest.mark.django_db

TOKEN = "tok-0123456789-wxyz"
GOOD = {"endpoint": "http://a", "token": TOKEN}


@pytest.fixture(autouse=True)
def probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    name = f"trying_{tmp_path.name}"
    install_probe(Packages(tmp_path, monkeypatch), name)
    registry.get("probe")
    yield import_module(name)
    registry.refresh()


@pytest.mark.django_db(transaction=True)
def test_what_is_running_is_not_disturbed_by_a_try_or_a_check(
    local_active: None, alice: Caller
) -> None:
    answers: list[int] = []

    def call() -> None:
        answers.append(run(alice, "import time; time.sleep(1)").status_code)
        connection.close()

    caller = threading.Thread(target=call)
    assert run(alice, "print(1)").json()["stdout"] == "1\n"
    caller.start()
    tried = try_provider("local", LOCAL | {"pool_size": 1})
    assert tried.success, tried
    assert check_all() == 1
    caller.join()
    assert answers == [200]
    assert run(alice, "print(2)").json()["stdout"] == "2\n"


def test_a_backend_that_never_answers_is_given_up(
    probe: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trial, "DEADLINE_SECONDS", 0.2)
    probe.gate.clear()
    try:
        tried = try_provider("probe", GOOD | {"behaviour": "wait"})
    finally:
        probe.gate.set()
    assert (tried.success, tried.message) == (False, NOT_REACHABLE)
    assert "0.2 s" in caplog.text


def test_a_sandbox_that_does_not_run_the_program_did_not_work(probe: Any) -> None:
    tried = try_provider("probe", GOOD)
    assert (tried.success, tried.code) == (False, "SB009")
    assert "'42'" in tried.message
    assert [started.closed for started in probe.started] == [True]


@pytest.mark.parametrize("said", ["SandboxError", "RuntimeError"])
def test_a_secret_that_a_backend_quotes_is_not_passed_on(
    said: str, probe: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def initialize(self: Any, config: dict[str, Any]) -> bool:
        text = f"refused {config['token']}"
        raise probe.ConnectionFailed(text) if said == "SandboxError" else RuntimeError(text)

    monkeypatch.setattr(probe.Probe, "initialize", initialize)
    tried = try_provider("probe", GOOD)
    save_config("probe", GOOD)
    check_all()
    kept = ProviderHealth.objects.get()
    assert not tried.success
    assert not kept.healthy
    assert TOKEN not in f"{tried} {kept.message} {caplog.text}"


def test_the_stored_configuration_completes_what_is_tried(probe: Any) -> None:
    save_config("probe", GOOD)
    try_provider("probe", {"endpoint": "http://a", "size": 5, "token": "••••wxyz"})
    assert (probe.started[-1].config["token"], probe.started[-1].config["size"]) == (TOKEN, 5)
    try_provider("probe")
    assert probe.started[-1].config["endpoint"] == "http://a"
    with pytest.raises(InvalidConfiguration):
        try_provider("nowhere")


def test_a_check_forgets_providers_that_are_gone_and_notes_each_version(probe: Any) -> None:
    row = save_config("probe", GOOD)
    save_config("local", {"launcher": "bubblewrap"})
    check_all()
    assert ProviderHealth.objects.get(provider_id="probe").config_version == row.version
    row.delete()
    check_all()
    assert not ProviderHealth.objects.filter(provider_id="probe").exists()
