"""The STORAGES setting: DATA_DIR, a directory that every host shares, or a bucket.

A bucket is named by STORAGE_URL, or by the variables S3_... that others know it by.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from django.core.exceptions import ImproperlyConfigured

from sandbox_site.environment import StrictEnv, parse_boolean

# By alias, the folder or prefix of each kind of files.
KINDS = {
    "artifacts": "artifacts",
    "queue": "queue",
    "ledger": "ledger",
    "workspaces": "workspaces",
    "reports": "reports",
    "installation": "",
}
_FOLDER = "executions.kernel.storage.Folder"
_BUCKET = "executions.kernel.bucket.Bucket"
_PARAMETERS = {"endpoint", "region", "addressing", "plain_http", "links"}
_KEY_ID, _KEY = "S3_ACCESS_KEY_ID", "S3_SECRET_ACCESS_KEY"
_S3_NEEDED = ("S3_ENDPOINT_URL", _KEY_ID, _KEY, "S3_BUCKET")
_S3_WITH_DEFAULT = ("S3_REGION", "S3_PREFIX_ROOT")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def storages(env: StrictEnv) -> dict[str, dict[str, Any]]:
    """Django's STORAGES. Raises ImproperlyConfigured for a STORAGE_URL that is not understood."""
    url = env.str("STORAGE_URL")
    options = _bucket(url, env) if url.startswith("s3://") else None
    if (theirs := _s3_variables(env)) is not None:
        options = _one_of(url, options, theirs)
    if options is not None:
        prefix = options.pop("location")
        ours = {
            kind: {
                "BACKEND": _BUCKET,
                "OPTIONS": {**options, "location": "/".join(filter(None, (prefix, folder)))},
            }
            for kind, folder in KINDS.items()
        }
    else:
        root = str(shared_folder(url) or "")
        ours = {
            kind: {"BACKEND": _FOLDER, "OPTIONS": {"kind": folder, "root": root}}
            for kind, folder in KINDS.items()
        }
    return {
        "default": {"BACKEND": "django.core.files.storage.FileSystemStorage"},
        "staticfiles": {"BACKEND": "django.contrib.staticfiles.storage.StaticFilesStorage"},
        **ours,
    }


def shared_folder(url: str) -> Path | None:
    """The directory that STORAGE_URL names; None for a bucket and for DATA_DIR."""
    if not url or url.startswith("s3://"):
        return None
    path = url.removeprefix("file://")
    if not path.startswith("/"):
        raise ImproperlyConfigured(
            f"STORAGE_URL: {url!r} is neither s3://BUCKET/PREFIX nor the absolute path of a "
            "directory that every host shares"
        )
    return Path(path).resolve()


def _bucket(url: str, env: StrictEnv) -> dict[str, Any]:
    parts = urlsplit(url)
    given = dict(parse_qsl(parts.query, keep_blank_values=True))
    if unknown := given.keys() - _PARAMETERS:
        raise ImproperlyConfigured(
            f"STORAGE_URL: unknown {', '.join(sorted(unknown))}; known are "
            f"{', '.join(sorted(_PARAMETERS))}"
        )
    if not parts.hostname or parts.username or parts.password or parts.port or parts.fragment:
        raise ImproperlyConfigured(
            "STORAGE_URL: s3:// is followed by the bucket's name alone. The service's address is "
            "the parameter endpoint, the keys are STORAGE_ACCESS_KEY and STORAGE_SECRET_KEY"
        )
    addressing = given.get("addressing", "auto")
    if addressing not in ("auto", "path", "virtual"):
        raise ImproperlyConfigured("STORAGE_URL: addressing is auto, path or virtual")
    access_key, secret_key = env.secret("STORAGE_ACCESS_KEY"), env.secret("STORAGE_SECRET_KEY")
    if bool(access_key) != bool(secret_key):
        raise ImproperlyConfigured("Set both of STORAGE_ACCESS_KEY and STORAGE_SECRET_KEY, or none")
    return {
        "bucket_name": parts.netloc,
        "location": parts.path.strip("/"),
        "endpoint_url": _address("endpoint", given),
        "links": None if given.get("links") == "no" else _address("links", given) or "",
        "region_name": given.get("region") or None,
        "addressing_style": addressing,
        "access_key": access_key or None,
        "secret_key": secret_key or None,
    }


def _address(name: str, given: dict[str, str]) -> str | None:
    """Files are what tenants' code wrote: they go unencrypted only where that was said."""
    try:
        plain_allowed = parse_boolean(given.get("plain_http", "false"))
    except ValueError as error:
        raise ImproperlyConfigured(f"STORAGE_URL: plain_http: {error}") from None
    if not (address := given.get(name)):
        return None
    if not _is_address(address):
        raise ImproperlyConfigured(
            f"STORAGE_URL: {name} is not an address such as https://host:9000"
        )
    if _is_plain(address) and not plain_allowed:
        raise ImproperlyConfigured(
            f"STORAGE_URL: {name} is plain http. Use https, or add plain_http=true if the network "
            "between is private"
        )
    return address.rstrip("/")


def _is_address(text: str) -> bool:
    parts = urlsplit(text)
    return parts.scheme in ("http", "https") and bool(parts.hostname) and not parts.username


def _is_plain(address: str) -> bool:
    parts = urlsplit(address)
    return parts.scheme == "http" and parts.hostname not in _LOOPBACK


def _s3_variables(env: StrictEnv) -> dict[str, Any] | None:
    """The bucket that the variables S3_... name; None where none of them is set."""
    values = {name: env.str(name) for name in ("S3_ENDPOINT_URL", "S3_BUCKET")}
    values |= {name: env.secret(name) for name in (_KEY_ID, _KEY)}
    region, root = (env.str(name) for name in _S3_WITH_DEFAULT)
    if not any(values.values()) and not any(map(env.is_set, _S3_WITH_DEFAULT)):
        return None
    if missing := [name for name in _S3_NEEDED if not values[name]]:
        raise ImproperlyConfigured(
            f"{', '.join(missing)}: not set, while others of S3_... are. Set "
            f"{', '.join(_S3_NEEDED)}, or none of them and STORAGE_URL"
        )
    endpoint = values["S3_ENDPOINT_URL"]
    if not _is_address(endpoint):
        raise ImproperlyConfigured("S3_ENDPOINT_URL: not an address such as https://host:9000")
    if _is_plain(endpoint):
        raise ImproperlyConfigured(
            "S3_ENDPOINT_URL: is plain http. Use https, or name the same bucket by STORAGE_URL "
            "with plain_http=true if the network between is private"
        )
    if "/" in values["S3_BUCKET"]:
        raise ImproperlyConfigured("S3_BUCKET: the bucket's name alone; S3_PREFIX_ROOT is a folder")
    return {
        "bucket_name": values["S3_BUCKET"],
        "location": root.strip("/"),
        "endpoint_url": endpoint.rstrip("/"),
        "region_name": region,
        "access_key": values[_KEY_ID],
        "secret_key": values[_KEY],
        "setting": "S3_ENDPOINT_URL",
    }


def _one_of(url: str, ours: dict[str, Any] | None, theirs: dict[str, Any]) -> dict[str, Any]:
    """The bucket that both names mean. STORAGE_URL says more, so it decides what they leave open.

    Raises ImproperlyConfigured where they mean two.
    """
    if not url:
        return theirs
    if ours is None:
        raise ImproperlyConfigured(
            "STORAGE_URL names a directory and S3_BUCKET a bucket: files would be in two places. "
            "Keep one of them"
        )
    variables = {
        "bucket_name": "S3_BUCKET",
        "location": "S3_PREFIX_ROOT",
        "endpoint_url": "S3_ENDPOINT_URL",
        "region_name": "S3_REGION",
        "access_key": _KEY_ID,
        "secret_key": _KEY,
    }
    # What STORAGE_URL does not say may be said by them, but never where the files are.
    open_to_them = ("region_name", "access_key", "secret_key")
    other = [
        variable
        for option, variable in variables.items()
        if ours[option] != theirs[option]
        and (ours[option] is not None or option not in open_to_them)
    ]
    if other:
        raise ImproperlyConfigured(
            f"STORAGE_URL, with STORAGE_ACCESS_KEY and STORAGE_SECRET_KEY, and {', '.join(other)} "
            "name two storages. Keep one of them"
        )
    return {**ours, **{option: theirs[option] for option in open_to_them}}
