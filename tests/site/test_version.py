"""One version, stated in one place, which every part of the service reports; and the licence."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tomllib

import cofferdam
import pytest
import yaml
from cofferdam.cli.main import main
from django.contrib.auth.models import User
from django.core.management import call_command
from django.test import Client

from sandbox_site import __version__
from tests.support.processes import ROOT

# The licence's text as its publisher has it.
APACHE = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"


@pytest.mark.parametrize("word", ["version", "--version"])
def test_the_command_prints_the_version_of_the_service(word: str) -> None:
    told = subprocess.run(
        [sys.executable, "manage.py", word], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert told.stdout == f"{__version__}\n"


def test_the_command_does_so_from_python_too(capsys: pytest.CaptureFixture[str]) -> None:
    call_command("version")
    assert capsys.readouterr().out == f"{__version__}\n"


def test_the_shell_client_prints_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"cofferdam {cofferdam.__version__}\n"


@pytest.mark.django_db
def test_health_and_description_report_it(client: Client) -> None:
    assert client.get("/healthz").json()["version"] == __version__
    described = yaml.safe_load(client.get("/api/schema").content)
    assert described["info"]["version"] == __version__


@pytest.mark.django_db
@pytest.mark.parametrize("path", ["/admin/", "/admin/executions/tenant/", "/admin/auth/user/add/"])
def test_every_kind_of_admin_page_shows_it_at_its_foot(client: Client, path: str) -> None:
    assert __version__ not in client.get("/admin/login/").content.decode()
    client.force_login(User.objects.create_superuser("admin"))
    assert f"Cofferdam {__version__}</p>" in client.get(path).content.decode()


def test_the_packages_state_the_same_version_and_licence() -> None:
    """Those in Python take it from their module, so that no file can state another."""
    for folder, attribute in ((ROOT, "sandbox_site"), (ROOT / "clients" / "python", "cofferdam")):
        stated = tomllib.loads((folder / "pyproject.toml").read_text())
        assert "version" not in stated["project"]
        assert stated["tool"]["setuptools"]["dynamic"]["version"] == {
            "attr": f"{attribute}.__version__"
        }
        assert stated["project"]["license"] in ("Apache-2.0", {"text": "Apache-2.0"})
    typescript = json.loads((ROOT / "clients" / "typescript" / "package.json").read_text())
    assert cofferdam.__version__ == typescript["version"] == __version__
    assert typescript["license"] == "Apache-2.0"
    assert hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest() == APACHE


def test_the_changelog_has_a_section_for_this_version() -> None:
    titles = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert __version__ in titles
