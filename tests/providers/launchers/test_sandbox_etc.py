"""The /etc of a sandbox is made by us: enough for programs, and nothing of this machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from providers.runtime.launchers import guest_files
from providers.runtime.pool.pool import PoolSettings
from providers.runtime.pool.template import Template
from tests.conftest import require
from tests.support.docker_engine import Containers
from tests.support.rich import require_module
from tests.support.sandboxes import Local
from tests.support.warm_pools import WarmPool


def test_a_program_learns_who_it_is(local: Local) -> None:
    code = """
        import getpass, grp, os, pwd
        user = pwd.getpwuid(os.getuid())
        print(getpass.getuser(), user.pw_dir, grp.getgrgid(os.getgid()).gr_name, os.path.expanduser("~"))
    """
    assert local.run(code).stdout == "sandbox /workspace sandbox /workspace\n"
    assert local.run("whoami; echo ~", "bash").stdout == "sandbox\n/workspace\n"


def test_a_program_in_a_container_learns_who_it_is(under_runc: Containers) -> None:
    assert under_runc.run("import getpass; print(getpass.getuser())").stdout == "sandbox\n"


def test_nothing_in_it_is_this_machines(local: Local) -> None:
    result = local.run(
        "import os\nprint(sorted(os.listdir('/etc')))\nprint(open('/etc/hosts').read())"
    )
    names = set(eval(result.stdout.splitlines()[0]))
    assert names <= {
        *("alternatives", "fonts", "group", "hosts", "ld.so.cache", "ld.so.conf"),
        *("matplotlibrc", "nsswitch.conf", "passwd", "pip.conf", "ssl", "uv"),
    }
    assert os.uname().nodename not in result.stdout.replace("sandbox", "")


def test_it_names_nothing_that_is_hidden(tmp_path: Path) -> None:
    ours = tmp_path / "etc"
    (ours / "ld.so.conf.d").mkdir(parents=True)
    (ours / "ld.so.conf.d/own.conf").write_text("/usr/local/secret/lib\n/usr/lib\n")
    (ours / "alternatives").mkdir()
    for name, target in (("a", "/usr/bin/env"), ("b", "/usr/local/bin/secret"), ("c", "/opt/x")):
        (ours / "alternatives" / name).symlink_to(target)
    folder = tmp_path / "made"
    folder.mkdir()
    guest_files.write_etc(folder, [Path("/usr/local")], ours)
    assert [path.name for path in (folder / "alternatives").iterdir()] == ["a"]
    assert (folder / "ld.so.conf").read_text() == "/usr/lib\n"
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            assert b"secret" not in path.read_bytes()


def test_debians_matplotlib_works_preloaded_and_imported() -> None:
    require("bwrap")
    require_module("matplotlib")
    code = "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.savefig('artifacts/a.png')"
    templates = {
        "python": Template("python", "python"),
        "plots": Template("plots", "python", preload=("matplotlib.pyplot",)),
    }
    with WarmPool(PoolSettings(size=1, capacity=4), templates) as pool:
        for template in templates:
            result = pool.run(code, template=template, timeout=60)
            assert [one.name for one in result.artifacts] == ["a.png"], result.stderr


@pytest.mark.parametrize(
    ("language", "code"),
    [
        ("python", "\ufeffdef main():\n    return 'ran'"),
        ("python", "\ufeff#!/usr/bin/env python3\nprint('ran')"),
        ("nodejs", "\ufefffunction main () { return 'ran' }"),
        ("nodejs", "\ufeff#!/usr/bin/env node\nconsole.log('ran')"),
        ("nodejs", "\ufeffimport fs from 'fs'\nconsole.log(fs ? 'ran' : '')"),
        ("bash", "\ufeff#!/bin/bash\necho ran"),
    ],
)
def test_a_program_may_begin_with_a_byte_order_mark(
    bubblewrap: Local, language: str, code: str
) -> None:
    if language == "nodejs":
        require("node")
    result = bubblewrap.run(code, language)
    assert result.exit_code == 0, result.stderr
    assert "ran" in (result.stdout, result.stdout.strip(), result.result)
