"""Sandboxes with the files of a template: what they import, and what others see of it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from django.test import override_settings

from providers.errors import InvalidConfiguration
from providers.runtime.pool import shelf
from providers.sandbox import KeptSandbox
from providers.templates.declaration import Declaration
from providers.templates.lock import Lock
from providers.templates.store import TemplateStore
from providers.values import Command, ExecutionResult, Job, SandboxSpec
from tests.conftest import require
from tests.support.package_index import PackageIndex, make_wheel, package_index
from tests.support.sandboxes import Local
from tests.support.waiting import wait_until

TOOLS = {"bubblewrap": "bwrap", "gvisor": "runsc"}


class WithTemplates:
    """A provider over one launcher, and the store that its service looks into."""

    def __init__(self, local: Local, data_dir: Path) -> None:
        self.local, self.provider = local, local.provider
        self.store = TemplateStore(data_dir)

    def build(self, index: PackageIndex, name: str, content: bytes) -> str:
        """Build a template of one wheel; return its digest."""
        file_name = f"{name}-1.0-py3-none-any.whl"
        index.add_file(file_name, content)
        lock = Lock.parse(index.pylock(file_name))
        declared = Declaration(python=(name,))
        return self.store.build(declared, lock, _fetch, lambda line: None).digest

    def run(
        self, code: str, digest: str = "", language: str = "python", owner: str = "alice"
    ) -> ExecutionResult:
        sandbox = self.provider.open(SandboxSpec(language, digest=digest), owner)
        try:
            return sandbox.run(Job(code, language, 60))
        finally:
            sandbox.close()


def _fetch(url: str, most_bytes: int) -> Iterator[bytes]:
    yield httpx.get(url).content


@pytest.fixture(scope="module")
def index() -> Iterator[PackageIndex]:
    with package_index() as served:
        yield served


@pytest.fixture(scope="module", params=TOOLS)
def templates(request: pytest.FixtureRequest) -> Iterator[WithTemplates]:
    require(TOOLS[request.param])
    # Sandboxes have a /tmp of their own.
    data_dir = Path(tempfile.mkdtemp(dir="/var/tmp"))
    data_dir.chmod(0o755)
    try:
        with override_settings(DATA_DIR=data_dir):
            local = Local(request.param, pool_size=1)
            try:
                yield WithTemplates(local, data_dir)
            finally:
                local.close()
    finally:
        shutil.rmtree(data_dir)


def alpha() -> bytes:
    return make_wheel(
        "alpha",
        files={
            "alpha.py": "VALUE = 42\ndef main():\n    print('program', VALUE)\n",
            "alpha-1.0.dist-info/entry_points.txt": "[console_scripts]\nalpha = alpha:main\n",
        },
    )


def test_a_run_imports_its_packages_and_so_do_its_programs(
    templates: WithTemplates, index: PackageIndex
) -> None:
    digest = templates.build(index, "alpha", alpha())
    code = (
        "import subprocess, alpha; print(alpha.VALUE, flush=True); subprocess.run(['alpha']); "
        "subprocess.run(['python3', '-c', 'import alpha; print(alpha.__file__)'])"
    )
    result = templates.run(code, digest)
    first, second, third = result.stdout.splitlines()
    assert (first, second) == ("42", "program 42"), result.stderr
    assert digest in third


def test_a_sandbox_without_it_sees_nothing_of_it(
    templates: WithTemplates, index: PackageIndex
) -> None:
    digest = templates.build(index, "alpha", alpha())
    other = templates.build(index, "beta", make_wheel("beta"))
    assert templates.run("import alpha", digest).exit_code == 0
    for without in ("", other):
        result = templates.run("import alpha", without)
        assert "No module named 'alpha'" in result.stderr
    folder = templates.store.path(digest)
    code = (
        f"import os; print(os.path.exists({str(folder)!r}), os.path.exists({str(folder.parent)!r}))"
    )
    assert templates.run(code).stdout == "False False\n"
    assert templates.run(code, other).stdout.split()[0] == "False"
    listed = f"import os; print(os.listdir({str(folder.parent)!r}))"
    assert templates.run(listed, other).stdout == f"[{other!r}]\n"


def test_its_files_cannot_be_changed_from_inside(
    templates: WithTemplates, index: PackageIndex
) -> None:
    digest = templates.build(index, "alpha", alpha())
    code = """
import alpha, os
for act in (lambda: open(alpha.__file__, "w"), lambda: os.unlink(alpha.__file__),
            lambda: os.chmod(alpha.__file__, 0o777),
            lambda: open(os.path.dirname(alpha.__file__) + "/more.py", "w")):
    try:
        act()
        print("changed")
    except OSError as error:
        print(type(error).__name__)
"""
    result = templates.run(code, digest)
    assert "changed" not in result.stdout
    assert len(result.stdout.split()) == 4, result.stderr
    assert templates.store.verify(digest) == ""


def test_a_session_has_it_in_cells_contexts_and_commands(
    templates: WithTemplates, index: PackageIndex
) -> None:
    digest = templates.build(index, "alpha", alpha())
    kept = templates.provider.open(SandboxSpec(kept=True, digest=digest, seconds=300), "alice")
    assert isinstance(kept, KeptSandbox)
    with closing(kept):
        assert kept.run(Job("import alpha; alpha.VALUE", timeout=60)).exit_code == 0
        assert kept.run(Job("print(alpha.VALUE)", timeout=60)).stdout == "42\n"
        process = kept.processes.start(Command(["alpha"]))
        output: list[bytes] = []
        kept.processes.follow(process.pid, lambda event: output.append(event.data))
        assert b"".join(output) == b"program 42\n"


def test_node_finds_npm_packages_of_a_template(
    templates: WithTemplates, index: PackageIndex
) -> None:
    require("node")
    index.add_npm("gamma", "1.0.0", {"index.js": "module.exports = 'from gamma';\n"})
    ((_, found),) = index.npm["gamma"]["versions"].items()
    lock = Lock.parse(
        npm=f'{{"packages": {{"": {{}}, "node_modules/gamma": {{"version": "1.0.0", '
        f'"resolved": "{found["dist"]["tarball"]}", '
        f'"integrity": "{found["dist"]["integrity"]}"}}}}}}'
    )
    built = templates.store.build(Declaration(npm=("gamma",)), lock, _fetch, lambda line: None)
    result = templates.run("console.log(require('gamma'))", built.digest, "nodejs")
    assert result.stdout == "from gamma\n", result.stderr
    program = "import subprocess; subprocess.run(['node', '-e', 'console.log(require(\"gamma\"))'])"
    assert templates.run(program, built.digest).stdout == "from gamma\n"


def test_no_process_with_privileges_loads_its_packages(
    templates: WithTemplates, index: PackageIndex
) -> None:
    """Also not where its files were changed after the build, such as by a `.pth` file."""
    digest = templates.build(index, "delta", make_wheel("delta"))
    site = next(templates.store.path(digest).glob("lib/*/site-packages"))
    evil = site / "evil.pth"
    evil.write_text(
        "import os; os.environ['LOADED_BY'] = os.environ.get('LOADED_BY', '') + "
        "open('/proc/self/status').read().split('CapEff:')[1].split()[0] + ' '\n"
    )
    evil.chmod(0o644)
    result = templates.run("import os; print(os.environ['LOADED_BY'])", digest)
    assert set(result.stdout.split()) == {"0000000000000000"}, result.stderr


def test_an_unknown_digest_is_refused_with_the_field(templates: WithTemplates) -> None:
    for digest in ("0" * 64, "../../etc"):
        with pytest.raises(InvalidConfiguration) as caught:
            templates.run("print(1)", digest)
        assert caught.value.field == "template"


def test_a_template_that_is_not_used_for_long_leaves_nothing(
    templates: WithTemplates, index: PackageIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = templates.build(index, "epsilon", make_wheel("epsilon"))
    assert templates.run("import epsilon", digest).exit_code == 0
    (revision,) = templates.local.service.manager._open.values()
    assert digest in revision.template_launchers.digests
    monkeypatch.setattr(shelf, "WARM_SECONDS", 0.0)
    wait_until(lambda: digest not in revision.template_launchers.digests, seconds=60)
    monkeypatch.undo()
    assert templates.run("import epsilon", digest).exit_code == 0


def test_a_removed_template_starts_no_sandbox(
    templates: WithTemplates, index: PackageIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = templates.build(index, "zeta", make_wheel("zeta"))
    templates.store.remove(digest)
    with pytest.raises(InvalidConfiguration, match="are not on this machine"):
        templates.run("print(1)", digest)


def test_figures_name_the_templates_in_use(templates: WithTemplates, index: PackageIndex) -> None:
    digest = templates.build(index, "alpha", alpha())
    templates.run("print(1)", digest)
    figures: dict[str, Any] = templates.local.stats()["templates"]
    assert f"python@{digest}" in figures
