"""What `get_ipython()` answers with: the commands and magics of cells, without IPython.

Where IPython is installed, magics that are not here are its own.
"""

import os
import re
import shlex
import sys

from . import display, network

TYPE_CHECKING = False  # as in typing, which is too dear to import here
if TYPE_CHECKING:
    from typing import Any, Callable

    Magic = Callable[..., object]

# `{expression}`, `$name`, and `$$name` for the shell's own.
_VARIABLE = re.compile(r"\{([^{}\n]+)\}|\$(\$?)([A-Za-z_]\w*)")
_PIP = re.compile(r"^\s*(?:pip3?|python3? -m pip)(?=\s)")
# What is of interfaces that are not here, and does nothing.
_QUIET = (
    *("matplotlib", "load_ext", "reload_ext", "autoreload", "aimport", "config", "gui", "pylab"),
    *("automagic", "colors", "precision"),
)
_SHOWN_AS = {
    "html": "text/html",
    "markdown": "text/markdown",
    "latex": "text/latex",
    "svg": "image/svg+xml",
    "javascript": "application/javascript",
    "js": "application/javascript",
}
_INTERPRETERS = {"bash": ["bash"], "sh": ["sh"], "perl": ["perl"], "ruby": ["ruby"]}


class UsageError(Exception):
    """A magic that is not here, or is used wrongly."""

    __module__ = "IPython.core.error"


class Lines(list):  # type: ignore[type-arg]
    """What a command has put out, line by line, as IPython's SList: also `n` and `s`."""

    @property
    def n(self) -> str:
        return "\n".join(self)

    @property
    def s(self) -> str:
        return " ".join(self)

    @property
    def l(self) -> "list[str]":  # noqa: E743
        return list(self)


class Events:
    """Callbacks that nobody calls."""

    def register(self, event: str, function: object) -> None:
        return

    unregister = trigger = register


class Publisher:
    """Where libraries that know IPython send what they show."""

    def __init__(self, outputs: display.Outputs) -> None:
        self._outputs = outputs

    def publish(self, data: "dict[str, object]", metadata: object = None, **_: object) -> None:
        self._outputs.show_bundle(data)

    def clear_output(self, wait: bool = False) -> None:
        return


class Formatter:
    """How values of a type are shown as one MIME type, where a library says so."""

    enabled = True

    def __init__(self, mime: str, outputs: display.Outputs) -> None:
        self.type_printers = outputs.printers.setdefault(mime, {})

    def for_type(self, kind: type, function: "Magic | None" = None) -> object:
        former = self.type_printers.get(kind)
        if function is not None:
            self.type_printers[kind] = function
        return former

    def for_type_by_name(self, module: str, name: str, function: "Magic | None" = None) -> object:
        kind = getattr(sys.modules.get(module), name, None)
        return self.for_type(kind, function) if isinstance(kind, type) else None

    def pop(self, kind: type, default: object = None) -> object:
        return self.type_printers.pop(kind, default)


class Formatters:
    def __init__(self, outputs: display.Outputs) -> None:
        mimes = ("text/plain", *(mime for mime, _ in display.METHODS))
        self.formatters = {mime: Formatter(mime, outputs) for mime in mimes}


class InteractiveShell:
    """The shell of a context. `evaluate` runs code in it and returns its last value."""

    # Whether every expression of a cell is shown, or the last one.
    ast_node_interactivity = "last_expr"
    _instance: "InteractiveShell | None" = None

    def __init__(
        self,
        namespace: "dict[str, Any]",
        outputs: display.Outputs,
        evaluate: "Callable[[str], object]",
    ) -> None:
        self.user_ns = self.user_global_ns = namespace
        self.user_module = sys.modules["__main__"]
        self.config: "dict[str, object]" = {}
        self.events = Events()
        self.display_pub = Publisher(outputs)
        self.display_formatter = Formatters(outputs)
        self.execution_count = 0
        self._evaluate = evaluate
        self._outputs = outputs
        self._line_magics: "dict[str, Magic]" = {}
        self._cell_magics: "dict[str, Magic]" = {}
        type(self)._instance = self

    @classmethod
    def instance(cls, *_: object, **__: object) -> "InteractiveShell | None":
        return cls._instance

    @classmethod
    def initialized(cls) -> bool:
        return cls._instance is not None

    # Commands.

    def system(self, command: str) -> None:
        """Run a shell's command, whose output is the cell's."""
        command = self.var_expand(command)
        changed = _PIP.sub(f"{shlex.quote(sys.executable)} -m pip", command)
        if changed != command:
            self._pip(changed)
        else:
            self.user_ns["_exit_code"] = _run([_shell(), "-c", command])

    system_raw = system_piped = system

    def getoutput(self, command: str, split: bool = True, depth: int = 0) -> "Lines | str":
        """What a shell's command has put out on both of its streams."""
        import subprocess

        done = subprocess.run(
            [_shell(), "-c", self.var_expand(command)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        self.user_ns["_exit_code"] = done.returncode
        text = done.stdout.decode("utf-8", "replace")
        return Lines(text.splitlines()) if split else text

    def var_expand(self, text: str, depth: int = 0) -> str:
        """The text with the values of Python's names in it. What is none is left to the shell."""

        def value(found: "re.Match[str]") -> str:
            expression, escape, name = found.groups()
            if expression is None:
                if escape:
                    return f"${name}"
                return str(self.user_ns[name]) if name in self.user_ns else found[0]
            try:
                return str(eval(expression, self.user_ns))
            except Exception:
                return found[0]

        return _VARIABLE.sub(value, text)

    def _pip(self, command: str) -> None:
        has_network = _has_network()
        before = dict(os.environ)
        if not has_network:
            # It would try again for minutes.
            os.environ.update(PIP_RETRIES="0", PIP_DEFAULT_TIMEOUT="1")
        # That the interpreter is the distribution's is of no concern in a sandbox.
        os.environ.setdefault("PIP_BREAK_SYSTEM_PACKAGES", "1")
        os.environ.setdefault("PIP_DISABLE_PIP_VERSION_CHECK", "1")
        try:
            self.user_ns["_exit_code"] = _run([_shell(), "-c", command])
        finally:
            for name in set(os.environ) - set(before):
                del os.environ[name]
            os.environ.update(before)

    # Magics.

    def run_line_magic(self, name: str, line: str, _stack_depth: int = 1) -> object:
        """Carry out `%name line`. Raises UsageError where there is no such magic."""
        if name in self._line_magics:
            return self._line_magics[name](self.var_expand(line))
        if name in _QUIET:
            return None
        known = getattr(self, f"_line_{name}", None)
        if known is None:
            real = self._real(f"Line magic function `%{name}` not found.")
            return real.run_line_magic(name, line)
        # What is code has its braces and dollars for itself.
        return known(line if name in ("time", "timeit") else self.var_expand(line))

    def run_cell_magic(self, name: str, line: str, cell: str) -> object:
        """Carry out `%%name line` with the rest of the cell. Raises UsageError."""
        if name in self._cell_magics:
            return self._cell_magics[name](self.var_expand(line), cell)
        if name in _SHOWN_AS:
            self._outputs.show_bundle(
                {_SHOWN_AS[name]: cell.lstrip("\n"), "text/plain": f"<{name}>"}
            )
            return None
        if name in _INTERPRETERS:
            self._script([*_INTERPRETERS[name], *shlex.split(line)], cell)
            return None
        known = getattr(self, f"_cell_{name}", None)
        if known is None:
            real = self._real(f"Cell magic `%%{name}` not found.")
            return real.run_cell_magic(name, line, cell)
        return known(line, cell)

    def magic(self, text: str) -> object:
        name, _, line = text.lstrip("%").partition(" ")
        return self.run_line_magic(name, line)

    def register_magic_function(
        self, function: "Magic", magic_kind: str = "line", magic_name: "str | None" = None
    ) -> None:
        name = magic_name or function.__name__
        if magic_kind in ("line", "line_cell"):
            self._line_magics[name] = function
        if magic_kind in ("cell", "line_cell"):
            self._cell_magics[name] = function

    def register_magics(self, *classes: "Any") -> None:
        for each in classes:
            made = each(self) if isinstance(each, type) else each
            for name, kind in getattr(type(made), "magics", {}).items():
                self.register_magic_function(getattr(made, name), kind, name)

    def _real(self, problem: str) -> "Any":
        """IPython's own shell over the same names. Raises UsageError where it is not installed."""
        try:
            from IPython.core.interactiveshell import (  # type: ignore[import-not-found]
                InteractiveShell as Real,
            )
            from traitlets.config import Config  # type: ignore[import-not-found]
        except ImportError:
            raise UsageError(problem) from None
        if Real is InteractiveShell:
            raise UsageError(problem)
        if not Real.initialized():
            os.environ.setdefault("IPYTHONDIR", os.environ.get("TMPDIR", "/tmp") + "/.ipython")
            config = Config()
            config.HistoryManager.enabled = False
            real = Real.instance(config=config, user_module=self.user_module, user_ns=self.user_ns)
            real.display_pub.publish = self.display_pub.publish
            for name in ("get_ipython", "exit", "quit"):
                self.user_ns.pop(name, None)
            vars(sys.modules["builtins"])["display"] = self._outputs.display
            vars(sys.modules["builtins"])["get_ipython"] = lambda: self
        return Real.instance()

    def _line_pip(self, line: str) -> None:
        self._pip(f"{shlex.quote(sys.executable)} -m pip {line}")

    def _line_conda(self, line: str) -> None:
        raise UsageError("conda is not available. `%pip list` shows the installed packages.")

    def _line_cd(self, line: str) -> None:
        os.chdir(os.path.expanduser(line.strip().strip("'\"") or "~"))
        print(os.getcwd())

    def _line_pwd(self, line: str) -> str:
        return os.getcwd()

    def _line_sx(self, line: str) -> "Lines | str":
        return self.getoutput(line)

    def _line_system(self, line: str) -> None:
        self.system(line)

    def _line_ls(self, line: str) -> None:
        self.system(f"ls {line}")

    def _line_cat(self, line: str) -> None:
        self.system(f"cat {line}")

    def _line_mkdir(self, line: str) -> None:
        self.system(f"mkdir {line}")

    def _line_rm(self, line: str) -> None:
        self.system(f"rm {line}")

    def _line_cp(self, line: str) -> None:
        self.system(f"cp {line}")

    def _line_mv(self, line: str) -> None:
        self.system(f"mv {line}")

    def _line_env(self, line: str) -> object:
        name, given, value = line.partition("=") if "=" in line else line.partition(" ")
        if not name.strip():
            return dict(os.environ)
        if not given:
            return os.environ.get(name.strip())
        os.environ[name.strip()] = value.strip()
        print(f"env: {name.strip()}={value.strip()}")
        return None

    def _line_set_env(self, line: str) -> None:
        self._line_env(line)

    def _own_names(self) -> "list[str]":
        left_out = ("arguments", "In", "Out")
        found = (name for name in self.user_ns if not name.startswith("_"))
        return sorted(name for name in found if name not in left_out)

    def _line_who(self, line: str) -> None:
        print("\t ".join(self._own_names()) or "Interactive namespace is empty.")

    def _line_who_ls(self, line: str) -> "list[str]":
        return self._own_names()

    def _line_whos(self, line: str) -> None:
        for name in self._own_names():
            print(f"{name:<16} {type(self.user_ns[name]).__name__:<12} {self.user_ns[name]!r:.60}")

    def _line_reset(self, line: str) -> None:
        for name in self._own_names():
            del self.user_ns[name]

    def _line_run(self, line: str) -> None:
        import runpy

        path, *arguments = shlex.split(line)
        former, sys.argv[:] = list(sys.argv), [path, *arguments]
        main = sys.modules["__main__"]
        try:
            made = runpy.run_path(path, run_name="__main__")
        finally:
            sys.argv[:] = former
            sys.modules["__main__"] = main
        self.user_ns.update({n: v for n, v in made.items() if not n.startswith("__")})

    def _line_pinfo(self, line: str) -> None:
        import inspect

        try:
            value = eval(line, self.user_ns)
        except Exception:
            print(f"Object `{line}` not found.")
            return
        try:
            print(f"Signature: {line}{inspect.signature(value)}")
        except (TypeError, ValueError):
            print(f"Type: {type(value).__name__}")
        print(f"Docstring: {inspect.getdoc(value)}")

    def _line_time(self, line: str) -> object:
        return self._cell_time("", line)

    def _line_timeit(self, line: str) -> None:
        self._cell_timeit("", line)

    def _cell_time(self, line: str, cell: str) -> object:
        import time

        before, began = os.times(), time.perf_counter()
        try:
            return self._evaluate(cell)
        finally:
            wall, after = time.perf_counter() - began, os.times()
            user, system = after[0] - before[0], after[1] - before[1]
            print(
                f"CPU times: user {_seconds(user)}, sys: {_seconds(system)}, "
                f"total: {_seconds(user + system)}\nWall time: {_seconds(wall)}"
            )

    def _cell_timeit(self, line: str, cell: str) -> None:
        import timeit

        options = re.match(
            r"((?:-[nr]\s*\d+\s+|-[a-z]\s+)*)(.*)", (line + " ").lstrip() + cell, re.DOTALL
        )
        assert options is not None
        given = dict(re.findall(r"-([nr])\s*(\d+)", options[1]))
        body, setup = options[2].strip(), "pass"
        if line.strip() and cell.strip() and not options[1].strip():
            # Of a cell the line is what comes before.
            setup, body = line, cell.strip()
        timer = timeit.Timer(body, setup, globals=self.user_ns)
        count = int(given.get("n", 0)) or timer.autorange()[0]
        times = [each / count for each in timer.repeat(int(given.get("r", 7)), count)]
        mean = sum(times) / len(times)
        spread = (sum((each - mean) ** 2 for each in times) / len(times)) ** 0.5
        print(
            f"{_seconds(mean)} ± {_seconds(spread)} per loop (mean ± std. dev. of {len(times)} "
            f"runs, {count:,} loops each)"
        )

    def _cell_capture(self, line: str, cell: str) -> None:
        import contextlib
        import io

        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            self._evaluate(cell)
        name = next((each for each in line.split() if not each.startswith("-")), "")
        if name:
            self.user_ns[name] = Captured(out.getvalue(), err.getvalue())

    def _cell_writefile(self, line: str, cell: str) -> None:
        words = shlex.split(line)
        appends = "-a" in words or "--append" in words
        path = os.path.expanduser(self.var_expand(words[-1]))
        is_there = os.path.exists(path)
        with open(path, "a" if appends else "w", encoding="utf-8") as file:
            file.write(cell[1:])
        print(f"{'Appending to' if appends else 'Overwriting' if is_there else 'Writing'} {path}")

    _cell_file = _cell_writefile

    def _cell_script(self, line: str, cell: str) -> None:
        self._script(shlex.split(line), cell)

    def _cell_python(self, line: str, cell: str) -> None:
        self._script([sys.executable, "-", *shlex.split(line)], cell)

    _cell_python3 = _cell_python

    def _script(self, command: "list[str]", cell: str) -> None:
        code = _run(command, cell[1:].encode())
        self.user_ns["_exit_code"] = code
        if code:
            import subprocess

            raise subprocess.CalledProcessError(code, command)

    # Code.

    def run_cell(self, code: str, *_: object, **__: object) -> None:
        from .notebook import plain

        value = self._evaluate(plain(code))
        if value is not None:
            self._outputs.display(value)

    def ev(self, expression: str) -> object:
        return eval(expression, self.user_ns)

    def ex(self, code: str) -> None:
        exec(code, self.user_ns)

    def push(self, names: "dict[str, object]", interactive: bool = True) -> None:
        self.user_ns.update(names)

    def reset(self, new_session: bool = True) -> None:
        self._line_reset("")

    def set_next_input(self, *_: object, **__: object) -> None:
        return

    enable_gui = enable_matplotlib = set_custom_exc = set_next_input


class Captured:
    """What `%%capture name` keeps."""

    def __init__(self, stdout: str, stderr: str) -> None:
        self.stdout, self.stderr = stdout, stderr
        self.outputs: "list[object]" = []

    def __str__(self) -> str:
        return self.stdout

    def show(self) -> None:
        sys.stdout.write(self.stdout)
        sys.stderr.write(self.stderr)

    __call__ = show


def _run(command: "list[str]", given: "bytes | None" = None) -> int:
    """Run a program whose output is the cell's. Its exit code."""
    import subprocess

    pipes = [None if _is_direct(*each) else subprocess.PIPE for each in _streams()]
    for stream, _ in _streams():
        # It may be the program's own, and closed.
        if hasattr(stream, "flush") and not getattr(stream, "closed", False):
            stream.flush()
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL if given is None else subprocess.PIPE,
        stdout=pipes[0],
        stderr=pipes[1],
    )
    try:
        told = process.communicate(given)
    except BaseException:
        process.kill()
        process.wait()
        raise
    for (stream, _), text in zip(_streams(), told):
        if text and stream is not None:
            stream.write(text.decode("utf-8", "replace"))
    return process.returncode


def _streams() -> "list[tuple[Any, int]]":
    return [(sys.stdout, 1), (sys.stderr, 2)]


def _is_direct(stream: "Any", fd: int) -> bool:
    """Whether what is written to the stream comes out at this descriptor."""
    try:
        return bool(stream.fileno() == fd)
    except (AttributeError, OSError, ValueError):
        return False


def _shell() -> str:
    return "/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh"


def _has_network() -> bool:
    """Whether there is a way to anywhere else. Where nothing says so, there is."""
    if network.is_open(os.environ):
        return True
    try:
        with open("/proc/net/route") as routes:
            return any(line.split()[0] != "lo" for line in routes.readlines()[1:] if line.strip())
    except OSError:
        return True


def _seconds(seconds: float) -> str:
    for unit, factor in (("s", 1), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"
