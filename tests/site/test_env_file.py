"""Settings from a `.env` file: what it may say, who may read it, and that the environment wins."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.support.env_files import file as file
from tests.support.env_files import load
from tests.support.processes import ROOT


def test_what_it_says_is_in_force(file: Path) -> None:
    file.write_text("# of this host\n\nexport PORT=8123\nTIME_ZONE='Europe/Oslo'\nHTTPS_ONLY=on\n")
    assert load(file, "PORT", "TIME_ZONE", "HTTPS_ONLY") == [8123, "Europe/Oslo", True]


def test_the_environment_wins_unless_it_says_nothing(file: Path) -> None:
    file.write_text("PORT=8123\nSANDBOX_TIMEOUT_SEC=7\n")
    loaded = load(file, "PORT", "SANDBOX_TIMEOUT_SEC", PORT="8124", SANDBOX_TIMEOUT_SEC="")
    assert loaded == [8124, 7]


@pytest.mark.parametrize("in_file", ["secret", "path"])
def test_a_secret_of_the_environment_wins_in_either_form(
    file: Path, tmp_path: Path, in_file: str
) -> None:
    """A path here and the secret itself there would be refused as given twice."""
    elsewhere = tmp_path / "token"
    elsewhere.write_text("tok-from-a-path")
    secret, path = "POOL_TOKEN=tok-itself", f"POOL_TOKEN_FILE={elsewhere}"
    ours, theirs = (secret, path) if in_file == "secret" else (path, secret)
    file.write_text(ours + "\n")
    given = dict([theirs.split("=", 1)])
    expected = "tok-from-a-path" if in_file == "secret" else "tok-itself"
    assert load(file, "POOL_TOKEN", **given) == expected


def test_a_file_in_the_projects_folder_is_found_from_anywhere(tmp_path: Path) -> None:
    left_out = shutil.ignore_patterns(".git", ".venv", "var", "tests", "__pycache__", ".*_cache")
    project = tmp_path / "project"
    shutil.copytree(ROOT, project, ignore=left_out)
    (project / ".env").write_text("PORT=8125\n")
    environment = {"PYTHONPATH": str(project)}
    assert load("", "PORT", cwd=tmp_path, **environment) == 8125


@pytest.mark.parametrize("line", ["NO VALUE", "NAME: value", "  INDENTED=1", "tok-secret-tail"])
def test_a_line_that_is_no_assignment_is_refused_by_its_number_alone(file: Path, line: str) -> None:
    file.write_text(f"PORT=8123\n{line}\n")
    with pytest.raises(AssertionError, match="line 2") as caught:
        load(file, "PORT")
    assert "ImproperlyConfigured" in str(caught.value)
    assert line not in str(caught.value)


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o660, 0o602])
@pytest.mark.parametrize(
    "name", ["SECRET_KEY", "FERNET_KEYS", "DATABASE_URL", "SANDBOX_API_KEY", "E2B_API_KEY"]
)
def test_secrets_that_others_may_read_or_write_are_refused(
    file: Path, mode: int, name: str
) -> None:
    file.write_text(f"{name}=sqlite:///tok-in-the-file\n")
    file.chmod(mode)
    with pytest.raises(AssertionError, match=f"{name}.*chmod 600") as caught:
        load(file, "PORT")
    assert "tok-in-the-file" not in str(caught.value)


@pytest.mark.parametrize(
    ("mode", "text"),
    [(0o640, "POOL_TOKEN=t"), (0o644, "PORT=8126\nAUDIT_EXPORT_URL=https://collector/")],
)
def test_a_file_for_its_group_or_without_a_secret_is_taken(
    file: Path, mode: int, text: str
) -> None:
    file.write_text(text)
    file.chmod(mode)
    assert load(file, "POOL_TOKEN" if mode == 0o640 else "PORT") in ("t", 8126)


def test_no_test_reads_one() -> None:
    assert os.environ["ENV_FILE"] == os.devnull
