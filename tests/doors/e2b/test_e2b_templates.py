"""Templates that E2B's SDK builds, and sandboxes made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest
from e2b import Template, wait_for_file
from e2b.exceptions import BuildException, SandboxException
from e2b_code_interpreter import Sandbox

from providers.templates.store import python_release
from tests.support.mcp_client import called, connected, go
from tests.support.template_door import TemplateDoor, template_door


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TemplateDoor]:
    with template_door(tmp_path_factory.mktemp("site")) as opened:
        yield opened


def test_a_template_of_packages_files_variables_and_commands(
    door: TemplateDoor, tmp_path: Path
) -> None:
    door.index.add("alpha", files={"alpha.py": "VALUE = 42\n"})
    door.index.add_npm("gamma", "1.0.0", {"index.js": "module.exports = 'gamma';\n"})
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "main.py").write_text("import alpha; print('app', alpha.VALUE)\n")
    (tmp_path / "notes.txt").write_text("notes\n")
    template = (
        Template(file_context_path=str(tmp_path))
        .from_python_image(python_release())
        .pip_install(["alpha>=1"])
        .npm_install("gamma@^1")
        .set_envs({"MODE": "test"})
        .copy("app", "/home/user/app")
        .copy("notes.txt", "/home/user/docs/")
        .set_workdir("/home/user/app")
        .run_cmd("python3 main.py > out.txt && echo $MODE >> out.txt")
    )
    lines: list[str] = []
    info = Template.build(
        template, "science", tags=["v1"], on_build_logs=lambda entry: lines.append(str(entry))
    )
    assert any("alpha" in line for line in lines)
    assert Template.exists("science")
    assert not Template.exists("elsewhere")
    with Sandbox.create("science", timeout=300) as sandbox:
        assert sandbox.run_code("import alpha; print(alpha.VALUE)").logs.stdout == ["42\n"]
        assert sandbox.files.read("app/out.txt") == "app 42\ntest\n"
        assert sandbox.files.read("/home/user/docs/notes.txt") == "notes\n"
        command = sandbox.commands.run("echo $MODE; node -e \"console.log(require('gamma'))\"")
        assert command.stdout == "test\ngamma\n"
    with Sandbox.create("science:v1", timeout=300) as sandbox:
        assert sandbox.run_code("import alpha").error is None
    tags = Template.get_tags("science")
    assert [(each.tag, each.build_id) for each in tags] == [("v1", info.build_id)]


def test_tools_of_mcp_name_it_too(door: TemplateDoor) -> None:
    door.index.add("theta")
    template = Template().from_base_image().pip_install("theta")
    Template.build(template, "tools")

    async def work() -> None:
        async with connected(door.site) as client:
            code = {"code": "import theta; print(theta.VERSION)", "template": "tools"}
            assert (await called(client, "run_code", **code))["stdout"] == "1.0\n"
            session = await called(client, "session_open", template="tools@1")
            cell = {"session_id": session["session_id"], "code": "import theta"}
            assert (await called(client, "session_run", **cell))["status"] == "succeeded"

    go(work)


def test_the_same_template_again_asks_no_index(door: TemplateDoor) -> None:
    door.index.add("beta")
    template = Template().from_base_image().pip_install("beta")
    Template.build(template, "again")
    door.index.requests.clear()
    Template.build(template, "again")
    assert door.index.requests == []
    Template.build(template, "again", skip_cache=True)
    assert door.index.requests != []


def test_tags_lead_to_versions(door: TemplateDoor) -> None:
    door.index.add("delta", "1.0")
    first = Template().from_base_image().pip_install("delta==1.0")
    Template.build(first, "tagged:old")
    door.index.add("delta", "2.0")
    second = Template().from_base_image().pip_install("delta==2.0")
    Template.build(second, "tagged")
    code = "import delta; print(delta.VERSION)"
    for name, version in (("tagged", "2.0"), ("tagged:old", "1.0"), ("tagged:latest", "2.0")):
        with Sandbox.create(name, timeout=300) as sandbox:
            assert sandbox.run_code(code).logs.stdout == [f"{version}\n"]
    Template.assign_tags("tagged:old", ["stable"])
    assert {each.tag for each in Template.get_tags("tagged")} == {"old", "stable"}
    Template.remove_tags("tagged", ["old"])
    assert {each.tag for each in Template.get_tags("tagged")} == {"stable"}


def test_the_start_command_serves_when_a_sandbox_is_there_and_after_a_pause(
    door: TemplateDoor,
) -> None:
    template = (
        Template()
        .from_base_image()
        .set_start_cmd("echo started >> started.txt; sleep 1000", wait_for_file("started.txt"))
    )
    Template.build(template, "serving")
    with Sandbox.create("serving", timeout=300) as sandbox:
        assert sandbox.files.read("started.txt") == "started\n"
        assert any("sleep 1000" in " ".join(each.args) for each in sandbox.commands.list())
        sandbox.pause()
        sandbox.connect()
        assert sandbox.files.read("started.txt") == "started\nstarted\n"


def test_a_snapshot_keeps_the_template_of_its_sandbox(door: TemplateDoor) -> None:
    door.index.add("eta")
    template = Template().from_base_image().pip_install("eta")
    Template.build(template, "kept")
    with Sandbox.create("kept", timeout=300) as sandbox:
        sandbox.files.write("own.txt", "own")
        snapshot = sandbox.create_snapshot()
    with Sandbox.create(snapshot.snapshot_id, timeout=300) as again:
        assert again.run_code("import eta; print(eta.VERSION)").logs.stdout == ["1.0\n"]
        assert again.files.read("own.txt") == "own"
    key = {"Authorization": f"Bearer {door.site.alice}"}
    opened = httpx.post(
        f"{door.site.service.url}/api/v1/sessions",
        headers=key,
        json={"template": f"snapshot:{UUID(snapshot.snapshot_id.partition(':')[0])}"},
    )
    assert opened.status_code == 201, opened.text
    assert opened.json()["template"] == "kept@1"
    refused = httpx.post(
        f"{door.site.service.url}/api/v1/sessions", headers=key, json={"template": "snapshot:x"}
    )
    assert (refused.status_code, refused.json()["error"]["field"]) == (400, "template")


def test_a_start_command_that_ends_makes_no_sandbox(door: TemplateDoor) -> None:
    template = Template().from_base_image().set_start_cmd("exit 3", wait_for_file("never"))
    Template.build(template, "ending")
    with pytest.raises(SandboxException, match="The start command of ending@1 has ended"):
        Sandbox.create("ending", timeout=300)


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (lambda base: base.apt_install("curl"), "apt packages cannot be added"),
        (lambda base: base.pip_install("--index-url=http://evil x"), "Is not supported"),
        (lambda base: base.pip_install("http://evil.example/x.whl"), "no requirement"),
        (lambda base: base.set_workdir("/etc"), "is not below /home/user"),
        (lambda base: base.set_workdir("../../etc"), "is not below /home/user"),
    ],
)
def test_steps_that_are_not_carried_out_are_refused(
    door: TemplateDoor, steps: Callable[[Any], Any], said: str
) -> None:
    with pytest.raises(BuildException, match=said):
        Template.build(steps(Template().from_base_image()), "refused")


@pytest.mark.parametrize("image", ["ubuntu:22.04", "python:2.7", "evil.example/x"])
def test_an_image_that_is_not_here_is_refused(door: TemplateDoor, image: str) -> None:
    with pytest.raises(BuildException, match="is not here"):
        Template.build(Template().from_image(image).run_cmd("true"), "refused")


def test_a_failing_command_ends_the_build_with_its_output(door: TemplateDoor) -> None:
    template = Template().from_base_image().run_cmd("echo before; echo why >&2; exit 7")
    lines: list[str] = []
    with pytest.raises(BuildException, match="exit code 7"):
        Template.build(template, "failing", on_build_logs=lambda entry: lines.append(str(entry)))
    assert any("why" in line for line in lines)


def test_strangers_neither_see_nor_use_nor_change_it(door: TemplateDoor) -> None:
    door.index.add("epsilon")
    template = Template().from_base_image().pip_install("epsilon")
    info = Template.build(template, "secretive", tags=["v1"])
    url, stranger = door.site.service.url, {"X-API-Key": door.site.charlie}
    paths = (
        ("GET", "/templates/secretive"),
        ("DELETE", "/templates/secretive"),
        ("GET", "/templates/aliases/secretive"),
        ("GET", "/templates/secretive/tags"),
        ("GET", "/templates/secretive/files/abc"),
        ("GET", f"/templates/secretive/builds/{info.build_id}/status"),
        ("POST", f"/v2/templates/secretive/builds/{info.build_id}"),
    )
    for method, path in paths:
        body = {"steps": []} if method == "POST" else None
        answer = httpx.request(method, url + path, headers=stranger, json=body)
        assert answer.status_code == 404, (method, path, answer.text)
        assert httpx.request(method, url + path, json=body).status_code == 401, path
    listed = httpx.get(f"{url}/templates", headers=stranger).json()
    assert "secretive" not in [each["templateID"] for each in listed]
    made = httpx.post(
        f"{url}/sandboxes", headers=stranger, json={"templateID": "secretive", "timeout": 60}
    )
    assert made.status_code == 400, made.text
    assert httpx.put(f"{url}/templates/uploads/forged", content=b"x").status_code == 403
