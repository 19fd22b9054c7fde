"""The words and defaults of RAGFlow's design stand on the provider forms and in the manager."""

from __future__ import annotations

from typing import Any

import pytest

from executions.capabilities.dashboard.admin import band_of
from providers import registry
from providers.aliyun_codeinterpreter import schema
from providers.errors import InvalidConfiguration
from providers.manager import manager
from providers.services import NotPermitted, save_config
from tests.conftest import Caller
from tests.support.running import run

SECONDS = "Execution Timeout (seconds)"
# Sections 3.3 and 3.4 of the design, word for word: label, default, least, most, options.
DESIGN: dict[str, dict[str, tuple[Any, ...]]] = {
    "self_managed": {
        "endpoint": ("API Endpoint", ..., None, ..., None),
        "pool_size": ("Container Pool Size", 10, 1, 100, None),
        "max_memory": (
            "Max Memory per Container",
            "256m",
            None,
            None,
            ("128m", "256m", "512m", "1g"),
        ),
        "timeout": (SECONDS, 30, 5, 300, None),
    },
    "aliyun_codeinterpreter": {
        "access_key_id": ("Access Key ID", None, None, ..., None),
        "access_key_secret": ("Access Key Secret", None, None, ..., None),
        "account_id": ("Account ID", None, None, ..., None),
        "region": (
            *("Region", "cn-hangzhou", None, None),
            ("cn-hangzhou", "cn-beijing", "cn-shanghai", "cn-shenzhen", "cn-guangzhou"),
        ),
        "template_name": ("Template Name", None, None, ..., None),
        "timeout": (SECONDS, 30, 1, 30, None),
    },
    "e2b": {
        "api_key": ("API Key", None, None, ..., None),
        "region": ("Region", "us", None, None, ("us", "eu")),
        "timeout": (SECONDS, 30, 5, 300, None),
    },
}
REQUIRED = {"endpoint", "access_key_id", "access_key_secret", "account_id", "api_key"}
SECRET = {"access_key_id", "access_key_secret", "api_key"}


def test_the_forms_have_the_designs_labels_defaults_and_bounds() -> None:
    """`...` is what the design leaves open and we do not."""
    for provider_id, wanted in DESIGN.items():
        fields = registry.get(provider_id).config_fields
        for name, words in wanted.items():
            field = fields[name]
            # More may be offered than the design has, behind what it has.
            options = field.options[: len(words[4] or ())] or None
            found = (field.label, field.default, field.min, field.max, options)
            told = tuple(
                theirs if theirs is ... else ours for ours, theirs in zip(found, words, strict=True)
            )
            assert told == words, f"{provider_id}.{name}"
            assert field.secret == (name in SECRET), f"{provider_id}.{name}"
            assert field.required == (name in REQUIRED), f"{provider_id}.{name}"


@pytest.mark.parametrize(
    ("variable", "begins_with"),
    [("", "cn-hangzhou"), ("cn-beijing", "cn-beijing"), ("eu-central-1", None)],
)
def test_a_region_of_the_environment_goes_before_the_default(
    monkeypatch: pytest.MonkeyPatch, variable: str, begins_with: str | None
) -> None:
    for name in schema.ENVIRONMENT["region"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AGENTRUN_REGION", variable)
    assert schema._first_region() == begins_with


def test_the_manager_answers_to_the_designs_names(
    scripted: object, alice: Caller, settings: Any
) -> None:
    settings.TWO_PERSON_RULE = False
    first = manager.get_provider()
    assert first is not None
    assert (manager.get_provider_name(), type(first).id) == ("scripted", "scripted")
    manager.reload_provider()
    assert manager.get_provider() is not first
    assert run(alice, "answer = ExecutionResult('', '', 0, 0.0)").json()["status"] == "succeeded"

    save_config("local", {"pool_size": 1})
    with pytest.raises(InvalidConfiguration, match="local"):
        manager.set_provider("local", first)
    with pytest.raises(InvalidConfiguration):
        manager.set_provider("nobody")
    manager.set_provider("local")
    assert manager.get_provider_name() == "local"
    settings.TWO_PERSON_RULE = True
    with pytest.raises(NotPermitted):
        manager.set_provider("scripted")
    assert manager.get_provider_name() == "local"


def test_without_a_provider_the_names_answer_nothing(no_provider: None) -> None:
    assert (manager.get_provider(), manager.get_provider_name()) == (None, None)


@pytest.mark.parametrize(
    ("percent", "kind"), [(0, "quiet"), (59, "quiet"), (60, "good"), (80, "good"), (81, "warn")]
)
def test_a_pools_use_is_told_by_the_band_it_should_be_in(percent: int, kind: str) -> None:
    assert band_of(percent)["kind"] == kind
