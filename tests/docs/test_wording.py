"""The linter of wording finds its words where users read them, and its list of files only shrinks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.wording import Words, check, files, judge
from tests.support.processes import ROOT

WORDS = Words({"told": "gets", "what came of": "the result"})


def lines_of(path: Path, text: str) -> list[tuple[int, str]]:
    path.write_text(text, encoding="utf-8")
    return [(each.line, each.text) for each in check(path, WORDS, path.parent)]


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("a.md", "One.\n\nThe caller is told it.\n", [(3, "told")]),
        ("a.md", "What came\nof a run.\n", [(1, "What came of")]),
        ("a.md", "`told`, [x](told.md), untold.\n\n```sh\ntold\n```\n\nTold.\n", [(7, "Told")]),
        ("a.html", '<p class="told">{{ told }}\n<b title="Told">x</b>', [(2, "Told")]),
        ("a.html", "{# told #}{% if told %}", [(1, "told")]),
        ("a.py", 'told = 1\nhelp_text = "The caller is told it."\n', [(2, "told")]),
        ("a.py", '"""The caller is told it."""\ndict(key="told")\n', []),
        ("a.py", 'include("executions.callers.told.urls")\n', []),
        ("a.ts", "told();\n/** The caller\n * is told. */\n", [(3, "told")]),
    ],
)
def test_a_word_is_found_in_prose_and_not_in_code(
    tmp_path: Path, name: str, text: str, found: list[tuple[int, str]]
) -> None:
    assert lines_of(tmp_path / name, text) == found


def test_docstrings_of_the_client_are_read_and_those_of_programs_are_not(tmp_path: Path) -> None:
    for folder, count in (("clients/python/cofferdam", 1), ("executions", 0)):
        path = tmp_path / folder / "a.py"
        path.parent.mkdir(parents=True)
        path.write_text('"""The caller is told it."""\n')
        assert len(check(path, WORDS, tmp_path)) == count


def test_a_finding_names_the_place_and_what_to_write(tmp_path: Path) -> None:
    path = tmp_path / "a.md"
    path.write_text("Told.")
    [finding] = check(path, WORDS, tmp_path)
    assert str(finding) == "a.md:1: 'Told': write gets"


def test_a_file_of_the_list_may_have_words_and_must_have_some(tmp_path: Path) -> None:
    path = tmp_path / "a.md"
    path.write_text("Told.")
    found = {"a.md": check(path, WORDS, tmp_path), "b.md": []}
    assert judge(found, []) == ["a.md:1: 'Told': write gets"]
    assert judge(found, ["a.md"]) == []
    for name in ("b.md", "gone.md"):
        [problem] = judge(found, ["a.md", name])
        assert problem.startswith(f"{name}: has no such word")


def test_pages_templates_programs_and_clients_are_checked() -> None:
    checked = {path.relative_to(ROOT).as_posix() for path in files()}
    assert {
        "README.md",
        "docs/quick-start.md",
        "docs/providers/local.md",
        "templates/404.html",
        "executions/tenants/quotas.py",
        "clients/python/cofferdam/errors.py",
        "clients/typescript/src/client.ts",
        "tests/data/api-schema.yaml",
    } <= checked
