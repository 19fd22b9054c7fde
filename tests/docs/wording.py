"""Check the wording of texts that users read: `python -m tests.docs.wording`, part of `make lint`.

words.toml lists the words that these texts do not use, with their replacements. unfinished.txt lists the
files that still have some. A listed file that has none left is an error, so the list can only shrink:
`--prune` removes such files from it.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
WORDS = HERE / "words.toml"
UNFINISHED = HERE / "unfinished.txt"

PAGES = ("*.md", "docs/**/*.md", "clients/**/*.md", "examples/**/*.md")
TEMPLATES = ("templates/**/*.html", "templates/**/*.txt")
PROGRAMS = (
    "executions/**/*.py",
    "providers/**/*.py",
    "sandbox_site/**/*.py",
    "clients/python/**/*.py",
)
# The first are made by Django, and the others come from package managers.
SKIPPED = ("migrations", "node_modules", "build", "dist")
TYPESCRIPT = ("clients/typescript/src/**/*.ts",)
# The API's own description, as it is snapshotted.
SCHEMA = ("tests/data/api-schema.yaml",)
# Users read the docstrings of the client in their editors. Those of other programs are for developers.
DESCRIBED = "clients/python/cofferdam/"
# A shorter constant is a name, a key or a part of a query.
LEAST_WORDS = 3

_FENCE = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
_OF_PAGES = re.compile(r"`[^`\n]+`|<!--.*?-->|\]\([^()\s]*\)|https?://\S+", re.DOTALL)
_COMMENT = re.compile(r"/\*\*.*?\*/", re.DOTALL)
_OF_TEMPLATES = re.compile(
    r"<(script|style)\b.*?</\1>|\{#.*?#\}|\{% comment.*?endcomment %\}|\{\{.*?\}\}"
    r"|\b(?:class|id|href|src|name|x-[\w:.-]+|@[\w:.-]+|:[\w-]+)=\"[^\"]*\"",
    re.DOTALL,
)


@dataclass(frozen=True)
class Finding:
    """One word in a text, by the path below the project, the line from 1, and what to write instead."""

    path: str
    line: int
    text: str
    instead: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text!r}: write {self.instead}"


class Words:
    """The words of a list, searched for together."""

    def __init__(self, words: dict[str, str]) -> None:
        self._instead = list(words.values())
        self._pattern = re.compile(
            "|".join(rf"(\b(?:{each})(?<=\w)(?!\w))" for each in words), re.IGNORECASE
        )

    @classmethod
    def read(cls) -> Words:
        groups = tomllib.loads(WORDS.read_text(encoding="utf-8"))
        return cls({word: instead for group in groups.values() for word, instead in group.items()})

    def find(self, path: str, text: str, first_line: int = 1) -> Iterator[Finding]:
        """Find the words in one text, which begins in that line."""
        # A phrase may have a line end within it, which is as long as the space.
        for match in self._pattern.finditer(text.replace("\n", " ")):
            line = first_line + text.count("\n", 0, match.start())
            yield Finding(path, line, match[0], self._instead[(match.lastindex or 1) - 1])


def _blanked(text: str, *patterns: re.Pattern[str]) -> str:
    """Replace what is not prose by blanks, so that lines keep their numbers."""
    for pattern in patterns:
        text = pattern.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    return text


def _docstrings(tree: ast.Module) -> set[ast.Constant]:
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, owners) and node.body and isinstance(node.body[0], ast.Expr):
            value = node.body[0].value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                found.add(value)
    return found


def _texts_of_program(source: str, *, is_described: bool) -> Iterator[tuple[str, int]]:
    """Each text constant of a program that may be prose, with its line."""
    tree = ast.parse(source)
    docstrings = _docstrings(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
            continue
        if node in docstrings and not is_described:
            continue
        # The name of a module is no prose.
        if re.fullmatch(r"[\w.]+", node.value):
            continue
        if len(re.findall(r"[A-Za-z]{2,}", node.value)) >= LEAST_WORDS:
            yield _blanked(node.value, _OF_PAGES), node.lineno


def check(path: Path, words: Words, root: Path = ROOT) -> list[Finding]:
    """Find the words of the list in one file."""
    name = path.relative_to(root).as_posix()
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        is_described = name.startswith(DESCRIBED)
        texts = _texts_of_program(source, is_described=is_described)
        return [each for text, line in texts for each in words.find(name, text, line)]
    if path.suffix == ".ts":
        comments = [
            (each[0], source.count("\n", 0, each.start())) for each in _COMMENT.finditer(source)
        ]
        return [
            each
            for text, before in comments
            for each in words.find(name, _blanked(text, _OF_PAGES), 1 + before)
        ]
    patterns = (_OF_TEMPLATES,) if path.suffix in (".html", ".txt") else (_FENCE, _OF_PAGES)
    return list(words.find(name, _blanked(source, *patterns)))


def files(root: Path = ROOT) -> list[Path]:
    """The files with texts that users read."""
    found = {
        path
        for glob in (*PAGES, *TEMPLATES, *PROGRAMS, *TYPESCRIPT, *SCHEMA)
        for path in root.glob(glob)
    }
    return sorted(
        path
        for path in found
        if not set(path.relative_to(root).parts) & set(SKIPPED) and not path.is_symlink()
    )


def judge(found: dict[str, list[Finding]], unfinished: Iterable[str]) -> list[str]:
    """What is wrong: words in files that are finished, and files that are listed without need."""
    listed = set(unfinished)
    problems = [
        str(each) for name, findings in found.items() if name not in listed for each in findings
    ]
    return problems + [
        f"{name}: has no such word; remove it from {UNFINISHED.name} (--prune)"
        for name in sorted(listed)
        if not found.get(name)
    ]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="tests.docs.wording", description=__doc__)
    parser.add_argument("--prune", action="store_true", help="remove finished files from the list")
    parser.add_argument("--all", action="store_true", help="show the unfinished files too")
    options = parser.parse_args(arguments)
    words = Words.read()
    found = {path.relative_to(ROOT).as_posix(): check(path, words) for path in files()}
    lines = UNFINISHED.read_text(encoding="utf-8").splitlines()
    if options.prune:
        lines = [name for name in lines if name.startswith("#") or found.get(name)]
        UNFINISHED.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    unfinished = [name for name in lines if name and not name.startswith("#")]
    problems = judge(found, [] if options.all else unfinished)
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
