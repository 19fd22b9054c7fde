"""Every way in which a remote service can fail, provoked over the wire, and what it becomes."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator

import pytest

from providers.errors import NotInitialized, SandboxError
from providers.values import InputFile
from tests.providers.contract.remote_services import RemoteService, aliyun_service, e2b_service
from tests.support.remote_providers import run
from tests.support.wire_server import eventually, refusing

# How each failure of an operation shows. Once the code was sent, it may have run, whatever is
# answered. `refused` is what Aliyun alone answers.
FAILURES = {
    "create": {
        "hang": "SB003",
        "cut": "SB003",
        "401": "SB003",
        "403": "SB003",
        "404": "SB004",
        "429": "SB008",
        "500": "SB004",
        "503": "SB009",
        "refused": "SB004",
        "truncated": "SB003",
        "bad_json": "SB003",
    },
    "run": {
        "cut": "SB003",
        "401": "SB003",
        "403": "SB003",
        "404": "SB009",
        "429": "SB008",
        "500": "SB009",
        "503": "SB009",
        "truncated": "SB003",
        "bad_json": "SB003",
        "lost": "SB003",
        "dead": "SB009",
    },
    # Where a shell's code goes another way than that of other languages.
    "shell": {
        "cut": "SB003",
        "401": "SB003",
        "404": "SB009",
        "429": "SB008",
        "500": "SB009",
        "503": "SB009",
        "bad_json": "SB003",
        "dead": "SB009",
    },
    "write": {
        "cut": "SB003",
        "401": "SB003",
        "404": "SB009",
        "429": "SB008",
        "500": "SB009",
        "503": "SB009",
    },
}
NOT_OF_E2B = {("create", "refused")}
SERVICES = ("e2b", "aliyun")


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("providers.remote.service.REQUEST_SECONDS", 15)
    monkeypatch.setattr("providers.remote.reclaim.RECLAIM_SECONDS", (0.1, 0.5))


@pytest.fixture(params=SERVICES)
def service(request: pytest.FixtureRequest) -> Iterator[RemoteService]:
    server = request.getfixturevalue(f"{request.param}_server")
    found = {"e2b": e2b_service, "aliyun": aliyun_service}[request.param](server)
    yield found
    found.provider.close()


def cases() -> Iterator[object]:
    for name in SERVICES:
        for operation, faults in FAILURES.items():
            for fault, code in faults.items():
                if name == "e2b" and (operation, fault) in NOT_OF_E2B:
                    continue
                if name == "aliyun" and operation == "shell":
                    continue
                label = f"{name}-{operation}-{fault}"
                yield pytest.param(name, operation, fault, code, id=label)


def shown_by(error: BaseException) -> str:
    """The error with all that a report of it may have."""
    told = traceback.TracebackException.from_exception(error, capture_locals=True)
    return "".join((str(error), repr(error), *told.format()))


@pytest.mark.parametrize(
    ("service", "operation", "fault", "code"), list(cases()), indirect=["service"]
)
def test_a_failure_has_its_code_and_shows_no_secret_and_leaves_no_sandbox(
    service: RemoteService,
    operation: str,
    fault: str,
    code: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    service.fail(operation, fault)
    with monkeypatch.context() as patch:
        if fault == "hang":
            patch.setattr("providers.remote.service.REQUEST_SECONDS", 2.0)
        with pytest.raises(SandboxError) as caught:
            if operation == "shell":
                run(service.provider, "echo 1", "bash")
            elif operation == "write":
                run(service.provider, "print(1)", files=[InputFile("a", b"a")])
            else:
                run(service.provider, "print(1)")
    error = caught.value
    may_have_run = operation in ("run", "shell")
    assert (error.code, error.started) == (code, may_have_run)
    assert error.nothing_ran or operation != "write"
    assert sum(service.server.executed.values()) <= (operation == "run")
    assert error.__cause__ is None
    for text in (shown_by(error), caplog.text, repr(vars(service.provider))):
        assert service.secret not in text
    assert eventually(lambda: service.is_empty)
    if operation == "create":
        assert run(service.provider, "print('again')").stdout == "again\n"


@pytest.mark.parametrize("fault", ["hang", "slow"])
def test_a_run_that_does_not_answer_has_timed_out(service: RemoteService, fault: str) -> None:
    service.fail("run", fault)
    # With so much output that an answer which dribbles does not come in time.
    result = run(service.provider, "print('x' * 20_000)", timeout=1)
    assert (result.timed_out, result.exit_code) == (True, None)
    assert eventually(lambda: service.is_empty)


def test_a_refused_connection_is_told_with_its_remedy(
    service: RemoteService, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An SDK may try three times before it gives up.
    monkeypatch.setattr("providers.remote.service.REQUEST_SECONDS", 10)
    with refusing() as url:
        provider = service.open(**service.elsewhere(url))
        with pytest.raises(SandboxError, match="Check the network") as caught:
            provider.create_instance()
        assert (caught.value.code, caught.value.may_fall_back) == ("SB003", True)
        assert not provider.health_check()
        provider.close()


def test_health_is_what_the_service_answers_now(service: RemoteService) -> None:
    assert service.provider.health_check()
    for fault, code in (("503", "SB009"), ("401", "SB003")):
        service.fail("health", fault)
        health = service.provider.health_check()
        assert (health.healthy, health.details["code"]) == (False, code)
    assert service.provider.health_check()


def test_what_could_not_be_destroyed_is_destroyed_later(service: RemoteService) -> None:
    instance = service.provider.create_instance().instance_id
    service.fail("destroy", "500", "503")
    with pytest.raises(SandboxError) as caught:
        service.provider.destroy_instance(instance)
    shown = shown_by(caught.value)
    assert service.secret not in shown
    assert eventually(lambda: service.is_empty)


def test_a_closed_provider_leaves_nothing(service: RemoteService) -> None:
    service.provider.create_instance()
    service.provider.close()
    assert service.is_empty
    with pytest.raises(NotInitialized):
        service.provider.create_instance()
    assert not service.provider.health_check()


def test_a_service_that_repeats_the_secret_does_not_get_it_shown(
    service: RemoteService, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"code": 400, "message": f"bad secret {service.secret}"}
    monkeypatch.setattr(service.server, "error_body", lambda status: body)
    service.fail("create", "500")
    with pytest.raises(SandboxError, match="bad secret ••••"):
        run(service.provider, "print(1)")
