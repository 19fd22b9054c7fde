"""The modules of IPython that notebook code imports, for sandboxes in which it is not installed.

Where it is, its own are taken, and show what they show by the way of all other values.
"""

import sys

from . import display

TYPE_CHECKING = False  # as in typing, which is too dear to import here
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

# What our own stand in for: the modules that code of notebooks imports.
_NAMES = (
    *("IPython", "IPython.display", "IPython.core", "IPython.core.display"),
    *("IPython.core.display_functions", "IPython.core.getipython", "IPython.core.magic"),
    *("IPython.core.interactiveshell", "IPython.core.pylabtools"),
)
# Older libraries ask for parts that we have not where it is less.
_VERSION = (9, 0, 0)


class Finder:
    """The last finder of modules: it is asked for what nobody else has found."""

    def __init__(self, outputs: display.Outputs) -> None:
        self._outputs = outputs

    def find_spec(self, name: str, path: object = None, target: object = None) -> "Any":
        if name not in _NAMES:
            return None
        return type(sys.__spec__)(name, self, is_package=name in ("IPython", "IPython.core"))  # type: ignore[arg-type]

    def create_module(self, spec: object) -> None:
        return None

    def exec_module(self, module: "ModuleType") -> None:
        module.__dict__.update(_contents(self._outputs))


def use_ours(outputs: display.Outputs, module: "ModuleType") -> None:
    """Have a module of the real IPython show values as we do."""
    ours = _functions(outputs)
    module.__dict__.update({name: ours[name] for name in ours if hasattr(module, name)})


def _contents(outputs: display.Outputs) -> "dict[str, object]":
    """All names of all modules: which of them has a name makes no difference."""
    from . import shown_objects
    from .shell import InteractiveShell, UsageError

    return {
        **{name: getattr(shown_objects, name) for name in shown_objects.__all__},
        **_functions(outputs),
        **_magics(outputs),
        "InteractiveShell": InteractiveShell,
        "UsageError": UsageError,
        "backend2gui": {},
        "version_info": _VERSION,
        "__version__": ".".join(map(str, _VERSION)),
    }


def _functions(outputs: display.Outputs) -> "dict[str, object]":
    def show(
        *values: object,
        raw: bool = False,
        display_id: object = None,
        **options: object,
    ) -> "Handle | None":
        for value in values:
            if raw:
                outputs.show_bundle(value)  # type: ignore[arg-type]
            else:
                outputs.display(value)
        return Handle(outputs, display_id) if display_id else None

    def publish(data: "dict[str, object]", metadata: object = None, **_: object) -> None:
        outputs.show_bundle(data)

    def update(value: object, *, display_id: object, **options: object) -> None:
        outputs.display(value)

    def clear(wait: bool = False) -> None:
        # What was shown has been told already.
        return

    show.__name__ = "display"
    return {
        "display": show,
        "publish_display_data": publish,
        "update_display": update,
        "clear_output": clear,
        "get_ipython": lambda: outputs.shell(),
        **{f"display_{name}": _shown_as(outputs, mime) for name, mime in _KINDS.items()},
    }


_KINDS = {
    "html": "text/html",
    "markdown": "text/markdown",
    "latex": "text/latex",
    "svg": "image/svg+xml",
    "png": "image/png",
    "jpeg": "image/jpeg",
    "json": "application/json",
    "javascript": "application/javascript",
    "pretty": "text/plain",
}


def _shown_as(outputs: display.Outputs, mime: str) -> "Any":
    def show(*values: object, raw: bool = False, **options: object) -> None:
        for value in values:
            if raw:
                outputs.show_bundle({mime: value})
            else:
                outputs.display(value)

    return show


class Handle:
    """What was shown under a name. A later value of it is shown behind it."""

    def __init__(self, outputs: display.Outputs, display_id: object) -> None:
        self.display_id = display_id if isinstance(display_id, str) else "1"
        self._outputs = outputs

    def display(self, value: object, **_: object) -> None:
        self._outputs.display(value)

    update = display


def _magics(outputs: display.Outputs) -> "dict[str, object]":
    """Decorators by which code makes magics of its own."""

    def add(function: "Any", kind: str, name: "str | None" = None) -> "Any":
        shell: "Any" = outputs.shell()
        if shell is not None:
            shell.register_magic_function(function, kind, name)
        return function

    def register(kind: str) -> "Any":
        def decorate(function: "Any") -> "Any":
            if callable(function):
                return add(function, kind)
            return lambda made: add(made, kind, function)

        return decorate

    def mark(kind: str) -> "Any":
        def decorate(function: "Any" = None) -> "Any":
            if callable(function):
                function.magic_kind = kind
                return function
            return mark(kind)

        return decorate

    class Magics:
        magics: "dict[str, str]" = {}

        def __init__(self, shell: object = None, **_: object) -> None:
            self.shell = shell

    def magics_class(kind: "Any") -> "Any":
        marked = {name: getattr(each, "magic_kind", "") for name, each in vars(kind).items()}
        kind.magics = {name: of for name, of in marked.items() if of}
        return kind

    kinds = ("line", "cell", "line_cell")
    return {
        "Magics": Magics,
        "magics_class": magics_class,
        "needs_local_scope": lambda function: function,
        **{f"register_{kind}_magic": register(kind) for kind in kinds},
        **{f"{kind}_magic": mark(kind) for kind in kinds},
    }
