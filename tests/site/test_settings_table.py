"""The declarations of the settings: each is read, and a name or value without one is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from django.core.exceptions import ImproperlyConfigured

from sandbox_site import settings
from sandbox_site.environment import StrictEnv, refuse_unknown
from sandbox_site.settings_table import FOREIGN, GROUPS, REFUSED, SETTINGS, Setting
from tests.support.processes import ROOT, clean_environment

NUMBERS = [setting for setting in SETTINGS.values() if setting.kind == "number"]


def test_each_setting_is_declared_once() -> None:
    names = [setting.name for group in GROUPS for setting in group.settings]
    assert sorted(names) == sorted(set(names))
    assert not set(names) & (REFUSED.keys() | FOREIGN)


def test_each_declared_setting_is_read() -> None:
    sources = [*(ROOT / "sandbox_site").glob("*.py"), *(ROOT / "providers").rglob("*.py")]
    text = "".join(path.read_text(encoding="utf-8") for path in sources)
    names = {name for name in SETTINGS if f'"{name}"' not in text}
    assert sorted(names - settings.env.values.keys()) == []


def test_a_name_that_is_not_declared_cannot_be_read() -> None:
    env = StrictEnv()
    for read in (env.str, env.bool, env.number, env.choice, env.networks, env.secret):
        with pytest.raises(KeyError, match="NO_SUCH_SETTING"):
            read("NO_SUCH_SETTING")
    with pytest.raises(KeyError, match="not declared as a secret"):
        env.secret("PORT")


@pytest.mark.parametrize("setting", NUMBERS, ids=lambda setting: setting.name)
def test_a_default_is_within_its_limits(setting: Setting) -> None:
    assert setting.low <= setting.default <= setting.high


def test_a_default_is_one_of_its_choices() -> None:
    choices = [setting for setting in SETTINGS.values() if setting.kind == "choice"]
    assert choices
    assert all(setting.default in setting.choices for setting in choices)


@pytest.mark.parametrize("setting", NUMBERS, ids=lambda setting: setting.name)
def test_a_number_beyond_its_limits_is_refused_with_the_remedy(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (setting.low - 1, setting.high + 1):
        monkeypatch.setenv(setting.name, str(number))
        with pytest.raises(
            ImproperlyConfigured, match=f"{setting.name}: {number} is not between.*Correct it"
        ):
            StrictEnv().number(setting.name)


@pytest.mark.parametrize("name", REFUSED)
def test_a_variable_without_effect_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(ImproperlyConfigured, match=f"{name} has no effect: .*Remove it"):
        refuse_unknown([name])


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("SANDBOX_MAX_TIMEOUT_SECS", "SANDBOX_MAX_TIMEOUT_SEC"),
        ("FERNET_KEY", "FERNET_KEYS"),
        ("LEDGER_KEY_FILE", "LEDGER_KEYS_FILE"),
        ("AUDIT_EXPORT_HEADER", "AUDIT_EXPORT_HEADERS"),
    ],
)
def test_a_name_that_is_almost_a_setting_is_refused_and_the_setting_is_named(
    name: str, meant: str
) -> None:
    with pytest.raises(ImproperlyConfigured, match=f"{name} is not a setting. Write {meant} "):
        refuse_unknown(["PATH", name])


@pytest.mark.parametrize("name", ["SANDBOX_STORE_CODE_FILE", "LEDGER_CHECKPOINTS_FILE"])
def test_only_a_secret_may_be_in_a_file_of_its_own(name: str) -> None:
    with pytest.raises(ImproperlyConfigured, match=f"{name} is not a setting"):
        refuse_unknown([name])


def test_variables_of_other_programs_are_no_mistake() -> None:
    kubernetes = ["SANDBOX_SERVICE_HOST", "SANDBOX_SERVICE_PORT_HTTP", "SANDBOX_PORT_80_TCP_ADDR"]
    refuse_unknown([*FOREIGN, *kubernetes, "SANDBOX_PORT", "COFFERDAM_URL", "E2B_API_KEY", "HOME"])
    refuse_unknown([*SETTINGS, "POOL_TOKEN_FILE", "AUDIT_EXPORT_HEADERS_FILE"])


@pytest.mark.parametrize("place", ["environment", "file"])
def test_an_unknown_setting_ends_the_start(place: str, tmp_path: Path) -> None:
    variables = {"SANDBOX_TIMEOUTSEC": "7"}
    if place == "file":
        (tmp_path / "env").write_text("SANDBOX_TIMEOUTSEC=7\n")
        variables = {"ENV_FILE": str(tmp_path / "env")}
    ended = subprocess.run(
        [sys.executable, "manage.py", "check"],
        env=clean_environment(tmp_path / "data", **variables),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith("Configuration: SANDBOX_TIMEOUTSEC is not a setting.")
    assert ended.stderr.count("\n") == 1


def test_a_setting_without_a_value_is_no_mistake(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", "from sandbox_site import settings"],
        env=clean_environment(tmp_path, SANDBOX_TIMEOUTSEC=""),
        cwd=ROOT,
        check=False,
    )
    assert ended.returncode == 0


def test_a_value_that_would_name_another_variable_is_refused() -> None:
    env = StrictEnv()
    env.ENVIRON = {"INSTANCE": "$HOSTNAME", "HOSTNAME": "a"}
    with pytest.raises(ImproperlyConfigured, match=r"^INSTANCE: begins with \$"):
        env.str("INSTANCE")
