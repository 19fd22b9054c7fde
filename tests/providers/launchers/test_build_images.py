"""`manage.py build_images`, and what the images it has built are good for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest
from django.core.management import CommandError, call_command

from providers.self_managed.images.build import find_mirror
from tests.support.docker_engine import Containers

TEMPLATE = "test-template"


@pytest.fixture
def no_template(engine: docker.DockerClient) -> Iterator[docker.DockerClient]:
    """The engine, which has the template's image neither before nor after the test."""
    yield engine
    if engine.images.list(f"cofferdam/{TEMPLATE}"):
        engine.images.remove(f"cofferdam/{TEMPLATE}", force=True)


def test_the_python_image_has_what_agents_import(under_runc: Containers) -> None:
    result = under_runc.run(
        """
        import numpy, pandas, requests
        import matplotlib
        matplotlib.use("agg")
        import matplotlib.font_manager as fonts, matplotlib.pyplot as plt
        fonts.findfont("WenQuanYi Zen Hei", fallback_to_default=False)
        def main():
            figure, axes = plt.subplots()
            axes.set_title("\\u4e2d\\u6587 \\u65e5\\u672c\\u8a9e \\ud55c\\uad6d\\uc5b4")
            pandas.DataFrame({"a": numpy.arange(3)}).plot(ax=axes)
            figure.savefig("artifacts/plot.png")
            return int(pandas.Series([1, 2, 3]).sum())
        """,
        timeout=30,
        memory_bytes=512 << 20,
    )
    assert result.result == 6, result.stderr
    assert "missing from font" not in result.stderr
    assert [each.name for each in result.artifacts] == ["plot.png"]


@pytest.mark.parametrize(
    "code",
    ["const axios = require('axios')", "import axios from 'axios'"],
    ids=["require", "import"],
)
def test_the_nodejs_image_has_axios(under_runc: Containers, code: str) -> None:
    result = under_runc.run(f"{code}\nconsole.log(typeof axios.get)", "nodejs", timeout=30)
    assert result.stdout == "function\n", result.stderr


def test_every_result_names_the_image_it_ran_in(
    containers: Containers, engine: docker.DockerClient
) -> None:
    digest = engine.images.get("cofferdam/python").id
    assert containers.run("print(1)").metadata["image_digest"] == digest


def test_images_that_are_up_to_date_are_left_alone(
    engine: docker.DockerClient, capsys: pytest.CaptureFixture[str]
) -> None:
    before = engine.images.get("cofferdam/python").id
    if "cofferdam.python" not in engine.images.get("cofferdam/python").labels:
        pytest.skip("the images were not built with --from-debian")
    call_command("build_images", "--from-debian")
    assert engine.images.get("cofferdam/python").id == before
    told = capsys.readouterr()
    assert "up to date" in told.err
    assert f"cofferdam/nodejs {before}" in told.out


def test_a_template_adds_packages_and_runs_them(
    no_template: docker.DockerClient, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("colorama==0.4.6\n")
    call_command("build_images", "--template", TEMPLATE, "--requirements", str(requirements))
    printed = re.fullmatch(
        rf"cofferdam/{TEMPLATE} (sha256:[0-9a-f]{{64}})\n", capsys.readouterr().out
    )
    assert printed
    containers = Containers("runc", images={"python": f"cofferdam/{TEMPLATE}"})
    try:
        result = containers.run("import colorama, numpy; print(colorama.__version__)")
    finally:
        containers.close()
    assert result.stdout == "0.4.6\n"
    assert result.metadata["image_digest"] == printed[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--template", "x"], "must be given together"),
        (["--template", "No/Name", "--requirements", __file__], "not a valid template name"),
        (["--template", "x", "--requirements", "/no/file"], "There is no file"),
        (["--template", "x", "--requirements", __file__, "--base", "no/such"], "has no image"),
    ],
)
def test_what_cannot_be_built_is_refused(
    engine: docker.DockerClient, options: list[str], message: str
) -> None:
    with pytest.raises(CommandError, match=message):
        call_command("build_images", *options)


def test_a_package_that_does_not_exist_leaves_no_image(
    no_template: docker.DockerClient, tmp_path: Path
) -> None:
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("pip==0.0.0.0.1\n")
    with pytest.raises(CommandError, match=r"pip==0\.0\.0\.0\.1"):
        call_command("build_images", "--template", TEMPLATE, "--requirements", str(requirements))
    assert no_template.images.list(f"cofferdam/{TEMPLATE}") == []


def test_an_engine_that_does_not_answer_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nobody")
    with pytest.raises(CommandError, match="Docker engine"):
        call_command("build_images")


@pytest.mark.parametrize(
    ("name", "text", "mirror"),
    [
        (
            "sources.list",
            "deb http://one.example/debian bookworm main\n",
            "http://one.example/debian",
        ),
        (
            "sources.list.d/debian.sources",
            "Types: deb\nURIs: http://two.example/debian\nSuites: bookworm bookworm-updates\n",
            "http://two.example/debian",
        ),
        (
            "sources.list.d/other.list",
            "deb [arch=amd64] http://other.example/tools stable main\n",
            "",
        ),
    ],
)
def test_debian_comes_from_the_mirror_this_machine_uses(
    tmp_path: Path, name: str, text: str, mirror: str
) -> None:
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / name).write_text(text)
    assert find_mirror(tmp_path) == ([mirror] if mirror else [])
