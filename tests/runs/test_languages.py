"""One table of languages: every name leads to one of them, and results tell which interpreter ran."""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path

import pytest
from pygments.lexers import get_lexer_by_name

from providers.languages import (
    OURS,
    TABLE,
    Language,
    normalize_language,
    offered_names,
    probe_of,
    version_of,
)
from providers.services.trial import EXPECTED
from providers.values import Job, SandboxSpec
from tests.support.docker_engine import Containers
from tests.support.sandboxes import Local


def test_no_name_leads_to_two_languages() -> None:
    names = Counter(name for each in TABLE for name in (each.name, *each.aliases))
    assert set(names.values()) == {1}
    assert normalize_language("javascript") == normalize_language("node") == "nodejs"
    assert normalize_language("science") == "science"


def test_what_is_offered_further_is_an_alias() -> None:
    assert offered_names(["nodejs", "science"]) == ["nodejs", "science", "javascript"]
    for each in TABLE:
        assert set(each.offered) <= set(each.aliases)


def test_each_that_runs_here_has_a_program_file_and_a_probe() -> None:
    assert all(each.program for each in TABLE if each.name in OURS)
    assert all(each.probe for each in TABLE if each.interpreters)


@pytest.mark.parametrize("language", TABLE, ids=lambda each: each.name)
def test_pygments_knows_its_lexer(language: Language) -> None:
    assert get_lexer_by_name(language.lexer).name != "Text only"


@pytest.mark.parametrize(
    "name", [name for each in TABLE if each.interpreters for name in (each.name, *each.aliases)]
)
def test_under_each_of_its_names_the_probe_runs_and_the_interpreter_is_told(
    bubblewrap: Local, name: str
) -> None:
    language = normalize_language(name)
    if language not in bubblewrap.provider.get_supported_languages():
        pytest.skip(f"{language} does not run here")
    found = probe_of([name])
    assert found is not None
    sandbox = bubblewrap.provider.open(SandboxSpec(name), "owner")
    result = sandbox.run(Job(found[1], name, entrypoint="script"))
    sandbox.close()
    assert (result.stdout.strip(), result.stderr) == (EXPECTED, "")
    told, version = result.metadata["interpreter"].split()
    assert (told, version.split(".")[0].isdigit()) == (language, True)


def test_the_interpreter_told_is_the_one_that_ran(bubblewrap: Local) -> None:
    result = bubblewrap.run("import platform; print('python', platform.python_version())")
    assert result.metadata["interpreter"] == result.stdout.strip()


def test_an_images_interpreters_are_told(under_runc: Containers) -> None:
    result = under_runc.run("import platform; print('python', platform.python_version())")
    assert result.metadata["interpreter"] == result.stdout.strip()
    result = under_runc.run("console.log('nodejs', process.versions.node)", "nodejs")
    assert result.metadata["interpreter"] == result.stdout.strip()


def test_an_interpreter_that_does_not_say_its_version_has_none(tmp_path: Path) -> None:
    mute = tmp_path / "mute"
    mute.write_text("#!/bin/sh\nexit 3\n")
    mute.chmod(0o755)
    assert subprocess.run([mute], check=False).returncode == 3
    assert version_of("python", str(mute)) == ""
    assert version_of("python", str(tmp_path / "missing")) == ""
