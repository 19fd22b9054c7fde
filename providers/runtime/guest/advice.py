"""Remarks on what a program is about to use. Advice for people: it bounds and stops nothing.

Whoever wants to hide something hides it from any list like this one. The sandbox is the boundary.
"""

REMARKABLE_MODULES = {
    "ctypes": "calls native code",
    "fcntl": "controls files and devices",
    "importlib": "imports by name",
    "multiprocessing": "starts processes",
    "os": "reaches files and processes",
    "pickle": "can run code when it loads data",
    "pty": "starts processes",
    "resource": "changes limits",
    "shutil": "changes files",
    "signal": "handles signals",
    "socket": "uses the network",
    "subprocess": "starts processes",
}
REMARKABLE_CALLS = {
    "__import__": "imports by name",
    "compile": "makes code of text",
    "eval": "runs text as code",
    "exec": "runs text as code",
    "open": "opens files",
}

# Of a program; more say nothing new.
MOST = 50


def remarks(code: str) -> "list[list[object]]":
    """[line, name, what it does] for each remarkable import and call; none for what has no tree."""
    import ast

    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    found: "list[list[object]]" = []
    for node in ast.walk(tree):
        names: "list[str]" = []
        line = 0
        if isinstance(node, ast.Import):
            line, names = node.lineno, [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            line, names = node.lineno, [node.module or ""]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            name = node.func.id
            if name in REMARKABLE_CALLS:
                found.append([node.lineno, name, REMARKABLE_CALLS[name]])
        for name in names:
            module = name.partition(".")[0]
            if module in REMARKABLE_MODULES:
                found.append([line, name[:100], REMARKABLE_MODULES[module]])
    found.sort(key=lambda remark: remark[0])  # type: ignore[arg-type, return-value]
    return found[:MOST]


def checked(claimed: object) -> "tuple[list[list[object]], int]":
    """Remarks as `remarks` makes them, and how many there were that are none.

    They come from the process that runs user code, which may write anything in their place.
    """
    if not isinstance(claimed, list):
        return [], 1
    kept = [each for each in claimed[:MOST] if _is_remark(each)]
    return kept, len(claimed) - len(kept)


def _is_remark(claimed: object) -> bool:
    return (
        isinstance(claimed, list)
        and len(claimed) == 3
        and type(claimed[0]) is int
        and 0 < claimed[0] < 1 << 31
        and all(
            isinstance(text, str) and len(text) <= 100 and text.isprintable()
            for text in claimed[1:]
        )
    )
