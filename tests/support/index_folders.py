"""Indexes of packages as files, which any web server of a folder serves to pip and npm."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import tarfile
import zipfile
from pathlib import Path


def put_wheel(folder: Path, version: str, value: int) -> Path:
    """Put a wheel of the package `counting` into a folder. It has a command of this name too."""
    name = f"counting-{version}"
    files = {
        "counting.py": f"VALUE = {value}\n\ndef main():\n    print(VALUE)\n",
        f"{name}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: counting\nVersion: {version}\n",
        f"{name}.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{name}.dist-info/entry_points.txt": "[console_scripts]\ncounting = counting:main\n",
    }
    record = io.StringIO()
    lines = csv.writer(record)
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
        lines.writerow([path, f"sha256={digest.decode()}", len(text)])
    lines.writerow([f"{name}.dist-info/RECORD", "", ""])
    wheel = folder / f"{name}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in {**files, f"{name}.dist-info/RECORD": record.getvalue()}.items():
            archive.writestr(path, text)
    return wheel


def put_simple_index(folder: Path, version: str, value: int) -> None:
    """Have `folder/simple` be an index that pip reads, with the package `counting`."""
    project = folder / "simple" / "counting"
    project.mkdir(parents=True, exist_ok=True)
    put_wheel(project, version, value)
    links = (f'<a href="{each.name}">{each.name}</a>' for each in sorted(project.glob("*.whl")))
    (project / "index.html").write_text("".join(links))


def put_npm_registry(folder: Path, url: str) -> None:
    """Have `folder/npm`, served as `url/npm`, be a registry with the package `tiny-package`."""
    registry = folder / "npm"
    registry.mkdir(exist_ok=True)
    about = {"name": "tiny-package", "version": "1.0.0", "main": "index.js"}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        texts = {"package.json": json.dumps(about), "index.js": "module.exports = 42\n"}
        for name, text in texts.items():
            entry = tarfile.TarInfo(f"package/{name}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    (registry / "tiny-package-1.0.0.tgz").write_bytes(packed.getvalue())
    version = {**about, "dist": {"tarball": f"{url}/npm/tiny-package-1.0.0.tgz"}}
    listed = {
        "name": "tiny-package",
        "dist-tags": {"latest": "1.0.0"},
        "versions": {"1.0.0": version},
    }
    (registry / "tiny-package").write_text(json.dumps(listed))
