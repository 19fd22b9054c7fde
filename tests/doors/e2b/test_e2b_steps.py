"""Steps of E2B's template builder on an image that an administrator has allowed."""

from __future__ import annotations

from typing import Any

import pytest

from executions.doors.e2b.connect import Refused
from executions.doors.e2b.template_steps import Steps, base_of
from providers.templates.declaration import Declaration
from providers.templates.store import python_release


def steps(base: Declaration, *commands: str) -> Declaration:
    made = Steps(base, lambda digest: None)
    for command in commands:
        made.add({"type": "RUN", "args": [command]})
    return made.declaration("", "")


BASED = Declaration(base="image:debian:12")
# What the SDK makes of `apt_install(["curl", "jq=1.6-2"])`.
INSTALL = (
    "apt-get update && DEBIAN_FRONTEND=noninteractive DEBCONF_NOWARNINGS=yes apt-get install -y "
    "--no-install-recommends curl jq=1.6-2"
)


def test_an_allowed_image_is_the_base_and_others_are_refused() -> None:
    assert base_of("debian:12", ["debian:12"]) == "image:debian:12"
    assert base_of("e2bdev/base", []) == ""
    assert base_of(f"python:{python_release()}", []) == ""
    for image in ("debian:12", "debian", "debian:13", "python:2.7"):
        with pytest.raises(Refused, match="TEMPLATE_IMAGES"):
            base_of(image, ["debian:11"])


def test_apt_installs_packages_of_debian_on_an_image() -> None:
    declared = steps(BASED, INSTALL, "apt-get update", "echo done")
    assert declared.apt == ("curl", "jq=1.6-2")
    assert declared.base == "image:debian:12"
    assert declared.run == ("echo done",)


def test_apt_installs_nothing_on_this_machine() -> None:
    for base in (Declaration(), Declaration(base="python3.11")):
        with pytest.raises(Refused, match="cannot be added"):
            steps(base, INSTALL)


@pytest.mark.parametrize(
    "command", ["apt-get remove curl", "apt-get", "apt-get install -y ./x.deb", "apt list"]
)
def test_other_commands_of_apt_are_refused(command: str) -> None:
    with pytest.raises(Exception) as refused:
        steps(BASED, command)
    assert "apt" in str(getattr(refused.value, "message", refused.value))


def test_a_template_made_of_another_keeps_its_base(settings: Any) -> None:
    declared = steps(Declaration(base="image:x", apt=("jq",)), "apt-get install -y curl")
    assert (declared.base, declared.apt) == ("image:x", ("curl", "jq"))
