"""The parts list of a template, as CycloneDX 1.6 has it (cyclonedx.org/docs/1.6/json)."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from providers.templates.lock import Lock, LockedPackage

_ALGORITHMS = {"sha256": "SHA-256", "sha384": "SHA-384", "sha512": "SHA-512"}
_TYPES = {"python": "pypi", "npm": "npm", "apt": "deb/debian"}
# Of names that are digests, by which a document of the same template has the same number.
_NAMESPACE = uuid.UUID("8b1f7d52-6a5a-4c0e-9a53-1f6c1a6c1d0e")


def cyclonedx(
    name: str, version: str, digest: str, lock: Lock, licences: Mapping[str, str]
) -> dict[str, Any]:
    """Return the document of a template. `licences` are by package name."""
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(_NAMESPACE, digest)}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": f"template/{name}@{version}",
                "name": name,
                "version": version,
                "hashes": [{"alg": "SHA-256", "content": digest}],
            }
        },
        "components": [_component(each, licences.get(each.name, "")) for each in lock.packages],
    }


def package_url(package: LockedPackage) -> str:
    """Return the address of a package as package-url has it, such as `pkg:npm/%40a/b@1.0.0`."""
    name = quote(package.name, safe="/")
    return f"pkg:{_TYPES[package.kind]}/{name}@{quote(package.version, safe='')}"


def _origin(package: LockedPackage) -> dict[str, Any]:
    """Where its file is from. What was built here has that of its source, with the hash of that."""
    if not package.source_url:
        return {"type": "distribution", "url": package.url}
    algorithm, _, digest = package.source_hash.partition(":")
    hashes = [{"alg": _ALGORITHMS[algorithm], "content": digest}]
    return {"type": "source-distribution", "url": package.source_url, "hashes": hashes}


def _component(package: LockedPackage, licence: str) -> dict[str, Any]:
    place = f"#{package.place}" if package.place.count("node_modules/") > 1 else ""
    return {
        "type": "library",
        "bom-ref": package_url(package) + place,
        "name": package.name,
        "version": package.version,
        "purl": package_url(package),
        "hashes": [{"alg": _ALGORITHMS[package.algorithm], "content": package.hash}],
        **({"licenses": [{"license": {"name": licence}}]} if licence else {}),
        "externalReferences": [_origin(package)],
    }
