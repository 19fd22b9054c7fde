"""Finding and fetching the one file that has changed, alone and among many."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import django

from benchmarks.measure import Figures, percentiles, table, write_json

ROOT = Path(__file__).resolve().parent.parent
FILES, FOLDERS = 10_000, 100
_FILL = (
    "import os\n"
    f"for n in range({FILES}):\n"
    f"    os.makedirs(f'd{{n % {FOLDERS}}}', exist_ok=True)\n"
    f"    open(f'd{{n % {FOLDERS}}}/{{n}}', 'w').write('x')\n"
)
_START_SECONDS = 30


@contextmanager
def running_pool(data_dir: Path) -> Iterator[None]:
    """The service that keeps the local provider's sandboxes, in an empty data directory."""
    from providers.runtime.service.unix_socket import answers, socket_path

    command = [sys.executable, "manage.py", "pool", "--no-port", "--launcher", "bubblewrap"]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        until = time.monotonic() + _START_SECONDS
        while not answers(socket_path(data_dir)):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError("the pool service did not start")
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        process.wait(10)


def timed(calls: int, before: Callable[[], None], call: Callable[[], None]) -> list[float]:
    """Milliseconds of each call; what goes `before` it is not counted."""
    took = []
    for number in range(calls + 2):
        before()
        began = time.perf_counter()
        call()
        if number >= 2:
            took.append((time.perf_counter() - began) * 1000)
    return took


def rows_of(calls: int) -> list[Figures]:
    """With one file in the workspace, and with so many more."""
    from providers.local.provider import LocalProvider
    from providers.sandbox import KeptSandbox
    from providers.schema import validate
    from providers.values import Job, SandboxSpec

    provider = LocalProvider()
    given = {"launcher": "bubblewrap", "pool_size": 1}
    provider.initialize(validate(provider.config_fields, given))
    sandbox = provider.open(SandboxSpec(kept=True), "bench")
    assert isinstance(sandbox, KeptSandbox)
    files = sandbox.files
    mark = files.changes().mark

    def change() -> None:
        files.write("one", [b"x" * 10_000])

    def save(*, thorough: bool = False) -> None:
        nonlocal mark
        told = files.changes(mark, thorough=thorough)
        mark = told.mark
        paths = [entry.path for entry in told.entries]
        if "one" not in paths or not b"".join(files.read_archive("", paths)):
            raise RuntimeError(f"the file that changed was not told: {paths[:10]}")

    def save_thoroughly() -> None:
        save(thorough=True)

    try:
        rows = [percentiles("one file, changed", 1, timed(calls, change, save))]
        if (filled := sandbox.run(Job(_FILL, timeout=120))).exit_code != 0:
            raise RuntimeError(filled.stderr)
        mark = files.changes().mark
        name = f"one of {FILES + 1:,} files, changed"
        rows.append(percentiles(name, 1, timed(calls, change, save)))
        name = f"the same, with a look at all {FILES + 1:,}"
        few = max(calls // 10, 10)
        return [*rows, percentiles(name, 1, timed(few, change, save_thoroughly))]
    finally:
        sandbox.close()
        provider.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.changes", description=__doc__)
    parser.add_argument("--calls", type=int, default=200, help="calls per row (200)")
    parser.add_argument("--json", type=Path, default=ROOT / "var" / "bench" / "changes.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DATA_DIR"] = folder
        os.environ.setdefault("DJANGO_SETTINGS_MODULE", "sandbox_site.settings")
        django.setup()
        with running_pool(Path(folder)):
            rows = rows_of(arguments.calls)
    print(table(rows, rows[0]))
    write_json(arguments.json, rows, {})
    print(f"written to {arguments.json}")


if __name__ == "__main__":
    main()
