"""A stored secret is asked for again when it would be sent to somebody else than before."""

from __future__ import annotations

import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth import get_user_model

from providers import registry
from providers.aliyun_codeinterpreter.provider import AliyunCodeInterpreterProvider
from providers.e2b.provider import E2BProvider
from providers.errors import ConnectionFailed, InvalidConfiguration, ProviderUnavailable
from providers.models import ConfigVersion, PendingChange, ProviderHealth
from providers.schema import ConfigField, mask
from providers.self_managed.provider import SelfManagedProvider
from providers.services import (
    approve,
    merged_config,
    request_change,
    request_rollback,
    save_config,
    trial,
)
from providers.services.breaker import NOT_REACHABLE, told
from providers.services.configuration import check_receivers
from providers.services.health import check_all
from providers.services.trial import try_provider
from providers.signals import configuration_tried
from tests.support.certificates import Authority
from tests.support.provider_package import Packages, install_probe

TOKEN = "tok-0123456789-wxyz"
PIN = "sha256/AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="


def refused(provider: Any, new: dict[str, Any], stored: dict[str, Any]) -> set[str]:
    """The secrets that are asked for again."""
    try:
        merged_config(provider, new, provider.check_config(stored))
    except InvalidConfiguration as error:
        return set(error.errors)
    return set()


POOL = {"endpoint": "https://pool.example:9385", "token": TOKEN}


@pytest.mark.parametrize("untouched", [{}, {"token": ""}, {"token": None}, {"token": mask(TOKEN)}])
@pytest.mark.parametrize(
    ("change", "moved"),
    [
        ({"endpoint": "https://evil.example:9385"}, True),
        ({"endpoint": "https://pool.example:9386"}, True),
        ({"endpoint": "http://127.0.0.1:9385"}, True),
        ({"endpoint": "https://pool.example.evil.example:9385"}, True),
        ({"endpoint": "https://pool.example:9385/elsewhere"}, True),
        ({"endpoint": ""}, True),
        ({"public_key_pins": PIN}, True),
        ({"endpoint": "HTTPS://POOL.example:9385/"}, False),
        ({"pool_size": 3, "max_retries": 1, "base_python_image": "another/image"}, False),
    ],
)
def test_a_changed_address_or_trust_asks_for_the_secret_again(
    change: dict[str, Any], moved: bool, untouched: dict[str, Any]
) -> None:
    new = {"endpoint": POOL["endpoint"], **change, **untouched}
    assert refused(SelfManagedProvider, new, POOL) == ({"token"} if moved else set())
    assert refused(SelfManagedProvider, new | {"token": "entered anew"}, POOL) == set()


def test_a_removed_pin_and_another_authority_ask_for_it_too() -> None:
    one, other = Authority().pem, Authority().pem
    stored = POOL | {"public_key_pins": PIN, "ca_certificates": one}
    new = {key: value for key, value in stored.items() if key != "token"}
    assert refused(SelfManagedProvider, new, stored) == set()
    assert refused(SelfManagedProvider, new | {"public_key_pins": ""}, stored) == {"token"}
    assert refused(SelfManagedProvider, new | {"ca_certificates": other}, stored) == {"token"}


def test_every_secret_of_every_built_in_provider_is_asked_for() -> None:
    e2b = {"api_key": TOKEN}
    for field in ("api_url", "sandbox_url", "domain"):
        value = "evil.example" if field == "domain" else "https://evil.example"
        assert refused(E2BProvider, {field: value}, e2b) == {"api_key"}
    aliyun = {"access_key_id": TOKEN, "access_key_secret": TOKEN, "account_id": "1234"}
    for field in ("data_endpoint", "control_endpoint"):
        new = {"account_id": "1234", field: "https://evil.example"}
        secrets = {"access_key_id", "access_key_secret"}
        assert refused(AliyunCodeInterpreterProvider, new, aliyun) == secrets


def test_a_secret_that_is_removed_may_be_left_behind() -> None:
    new = {"endpoint": "https://elsewhere.example"}
    stored = SelfManagedProvider.check_config(POOL)
    assert merged_config(SelfManagedProvider, new, stored, ["token"])["token"] is None


def test_a_secret_of_the_environment_goes_only_where_the_environment_or_the_service_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fields = E2BProvider.config_fields
    monkeypatch.setenv("E2B_API_KEY", "the environment's")
    elsewhere = {"api_key": None, "api_url": "https://evil.example"}
    check_receivers(fields, {}, {}, {"api_key": None, "api_url": None})
    with pytest.raises(InvalidConfiguration) as caught:
        check_receivers(fields, elsewhere, {}, elsewhere)
    assert set(caught.value.errors) == {"api_key"}
    monkeypatch.setenv("E2B_API_URL", "https://own.example/")
    own = {"api_key": None, "api_url": "https://own.example"}
    check_receivers(fields, own, {}, own)
    check_receivers(fields, elsewhere, {}, elsewhere | {"api_key": "his own"})


def test_a_provider_that_declares_nothing_is_on_the_safe_side() -> None:
    """Any text that it does not declare otherwise may be an address; options and numbers are not."""
    schema = {
        "token": ConfigField("string", "Token", secret=True),
        "gateway": ConfigField("string", "Gateway"),
        "note": ConfigField("string", "Note", address=False),
        "size": ConfigField("integer", "Size"),
        "mode": ConfigField("string", "Mode", options=("a", "b")),
    }
    stored = {"token": TOKEN, "gateway": "10.0.0.1", "note": "x", "size": 1, "mode": "a"}
    same = stored | {"note": "y", "size": 2, "mode": "b"}
    check_receivers(schema, {"token": ""}, stored, same)
    with pytest.raises(
        InvalidConfiguration, match=r"token: Enter it again, because Gateway changed"
    ):
        check_receivers(schema, {"token": ""}, stored, same | {"gateway": "10.0.0.2"})


def test_a_default_that_changed_counts_as_it_is_today() -> None:
    """A field that is new in the provider: what is stored already goes to its default."""
    schema = {
        "token": ConfigField("string", "Token", secret=True),
        "url": ConfigField("string", "Address", default="https://new.example", address=True),
    }
    stored = {"token": TOKEN}
    check_receivers(schema, {}, stored, {"token": TOKEN, "url": "https://new.example"})
    with pytest.raises(InvalidConfiguration):
        check_receivers(schema, {}, stored, {"token": TOKEN, "url": "https://evil.example"})


@pytest.fixture
def probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    name = f"receivers_{tmp_path.name}"
    install_probe(Packages(tmp_path, monkeypatch), name)
    registry.get("probe")
    yield import_module(name)
    registry.refresh()


GOOD = {"endpoint": "http://a", "token": TOKEN}


@pytest.mark.django_db
def test_a_version_is_restored_with_its_own_secret_and_no_other(probe: Any) -> None:
    save_config("probe", GOOD)
    save_config("probe", {"endpoint": "http://b", "token": "tok-of-b"})
    restored = request_rollback(ConfigVersion.objects.get(version=1), author="user:ann")
    assert restored is not None
    config = save_config("probe", {"endpoint": "http://a"}).config
    assert (config["endpoint"], config["token"]) == ("http://a", TOKEN)


@pytest.mark.django_db
def test_a_waiting_change_holds_no_secret_for_another_address(probe: Any, settings: Any) -> None:
    save_config("probe", GOOD)
    ann, ben = (get_user_model().objects.create_superuser(name) for name in ("ann", "ben"))
    settings.TWO_PERSON_RULE = True
    save = PendingChange.Action.SAVE
    with pytest.raises(InvalidConfiguration) as caught:
        request_change("probe", save, {"endpoint": "http://evil"}, author="user:ann")
    assert set(caught.value.errors) == {"token"}
    assert not PendingChange.objects.exists()
    waiting = request_change(
        "probe",
        save,
        {"endpoint": "http://a", "size": 2},
        author="user:ann",
        author_id=ann.pk,
    )
    assert isinstance(waiting, PendingChange)
    approve(waiting, approver=ben)
    assert ConfigVersion.objects.first().diff[0]["field"] == "size"  # type: ignore[union-attr]


@pytest.mark.django_db
def test_a_try_that_cannot_be_entered_is_not_made(probe: Any) -> None:
    def refuse(**sent: Any) -> None:
        assert not probe.started
        assert sent["addresses"] == {"endpoint": "http://a"}
        assert (sent["author"], sent["stored"]) == ("key:abc", False)
        raise RuntimeError("the ledger cannot be continued")

    configuration_tried.connect(refuse)
    try:
        with pytest.raises(RuntimeError):
            try_provider("probe", GOOD, author="key:abc")
    finally:
        configuration_tried.disconnect(refuse)
    assert not probe.started


@pytest.mark.django_db
def test_a_failure_to_reach_an_address_is_told_only_at_whole_steps(
    probe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "STEP_SECONDS", 0.5)
    began = time.monotonic()
    answers = [try_provider("probe", GOOD | {"behaviour": how}) for how in ("refuse", "crash")]
    assert time.monotonic() - began >= 1.0
    assert answers[0] == answers[1]
    assert answers[0].message == NOT_REACHABLE


@pytest.mark.django_db
def test_a_background_check_tells_no_more_than_a_try(probe: Any) -> None:
    save_config("probe", GOOD | {"behaviour": "refuse"})
    check_all()
    kept = ProviderHealth.objects.get()
    assert (kept.healthy, kept.message) == (False, NOT_REACHABLE)
    assert kept.latency_ms % 10_000 == 0


def test_what_the_service_itself_proves_is_told_and_what_anybody_may_say_is_not() -> None:
    near = {"endpoint": "http://127.0.0.1:9999", "token": TOKEN}
    public = {"endpoint": "https://8.8.8.8", "token": TOKEN}
    for config, answered, shown in (
        (near, "", False),
        (near, "status", False),
        (near, "proof", True),
        (public, "", False),
        (public, "status", True),
        ({"endpoint": "http://127.0.0.1:9385"}, "", True),
        ({}, "", True),
    ):
        error = ProviderUnavailable("HTTP 401: mail.internal says no.")
        error.answered = answered  # type: ignore[assignment]
        message = told(SelfManagedProvider, config, error).message
        assert (message != NOT_REACHABLE) is shown, (config, answered)
    assert told(SelfManagedProvider, near, ConnectionFailed("x")).code == "SB003"
