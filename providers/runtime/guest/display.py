"""Rich values as MIME bundles: what `display()` and the last value of a prompt look like.

Each goes to the supervisor at once and out of band, so that nothing printed can be taken for one
and a program that is ended later keeps those it has shown.
"""

import _thread
import os
import sys

from . import plots, program, wire
from .names import too_large

TYPE_CHECKING = False  # as in typing, which is too dear to import here
if TYPE_CHECKING:
    from typing import Any, Callable

TEXT_LIMIT = 200_000

# What is made of a value beside what it shows, and left out first where there is no room.
CHART = "application/vnd.cofferdam.chart+json"
COLUMNS = "application/vnd.cofferdam.columns+json"
LISTED = "application/vnd.cofferdam.listed+json"

METHODS = (
    ("text/html", "_repr_html_"),
    ("text/markdown", "_repr_markdown_"),
    ("text/latex", "_repr_latex_"),
    ("image/svg+xml", "_repr_svg_"),
    ("image/png", "_repr_png_"),
    ("image/jpeg", "_repr_jpeg_"),
    ("application/pdf", "_repr_pdf_"),
    ("application/json", "_repr_json_"),
)


class Outputs:
    """The rich outputs of this process. Those of children that the program forks go nowhere."""

    def __init__(self, report: int) -> None:
        """Frames go to the descriptor `report`."""
        self.room = self.most = 0
        # What each frame says beside its kind.
        self.mark: "dict[str, object]" = {}
        self.write = wire.write_all
        # What has ended the program, as JSON; empty while nothing has.
        self.exception = b""
        # What `get_ipython()` answers with: nothing in a program that runs by itself.
        self.shell: "Callable[[], object]" = lambda: None
        # By MIME type and type of value, where a library says how its values are shown.
        self.printers: "dict[str, dict[type, Callable[[Any], object]]]" = {}
        self._report = report
        self._process = os.getpid()
        self._writing = _thread.allocate_lock()
        self._shown: "list[object]" = []

    def open(self) -> None:
        """Let the program show values, and take over `plt.show()`."""
        _builtins()["display"] = self.display
        plots.hook(self.show_figures, self.display)
        for name in ("IPython.core.display_functions", "IPython.core.getipython"):
            plots.when_imported(name, self._use_ours)
        sys.meta_path.append(_IPython(self))

    def allow(self, size: int) -> None:
        """Have what is shown from now on count up to so many bytes, in all."""
        self.room = self.most = size

    def _use_ours(self, module: "Any") -> None:
        from . import ipython

        ipython.use_ours(self, module)

    def display(self, *values: object, raw: bool = False, **_: object) -> None:
        """Show values richly: the builtin `display` of every program. Those that are `raw` are
        bundles themselves."""
        for value in values:
            if raw and isinstance(value, dict):
                self.show_bundle(value)
                continue
            bundle = {**self._represent(value), **_as_data(LISTED, _listed, value)}
            self._send(bundle, value)

    def show_bundle(self, data: "dict[str, object]") -> None:
        """Show what is given by MIME type. Raises TypeError or ValueError for what cannot be."""
        self._send_parts({str(mime): encode(str(mime), each) for mime, each in data.items()}, [])

    def show_if_rich(self, value: object) -> None:
        """Show a value that has more to show than its repr()."""
        bundle = self._represent(value)
        if bundle:
            self._send(bundle, value)

    def show_figures(self) -> None:
        """Show every open figure and close it, as `plt.show()` does in a notebook."""
        for figure in plots.open_figures():
            self._send(_drawn(figure), figure)
        plots.close_figures()

    def finish(self) -> None:
        """Show the figures that are open still. What goes wrong is told on standard error."""
        try:
            for figure in plots.open_figures():
                if not any(figure is shown for shown in self._shown):
                    self._send(_drawn(figure), figure)
        except Exception as error:
            _complain("an open figure cannot be shown", error)

    def end_cell(self) -> None:
        """Show the figures that are open still and were not shown, and close them all."""
        self.finish()
        self._shown.clear()
        plots.close_figures()

    def note(self, error: BaseException) -> None:
        """Keep what has ended the program, for the report of its end."""
        self.exception = program.describe_exception(error)

    def parts_of_end(self, result: "bytes | None") -> "list[tuple[str, bytes]]":
        """What the report of the program's end has: what `main()` returned, or what ended it."""
        parts = [] if result is None else [("result", result)]
        return [*parts, ("exception", self.exception)] if self.exception else parts

    def report(self, frame: bytes) -> bool:
        """Write one frame, never in the middle of another. Whether it could be written."""
        if os.getpid() != self._process:
            return True
        with self._writing:
            try:
                self.write(self._report, frame)
            except OSError:
                # The program has closed all descriptors: nothing can be told any more.
                return False
        return True

    def _represent(self, value: object) -> "dict[str, bytes]":
        if plots.is_figure(value):
            self._shown.append(value)
            return _drawn(value)
        if plots.is_plotly(value):
            return {mime: encode(mime, each) for mime, each in plots.plotly_bundle(value).items()}
        found: "dict[str, object]" = {}
        for mime, name in METHODS:
            found[mime] = _call(value, name)
        for mime, printers in self.printers.items():
            printer = next(
                (printers[kind] for kind in type(value).__mro__ if kind in printers), None
            )
            # That of plain text takes a printer of IPython's.
            if printer is not None and mime != "text/plain":
                try:
                    found[mime] = printer(value)
                except Exception as error:
                    _complain(f"{type(value).__name__} as {mime}", error)
        bundle = _call(value, "_repr_mimebundle_", include=None, exclude=None)
        if isinstance(bundle, dict):
            found.update(bundle)
        encoded = {}
        for mime, data in found.items():
            if data is not None and mime != "text/plain":
                try:
                    encoded[str(mime)] = encode(str(mime), data)
                except (TypeError, ValueError, RecursionError) as error:
                    _complain(f"{type(value).__name__} as {mime}", error)
        return {**encoded, **_as_data(COLUMNS, _columns_of, value)}

    def _send(self, bundle: "dict[str, bytes]", value: object) -> None:
        """Send what a value shows, with its repr(), and what had to be left out of it."""
        cut: "list[list[str]]" = []
        text = _plain(value)
        if len(text) > TEXT_LIMIT:
            reason = f"cut: the first {TEXT_LIMIT} characters are kept"
            text = f"{text[:TEXT_LIMIT]}\n[{reason}]"
            cut.append(["text/plain", reason])
        self._send_parts({**bundle, "text/plain": text.encode(errors="replace")}, cut)

    def _send_parts(self, bundle: "dict[str, bytes]", cut: "list[list[str]]") -> None:
        size = sum(map(len, bundle.values()))
        for mime in (CHART, COLUMNS, LISTED):
            if size > self.room and mime in bundle:
                size -= len(bundle.pop(mime))
                cut.append([mime, "too large together with the others"])
        if size > self.room and "text/plain" in bundle:
            # What it is can be said still: the largest goes first.
            for mime in sorted(bundle, key=lambda each: -len(bundle[each])):
                if size > self.room and mime != "text/plain":
                    size -= len(bundle.pop(mime))
                    cut.append([mime, too_large(self.most, "outputs")])
        # One that is empty says that it was too large.
        parts = list(bundle.items()) if size <= self.room else []
        self.room -= size if parts else 0
        self.report(wire.pack({"type": "output", "cut": cut if parts else [], **self.mark}, parts))


class _IPython:
    """The last finder of modules: where IPython is not installed, it is ours that is found."""

    def __init__(self, outputs: Outputs) -> None:
        self._outputs = outputs

    def find_spec(self, name: str, path: object = None, target: object = None) -> "Any":
        if name != "IPython" and not name.startswith("IPython."):
            return None
        # Only here: who does not ask for it does not pay for it.
        from . import ipython

        return ipython.Finder(self._outputs).find_spec(name)


def _drawn(figure: "Any") -> "dict[str, bytes]":
    # The labels are known once it is drawn.
    return {"image/png": plots.png(figure), **_as_data(CHART, _chart_of, figure)}


def _chart_of(figure: "Any") -> "dict[str, Any] | None":
    from . import charts

    return charts.chart(figure)


def _columns_of(value: object) -> "dict[str, Any] | None":
    if "pandas" not in sys.modules:
        return None
    from . import frames

    return frames.columns(value)


def _listed(value: object) -> "Any":
    if not isinstance(value, (list, dict)):
        return None
    from . import frames

    return frames.as_json(value)


def _as_data(mime: str, make: "Callable[[Any], Any]", value: object) -> "dict[str, bytes]":
    """The value as data. It has been shown, so nobody is told where that cannot be."""
    try:
        made = make(value)
        return {mime: encode(mime, made)} if made is not None else {}
    except Exception:
        return {}


def encode(mime: str, data: object) -> bytes:
    """The bytes of one representation. Raises TypeError or ValueError for what cannot be one."""
    if isinstance(data, (bytes, bytearray, memoryview)):
        return bytes(data)
    if mime == "application/json" or mime.endswith("+json"):
        return wire.dumps_value(data).encode(errors="replace")
    if not isinstance(data, str):
        raise TypeError(f"a {type(data).__name__} is neither text nor bytes")
    if mime.startswith("text/") or mime.endswith(("+xml", "/xml", "/javascript")):
        return data.encode(errors="replace")
    # Notebooks write binary data as base64 text.
    import binascii

    return binascii.a2b_base64(data)


def _call(value: object, name: str, **options: object) -> object:
    """What the value's own method returns, None where it has none or it fails."""
    method = getattr(type(value), name, None)
    if method is None or isinstance(value, type):
        return None
    try:
        data = method(value, **options)
    except Exception as error:
        _complain(f"{type(value).__name__}.{name}()", error)
        return None
    # Some return their data together with remarks on it.
    return data[0] if isinstance(data, tuple) and data else data


def _plain(value: object) -> str:
    try:
        return repr(value)
    except Exception as error:
        return f"<{type(value).__name__}, whose repr() fails: {error!r}>"


def _complain(what: str, error: BaseException) -> None:
    print(f"display: {what}: {type(error).__name__}: {error}", file=sys.stderr)


def _builtins() -> "dict[str, object]":
    return vars(sys.modules["builtins"])
