"""The warm pools of agent-sandbox that the launcher `kubernetes` accepts, as a command."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from providers.errors import InvalidConfiguration, ProviderUnavailable
from providers.languages import OURS
from providers.runtime.pool.hardening import GVISOR, RUNC
from providers.runtime.pool.settings import module_names
from providers.runtime.service.command import PoolOptions
from providers.runtime.service.settings import parse_size
from providers.values import SandboxLimits

HELP = (
    "Print the SandboxTemplate and the SandboxWarmPool (YAML) from which the pool service's "
    "launcher kubernetes takes sandboxes of one language. Their name goes into the field "
    "kubernetes_claims of the provider's configuration."
)
# The interpreters of the images of `manage.py build_images`.
_PYTHON = {"nodejs": "/usr/bin/python3"}
_OTHERS_PYTHON = "/usr/local/bin/python3"
_INTERPRETERS = {"nodejs": "/usr/local/bin/node", "bash": "/usr/bin/bash"}


def add_arguments(parser: ArgumentParser, settings: PoolOptions) -> None:
    """Declare the arguments, whose defaults are the settings."""
    add = parser.add_argument
    add("name", metavar="NAME", help="name of both objects")
    add("--image", required=True, help="the image that the provider's configuration names")
    add("--language", choices=OURS, default="python", help="language of the sandboxes")
    add("--replicas", type=int, default=2, help="idle sandboxes")
    add("--memory", default=settings.POOL_MEMORY, help="Max Memory per Container of the provider")
    add("--preload", default="", help="Preloaded Python modules of the provider")
    add("--warnings", action="store_true", help="if the provider has Static analysis warnings")
    add(
        "--runtime",
        choices=(GVISOR, RUNC),
        default=GVISOR,
        help="what isolates the Pods of the RuntimeClass",
    )
    add("--runtime-class", help="name of the RuntimeClass (gvisor; with runc: the default)")
    add("--pull-secret", default="", help="Secret with the credentials of the image registry")
    add("--python", default="", help="path of Python in the image, if it is another one")
    add("--interpreter", default="", help="path of the language's interpreter, likewise")


def run(settings: PoolOptions, arguments: Mapping[str, Any], say: Callable[[str], None]) -> None:
    """Print both objects; `say` gets the text. Raises SandboxError."""
    try:
        import yaml

        from providers.runtime.launchers.kubernetes import warm_pool_manifests
    except ModuleNotFoundError as error:
        raise ProviderUnavailable(
            f"The Python package {error.name} is not installed. Install it with "
            "pip install -r requirements-kubernetes.txt."
        ) from error
    language, runtime = arguments["language"], arguments["runtime"]
    try:
        limits = SandboxLimits(memory_bytes=parse_size(arguments["memory"]))
    except ValueError as error:
        raise InvalidConfiguration(f"--memory: {error}.") from None
    python = arguments["python"] or _PYTHON.get(language, _OTHERS_PYTHON)
    interpreter = arguments["interpreter"] or _INTERPRETERS.get(language, python)
    runtime_class = arguments["runtime_class"]
    if runtime_class is None:
        runtime_class = "gvisor" if runtime == GVISOR else ""
    objects = warm_pool_manifests(
        arguments["name"],
        arguments["image"],
        language,
        limits,
        module_names(arguments["preload"]) if language == "python" else (),
        advise=arguments["warnings"],
        python=python,
        interpreter=interpreter,
        runtime=runtime,
        runtime_class=runtime_class,
        pull_secret=arguments["pull_secret"],
        replicas=arguments["replicas"],
    )
    say(_yaml(yaml, objects))


def _yaml(yaml: ModuleType, objects: Sequence[Mapping[str, Any]]) -> str:
    """Return objects as YAML in which a program keeps its lines."""

    class Dumper(yaml.SafeDumper):  # type: ignore[misc, name-defined]
        def ignore_aliases(self, _: object) -> bool:
            return True

    def write_text(dumper: Any, text: str) -> Any:
        style = "|" if "\n" in text else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Dumper.add_representer(str, write_text)
    text: str = yaml.dump_all(objects, Dumper=Dumper, sort_keys=False, width=1000)
    return text.rstrip()
