"""What notebooks write beside Python: `!command`, `%magic`, `%%magic` and `name?`, as Python.

Only what does not compile is looked at, a line at a time where the compiler complains, so that no
valid program means anything else. The host uses this module too.
"""

import re

# ast.PyCF_ONLY_AST and ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
_FLAGS = 0x400 | 0x2000
# Each line of a cell that is rewritten costs one more look at the whole of it.
MOST_LINES = 300

_CELL_MAGIC = re.compile(r"\s*%%(\w[\w.]*)[ \t]*([^\n]*)\n?(.*)", re.DOTALL)
_OF_PYTHON = ("time", "timeit", "capture")
_TARGETS = r"[A-Za-z_][\w.]*(?:\[[^\]]*\])?(?:\s*,\s*[A-Za-z_][\w.]*)*"
_SHELL = re.compile(rf"(?:({_TARGETS})\s*=\s*)?(!!?)(.*)", re.DOTALL)
_MAGIC = re.compile(rf"(?:({_TARGETS})\s*=\s*)?%(\w[\w.]*)(.*)", re.DOTALL)
_HELP = re.compile(r"\?{1,2}\s*([A-Za-z_%][\w.]*)|([A-Za-z_%][\w.]*)\s*\?{1,2}")
# Installers are so often written without a mark that notebooks take them so.
_INSTALLER = re.compile(
    r"(pip)3?\s+((?:install|list|show|freeze|uninstall|download)\b.*)", re.DOTALL
)
_COMMENT = re.compile(r"#[^\n]*")
# The first line that is not blank, where it is indented.
_INDENT = re.compile(r"(?:[^\S\n]*\n)*([ \t]+)\S")


def dedented(code: str) -> str:
    """The code without the indentation of its first line, which every line loses that begins with
    it, as in IPython: those within texts, too. It has as many lines."""
    found = _INDENT.match(code)
    if found is None:
        return code
    return "\n".join(line.removeprefix(found[1]) for line in code.split("\n"))


def plain(code: str, most: int = MOST_LINES) -> str:
    """The code as Python, with as many lines. What cannot be made Python stays as it is, but for
    its indentation."""
    if _INDENT.match(code) is not None and not _is_python(code):
        code = dedented(code)
    found = _CELL_MAGIC.fullmatch(code)
    if found is not None:
        name, line, body = found.groups()
        above = code[: found.start(3)].count("\n")
        # The lines of a body that is Python keep their numbers.
        body = "\n" * (above if name in _OF_PYTHON else min(above, 1)) + body
        return f"get_ipython().run_cell_magic({name!r}, {line.rstrip()!r}, {body!r})"
    lines = code.split("\n")
    for _ in range(most):
        try:
            compile("\n".join(lines), "<cell>", "exec", _FLAGS, dont_inherit=True)
            break
        except SyntaxError as error:
            if not _rewrite(lines, (error.lineno or 0) - 1):
                break
        except (ValueError, RecursionError, MemoryError, OverflowError):
            break
    return "\n".join(lines)


def is_quiet(code: str, line: int, column: int) -> bool:
    """Whether a semicolon follows the last expression, which ends at `line`, counted from 1, and
    the byte `column`: its value is not shown then."""
    first, *rest = code.split("\n")[line - 1 :]
    after = first.encode()[column:].decode("utf-8", "replace")
    return ";" in _COMMENT.sub("", "\n".join([after, *rest]))


def _is_python(code: str) -> bool:
    try:
        compile(code, "<cell>", "exec", _FLAGS, dont_inherit=True)
    except SyntaxError:
        return False
    except (ValueError, RecursionError, MemoryError, OverflowError):
        # Another indentation would not help it.
        return True
    return True


def _rewrite(lines: "list[str]", number: int) -> bool:
    """Make Python of one line and those that continue it. Whether it was anything of a notebook."""
    if not 0 <= number < len(lines):
        return False
    text = lines[number].strip()
    last = number
    while text.endswith("\\") and last + 1 < len(lines):
        last += 1
        text = f"{text[:-1]} {lines[last].strip()}"
    made = _python_of(text)
    if not made:
        return False
    indent = lines[number][: len(lines[number]) - len(lines[number].lstrip())]
    lines[number] = indent + made
    lines[number + 1 : last + 1] = [""] * (last - number)
    return True


def _python_of(text: str) -> str:
    """The line as Python, "" for what is no line of a notebook's."""
    found = _SHELL.fullmatch(text)
    if found is not None:
        target, mark, command = found.groups()
        # A list of lines where it is wanted, else the output itself.
        wants_lines = target or mark == "!!"
        call = f"get_ipython().{'getoutput' if wants_lines else 'system'}({command.strip()!r})"
        return f"{target} = {call}" if target else call
    found = _MAGIC.fullmatch(text)
    if found is not None:
        target, name, line = found.groups()
        call = f"get_ipython().run_line_magic({name!r}, {line.strip()!r})"
        return f"{target} = {call}" if target else call
    found = _INSTALLER.fullmatch(text)
    if found is not None:
        return f"get_ipython().run_line_magic({found[1]!r}, {found[2]!r})"
    found = _HELP.fullmatch(text)
    if found is not None:
        return f"get_ipython().run_line_magic('pinfo', {(found[1] or found[2])!r})"
    return ""
