"""What may be changed while the pool runs, declared once.

The provider's form, `PUT /v1/settings`, and whether idle sandboxes outlast a change follow from it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from providers.errors import InvalidConfiguration
from providers.languages import OURS, normalize_language
from providers.runtime.pool.cgroup import machine_memory
from providers.runtime.pool.settings import FIELDS as POOL_FIELDS
from providers.runtime.pool.settings import (
    IMAGES,
    ISOLATION,
    POOL,
    SANDBOX,
    Isolation,
    Level,
    PoolField,
    PoolSettings,
    Renews,
    default_capacity,
    module_names,
)
from providers.schema import validate
from providers.values import SandboxLimits

MEMORY_SIZES = ("128m", "256m", "512m", "1g", "2g")

_MOST_BY_MEMORY = 32
_RUNTIME = re.compile(r"[A-Za-z_][\w.-]*", re.ASCII)
_IMAGE = re.compile(r"[\w][\w.:/@-]*", re.ASCII)
_OBJECT = re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?", re.ASCII)
_REPOSITORY = re.compile(r"(https?://)?[\w.:\[\]-]+(/[a-z0-9]+([._-]+[a-z0-9]+)*)+", re.ASCII)
_TEMPLATE = re.compile(r"([a-z][a-z0-9_-]{0,31}):([a-z]+)=(.+)", re.ASCII)
_SIZE = re.compile(r"([1-9]\d*)([bkmg])")
_SIZE_UNITS = {"b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_TIME = re.compile(r"\d+(\.\d+)?|(\d+(\.\d+)?(ms|s|m|h))+", re.ASCII)
_SPAN = re.compile(r"([\d.]+)(ms|s|m|h|$)", re.ASCII)
_SPAN_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}
_SMALLEST_MEMORY = 32 << 20


def _names(text: str | None) -> tuple[str, ...]:
    return tuple(re.findall(r"[^\s,]+", text or ""))


def _templates(text: str | None) -> dict[str, tuple[str, str]]:
    """Language and image by template. Raises InvalidConfiguration."""
    found: dict[str, tuple[str, str]] = {}
    for word in _names(text):
        match = _TEMPLATE.fullmatch(word)
        problem = ""
        if not match or not _IMAGE.fullmatch(match[3]):
            problem = "is not name:language=image"
        elif match[2] not in OURS:
            problem = f"has none of the languages {', '.join(OURS)}"
        elif match[1] in found or normalize_language(match[1]) in OURS:
            problem = "has a name that is taken"
        if not match or problem:
            raise InvalidConfiguration(f"templates: {word!r} {problem}.", field="templates")
        found[match[1]] = match[2], match[3]
    return found


def _claims(text: str | None) -> dict[str, str]:
    """SandboxWarmPool by template, by "" that of all others. Raises InvalidConfiguration."""
    found: dict[str, str] = {}
    for word in _names(text):
        template, is_named, pool = word.rpartition("=")
        problem = ""
        if (is_named and not template) or not _OBJECT.fullmatch(pool):
            problem = "is not template=SandboxWarmPool"
        elif template in found:
            problem = "names a template twice"
        if problem:
            raise InvalidConfiguration(
                f"kubernetes_claims: {word!r} {problem}.", field="kubernetes_claims"
            )
        found[template] = pool
    return found


def parse_size(text: str) -> int:
    """Bytes of a size such as 256m or 1g. Raises ValueError."""
    match = _SIZE.fullmatch(text.strip().lower())
    size = int(match[1]) * _SIZE_UNITS[match[2]] if match else 0
    if size < _SMALLEST_MEMORY:
        raise ValueError(f"{text!r} is not a memory size of at least 32m, such as 256m or 1g")
    return size


def parse_span(text: str) -> float:
    """Seconds of a time such as 60, 60s, 1m30s or 500ms. Raises ValueError."""
    text = text.strip().lower()
    if not _TIME.fullmatch(text):
        seconds = 0.0
    else:
        seconds = sum(float(number) * _SPAN_UNITS[unit] for number, unit in _SPAN.findall(text))
    if not 0 < seconds <= 86_400:
        raise ValueError(
            f"{text!r} is not a time of at most a day, such as 60, 60s, 1m30s or 500ms"
        )
    return seconds


def _setting(declared: PoolField) -> Any:
    return field(
        default_factory=lambda: declared.read(declared.default),
        metadata={"declared": declared},
        repr=not declared.secret,
    )


def _image(label: str) -> Any:
    """The engine is never told to pull an image, so that no name makes it ask another host."""
    return _setting(
        PoolField(
            "string",
            label,
            max=300,
            address=False,
            description="Empty: the image from manage.py build_images. Without Docker: this "
            "machine's programs, or an image from manage.py pool_images.",
            group=IMAGES,
            renews="launcher",
            read=lambda image: image or "",
        )
    )


@dataclass(frozen=True)
class ServiceSettings:
    """The settings in force, each as the provider's form declares it. Sizes are bytes, times
    seconds. `templates` are language and image of those beyond the plain languages, by name.
    """

    pool_size: int = _setting(
        PoolField(
            "integer",
            "Container Pool Size",
            default=10,
            min=1,
            max=100,
            description="Idle containers for each language in use.",
            group=POOL,
            renews="nothing",
        )
    )
    pool_minimum: int = _setting(
        PoolField(
            "integer",
            "Min idle containers",
            default=0,
            min=0,
            max=100,
            description="For each language not in use.",
            group=POOL,
            renews="nothing",
        )
    )
    pool_burst: int = _setting(
        PoolField(
            "integer",
            "Burst",
            default=0,
            min=0,
            max=100,
            description="Extra idle containers while callers are queued.",
            group=POOL,
            renews="nothing",
        )
    )
    max_sandboxes: int = _setting(
        PoolField(
            "integer",
            "Max containers",
            min=1,
            max=1000,
            placeholder="by memory, up to 32",
            description="Idle and busy, for all languages. More callers are queued.",
            group=POOL,
            renews="nothing",
            read=lambda most: most or _MOST_BY_MEMORY,
        )
    )
    max_kept: int = _setting(
        PoolField(
            "integer",
            "Max session containers",
            default=0,
            min=0,
            max=999,
            description="The rest is for single runs. 0: half of all containers.",
            group=POOL,
            renews="nothing",
        )
    )
    max_memory: int = _setting(
        PoolField(
            "string",
            "Max Memory per Container",
            default="256m",
            options=MEMORY_SIZES,
            description="All processes and files of a container together. No swap.",
            group=SANDBOX,
            renews="sandboxes",
            read=parse_size,
        )
    )
    timeout: float = _setting(
        PoolField(
            "integer",
            "Execution Timeout (seconds)",
            default=30,
            min=5,
            max=300,
            description="Default and maximum for requests.",
            group=SANDBOX,
            renews="nothing",
        )
    )
    queue_timeout: float = _setting(
        PoolField(
            "integer",
            "Queue timeout (seconds)",
            default=10,
            min=1,
            max=300,
            description="Queued callers get SB008 after this time.",
            group=POOL,
            renews="nothing",
        )
    )
    queue_size: int = _setting(
        PoolField(
            "integer",
            "Max queue length",
            default=200,
            min=1,
            max=10_000,
            description="Callers get SB008 immediately if the queue is full.",
            group=POOL,
            renews="nothing",
        )
    )
    runtime: str = _setting(
        PoolField(
            "string",
            "Container runtime",
            default="auto",
            max=100,
            address=False,
            description="auto: gVisor (runsc) if the engine has it, otherwise runc. Or the name of "
            "a runtime of the engine.",
            group=ISOLATION,
            renews="launcher",
        )
    )
    require_gvisor: bool = _setting(
        PoolField(
            "boolean",
            "Require gVisor",
            default=False,
            description="Run nothing without gVisor.",
            group=ISOLATION,
            renews="launcher",
        )
    )
    isolation: Isolation = _setting(POOL_FIELDS["isolation"])  # noqa: RUF009  a field
    preload: tuple[str, ...] = _setting(POOL_FIELDS["preload"])
    enable_seccomp: bool = _setting(
        PoolField(
            "boolean",
            "Filter system calls",
            default=True,
            description="An additional filter. The profile of the engine always applies.",
            group=ISOLATION,
            renews="launcher",
        )
    )
    enable_ast_analysis: bool = _setting(
        PoolField(
            "boolean",
            "Static analysis warnings",
            default=False,
            description="Report notable Python imports and calls with each result. Blocks nothing.",
            group=ISOLATION,
            renews="sandboxes",
        )
    )
    base_python_image: str = _image("Python image")
    base_nodejs_image: str = _image("Node.js image")
    base_bash_image: str = _image("Shell image")
    templates: Mapping[str, tuple[str, str]] = _setting(
        PoolField(
            "string",
            "Additional images",
            placeholder="science:python=cofferdam/science",
            max=2000,
            address=False,
            description="name:language=image, separated by commas. Requests use the name as "
            "language.",
            group=IMAGES,
            renews="launcher",
            read=_templates,
        )
    )
    kubernetes_pull_secret: str = _setting(
        PoolField(
            "string",
            "Kubernetes pull secret",
            max=253,
            address=False,
            placeholder="registry-credentials",
            description="With POOL_LAUNCHER=kubernetes: the Secret of the sandboxes' namespace "
            "with the credentials of the image registry.",
            group=IMAGES,
            renews="launcher",
            read=lambda name: name or "",
        )
    )
    kubernetes_registry: str = _setting(
        PoolField(
            "string",
            "Kubernetes template registry",
            max=300,
            address=True,
            placeholder="registry.example/cofferdam-templates",
            description="With POOL_LAUNCHER=kubernetes: the repository to which the pool pushes "
            "the images of templates. The nodes pull from it.",
            group=IMAGES,
            renews="launcher",
            read=lambda name: name or "",
        )
    )
    kubernetes_registry_credential: str = _setting(
        PoolField(
            "string",
            "Credential of that registry",
            secret=True,
            max=4000,
            description="user:password of an account that may push to the repository.",
            group=IMAGES,
            renews="launcher",
            read=lambda credential: credential or "",
        )
    )
    kubernetes_claims: Mapping[str, str] = _setting(
        PoolField(
            "string",
            "Kubernetes warm pools",
            max=2000,
            address=False,
            placeholder="python=agents-python bash=agents-bash",
            description="With POOL_LAUNCHER=kubernetes: the SandboxWarmPool (agent-sandbox) of "
            "each template, or one name for all. The pool creates the Pods of other templates.",
            group=IMAGES,
            renews="launcher",
            read=_claims,
        )
    )
    max_lifetime: float = _setting(
        PoolField(
            "integer",
            "Idle TTL (seconds)",
            default=300,
            min=10,
            max=86_400,
            description="Unused containers are destroyed after this time.",
            group=POOL,
            renews="nothing",
        )
    )

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], *, shares_memory: bool = True
    ) -> ServiceSettings:
        """Read a provider's configuration. With `shares_memory` the sandboxes take the memory of
        this machine. Raises InvalidConfiguration naming each refused field."""
        given = validate(FIELDS, config)
        check_config(given)
        read = cls(**{name: declared.read(given[name]) for name, declared in FIELDS.items()})
        most, size = given["max_sandboxes"], read.pool_size
        usual = usual_capacity(read.max_memory, size, shares_memory=shares_memory)
        capacity = max(most, size) if most else usual
        return replace(read, pool_size=min(size, capacity), max_sandboxes=capacity)

    @property
    def launcher_key(self) -> tuple[object, ...]:
        """Settings with the same key can share a launcher."""
        return self._compared("launcher")

    @property
    def sandbox_key(self) -> tuple[object, ...]:
        """Settings with the same key can share sandboxes."""
        return self._compared("launcher", "sandboxes")

    def _compared(self, *renews: Renews) -> tuple[object, ...]:
        return tuple(
            declared.compared(getattr(self, name))
            for name, declared in FIELDS.items()
            if declared.renews in renews
        )

    @property
    def images(self) -> dict[str, str]:
        """Image by language, where one is named, and by template."""
        named = {language: getattr(self, name) for language, name in IMAGE_FIELDS.items()}
        found = {language: image for language, image in named.items() if image}
        return found | {name: image for name, (_, image) in self.templates.items()}

    @property
    def most_kept(self) -> int:
        """Never all of them: single runs are not to wait for the end of a session."""
        return min(self.max_kept or self.max_sandboxes // 2, self.max_sandboxes - 1)

    @property
    def limits(self) -> SandboxLimits:
        return SandboxLimits(memory_bytes=self.max_memory)

    def for_one(self) -> ServiceSettings:
        """The same for a single sandbox, and none kept warm."""
        return replace(self, pool_size=0, pool_minimum=0, pool_burst=0, max_sandboxes=1)

    def pool_settings(self, level: Level) -> PoolSettings:
        """`level` is what `isolation` comes to with the launcher that is used."""
        return PoolSettings(
            size=self.pool_size,
            capacity=self.max_sandboxes,
            queue=self.queue_size,
            patience=self.queue_timeout,
            minimum=self.pool_minimum,
            burst=self.pool_burst,
            isolation=level,
            max_lifetime=self.max_lifetime,
        )


FIELDS: Mapping[str, PoolField] = {
    each.name: each.metadata["declared"] for each in fields(ServiceSettings)
}


# The setting that has the image of its own, by language, where there is one.
IMAGE_FIELDS = {language: name for language in OURS if (name := f"base_{language}_image") in FIELDS}


def usual_capacity(memory_bytes: int, pool_size: int, *, shares_memory: bool = True) -> int:
    """How many sandboxes of so much memory a service has that was told no number: two at least, as
    one of them may be kept. Pods of a cluster do not share this machine's memory."""
    most = max(_MOST_BY_MEMORY, pool_size)
    if not shares_memory:
        return most
    return max(2, default_capacity(machine_memory(), memory_bytes, most=most))


def check_config(config: Mapping[str, Any]) -> None:
    """Rules beyond the fields' own. Raises InvalidConfiguration."""
    if config["require_gvisor"] and config["runtime"] == "runc":
        raise InvalidConfiguration(
            "require_gvisor: Cannot be combined with the runtime runc.", field="require_gvisor"
        )
    if config["isolation"] == "tenant-kernel" and config["runtime"] == "runc":
        raise InvalidConfiguration(
            "isolation: tenant-kernel needs gVisor, and the runtime is runc. Choose auto or runsc "
            "as the runtime, or another isolation.",
            field="isolation",
        )
    if not _RUNTIME.fullmatch(config["runtime"]):
        raise InvalidConfiguration("runtime: Must be the name of a runtime.", field="runtime")
    module_names(config["preload"])
    if config["kubernetes_pull_secret"] and not _OBJECT.fullmatch(config["kubernetes_pull_secret"]):
        raise InvalidConfiguration(
            "kubernetes_pull_secret: Must be the name of a Secret: lower-case letters, digits, `-` "
            "and `.`.",
            field="kubernetes_pull_secret",
        )
    if config["kubernetes_registry"] and not _REPOSITORY.fullmatch(config["kubernetes_registry"]):
        raise InvalidConfiguration(
            "kubernetes_registry: Must be a repository of images, such as "
            "registry.example/cofferdam-templates.",
            field="kubernetes_registry",
        )
    for name in IMAGE_FIELDS.values():
        if config[name] and not _IMAGE.fullmatch(config[name]):
            raise InvalidConfiguration(
                f"{name}: {config[name]!r} is not the name of an image.", field=name
            )
    _templates(config["templates"])
    _claims(config["kubernetes_claims"])


def settings_digest(config: Mapping[str, Any]) -> str:
    """A short name for a configuration as it was pushed: the service knows it, or it does not."""
    text = json.dumps({key: config.get(key) for key in FIELDS}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
