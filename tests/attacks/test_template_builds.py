"""Builds that mean harm: each ends with its reason, and leaves nothing behind."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest
from e2b import Template
from e2b.exceptions import BuildException
from e2b_code_interpreter import Sandbox

from providers.templates.store import TemplateStore
from tests.support.package_index import make_wheel, package_index
from tests.support.template_door import TemplateDoor, template_door


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TemplateDoor]:
    with template_door(tmp_path_factory.mktemp("site"), TEMPLATE_BUILD_SECONDS="10") as opened:
        yield opened


def assert_nothing_is_left(door: TemplateDoor) -> None:
    store = TemplateStore(door.site.data_dir)
    assert store.digests() == []
    assert not any((store.path("0" * 64).parent / "drafts").iterdir())
    with Sandbox.create(timeout=60) as sandbox:
        assert sandbox.run_code("print('undisturbed')").logs.stdout == ["undisturbed\n"]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("sleep 1000", "time"),
        ("setsid sleep 1000 & sleep 1000", "time"),
        ("while :; do :; done", "time"),
        (":(){ :|:& };: ; sleep 1000", ""),
        ("head -c 2000000000 /dev/zero > big", "exit code"),
        ("head -c 15000000 /dev/urandom > big", "more in the workspace than a build can take"),
        ("python3 -c 'x = bytearray(4 << 30); x[::4096] = x[::4096]'", ""),
    ],
    ids=("waits", "hides", "spins", "forks", "fills", "leaves much", "eats memory"),
)
def test_a_command_that_takes_too_much_ends_its_own_build_alone(
    door: TemplateDoor, command: str, said: str
) -> None:
    template = Template().from_base_image().run_cmd(command)
    with pytest.raises(BuildException, match=said):
        Template.build(template, "greedy")
    assert_nothing_is_left(door)


def test_a_command_reaches_no_host(door: TemplateDoor) -> None:
    with package_index() as other:
        reach = f"import urllib.request; urllib.request.urlopen({other.url!r})"
        template = Template().from_base_image().run_cmd(f'python3 -c "{reach}"')
        with pytest.raises(BuildException, match="exit code 1"):
            Template.build(template, "curious")
        assert other.requests == []
    assert_nothing_is_left(door)


def test_a_lock_that_leads_to_another_host_is_refused(door: TemplateDoor) -> None:
    """The index of the simple API may name files anywhere."""
    with package_index() as other:
        address = other.add("wander")
        digest = other.hashes["wander-1.0-py3-none-any.whl"]
        page = f'<a href="{address}#sha256={digest}">wander-1.0-py3-none-any.whl</a>'
        door.index.pages["wander"] = page
        template = Template().from_base_image().pip_install("wander")
        with pytest.raises(BuildException):
            Template.build(template, "wandering")
        assert other.requests == []
    assert_nothing_is_left(door)


def test_a_file_that_changes_after_the_lock_is_refused(door: TemplateDoor) -> None:
    door.index.add("poisoned")
    # What the index says of it stays: the file is another one.
    name = "poisoned-1.0-py3-none-any.whl"
    door.index.changed_after_first[name] = make_wheel("poisoned", files={"poisoned.py": "evil"})
    template = Template().from_base_image().pip_install("poisoned")
    with pytest.raises(BuildException, match=r"another hash|larger than its lock|Hash mismatch"):
        Template.build(template, "poisoned")
    assert_nothing_is_left(door)


def test_a_source_distribution_runs_no_code(door: TemplateDoor) -> None:
    door.index.add_file("sdist-1.0.tar.gz", b"setup.py that would run")
    template = Template().from_base_image().pip_install("sdist")
    with pytest.raises(BuildException, match="could not be resolved"):
        Template.build(template, "sourced")
    assert_nothing_is_left(door)


def test_one_index_serves_all_names_whatever_a_template_says(door: TemplateDoor) -> None:
    with package_index() as other:
        other.add("internal", "99.0")
        door.index.add("internal", "1.0")
        variables = {"UV_EXTRA_INDEX_URL": other.simple, "PIP_EXTRA_INDEX_URL": other.simple}
        template = Template().from_base_image().set_envs(variables).pip_install("internal")
        Template.build(template, "confused")
        assert other.requests == []
        key = {"Authorization": f"Bearer {door.site.alice}"}
        path = f"{door.site.service.url}/api/v1/templates/confused/versions/1"
        packages = httpx.get(path, headers=key).json()["packages"]
        assert [(each["name"], each["version"]) for each in packages] == [("internal", "1.0")]
    Template.build_in_background(template, "confused")
    answer = httpx.delete(f"{door.site.service.url}/templates/confused", headers={
        "X-API-Key": door.site.alice
    })  # fmt: skip
    assert answer.status_code == 204, json.dumps(answer.text)
