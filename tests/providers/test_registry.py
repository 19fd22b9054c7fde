"""Providers of other installed packages appear by themselves, and break nothing but themselves."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from providers import registry
from providers.errors import InvalidConfiguration
from providers.values import Job, SandboxSpec
from tests.support.provider_package import PROBE, Packages, install_probe


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Packages]:
    yield Packages(tmp_path, monkeypatch)
    registry.refresh()


def test_the_built_in_provider_is_there() -> None:
    assert registry.get("local").id == "local"
    assert next(iter(registry.all_providers())) == "local"


def test_a_provider_of_an_installed_package_appears(packages: Packages) -> None:
    install_probe(packages, "registry_probe")
    assert registry.get("probe").name == "Probe"
    assert list(registry.all_providers()) == [*registry.BUILT_IN, "probe"]
    assert registry.broken() == []


def test_a_class_is_imported_only_when_it_is_asked_for(packages: Packages) -> None:
    install_probe(packages, "registry_lazy")
    registry.get("local")
    assert "registry_lazy" not in sys.modules
    first = registry.get("probe")
    assert "registry_lazy" in sys.modules
    assert registry.get("probe") is first


def test_one_that_has_sandboxes_by_name_alone_is_sent_no_variables(packages: Packages) -> None:
    install_probe(packages, "registry_by_name")
    sandbox = registry.get("probe")().open(SandboxSpec(), "alice")
    assert sandbox.run(Job("1")).exit_code == 0
    with pytest.raises(InvalidConfiguration) as refused:
        sandbox.run(Job("1", environment={"NAME": "value"}))
    assert (refused.value.field, refused.value.started) == ("environment", False)


def test_an_unknown_provider_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidConfiguration, match=r"no provider 'nope'.*local") as caught:
        registry.get("nope")
    assert (caught.value.code, caught.value.field) == ("SB002", "provider")


BROKEN = {
    "raises": ("raise RuntimeError('no licence')", "no licence"),
    "exits": ("import sys; sys.exit(3)", "SystemExit"),
    "lacks_a_module": ("import an_sdk_that_is_not_installed", "an_sdk_that_is_not_installed"),
    "is_no_python": ("def (", "SyntaxError"),
    "has_no_such_class": ("", "Probe"),
    "is_no_provider": ("class Probe: pass", "not a subclass of SandboxProvider"),
    "is_no_class": ("Probe = 5", "not a subclass of SandboxProvider"),
    "is_abstract": (
        "from providers.base import SandboxProvider\n"
        "class Probe(SandboxProvider):\n    id = 'probe'\n    name = 'Probe'\n",
        "does not implement",
    ),
    "has_another_id": (PROBE.replace('id = "probe"', 'id = "other"'), "must have id = 'probe'"),
    "has_no_name": (PROBE.replace('name = "Probe"', 'name = ""'), "a name"),
    "takes_a_reserved_field_name": (
        PROBE.replace('"endpoint": Con', '"_version": Con'),
        "_version",
    ),
    "contradicts_itself": (PROBE.replace("default=10", "default=1000"), "Pool size"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_package_takes_nothing_else_down(
    case: str, packages: Packages, caplog: pytest.LogCaptureFixture
) -> None:
    source, reason = BROKEN[case]
    module = f"registry_{case}"
    packages.install("broken_package", {"probe": f"{module}:Probe"}, {module: source})
    healthy = PROBE.replace('"probe"', '"healthy"')
    packages.install(
        "healthy_package",
        {"healthy": f"healthy_beside_{case}:Probe"},
        {f"healthy_beside_{case}": healthy},
    )
    with caplog.at_level(logging.ERROR, "providers.registry"):
        assert set(registry.all_providers()) == {*registry.BUILT_IN, "healthy"}
    (entry,) = registry.broken()
    assert (entry.provider_id, entry.source) == ("probe", "broken_package")
    assert reason in entry.reason
    assert reason in caplog.text
    assert "Traceback" in caplog.text
    with pytest.raises(InvalidConfiguration, match="broken_package"):
        registry.get("probe")


def test_a_built_in_provider_cannot_be_replaced(
    packages: Packages, caplog: pytest.LogCaptureFixture
) -> None:
    built_in = registry.get("local")
    source = PROBE.replace('"probe"', '"local"')
    packages.install(
        "impostor", {"local": "registry_impostor:Probe"}, {"registry_impostor": source}
    )
    assert registry.get("local") is built_in
    (entry,) = registry.broken()
    assert (entry.provider_id, entry.source) == ("local", "impostor")
    assert "built-in" in caplog.text
    assert "registry_impostor" not in sys.modules


def test_an_id_that_two_packages_claim_belongs_to_neither(packages: Packages) -> None:
    packages.install("first", {"probe": "registry_first:Probe"}, {"registry_first": PROBE})
    packages.install("second", {"probe": "registry_second:Probe"}, {"registry_second": PROBE})
    with pytest.raises(InvalidConfiguration, match="first, second"):
        registry.get("probe")
    assert [entry.source for entry in registry.broken()] == ["second", "first"]


def test_an_id_no_column_could_hold_is_refused(packages: Packages) -> None:
    packages.install("odd", {"Bad Id": "registry_odd:Probe"}, {"registry_odd": PROBE})
    assert "Bad Id" not in registry.all_providers()
    assert registry.broken()[0].provider_id == "Bad Id"


def test_the_registry_imports_no_sdk() -> None:
    script = (
        "import sys\n"
        "from providers import registry\n"
        "registry.all_providers()\n"
        "print([name for name in ('docker', 'e2b', 'agentrun') if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
