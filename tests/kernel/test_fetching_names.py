"""What a fetched file is called, whatever its server and its URL say."""

from __future__ import annotations

import unicodedata
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from executions.capabilities.fetching import filenames as fetching_names
from executions.capabilities.fetching.filenames import (
    MOST_BYTES,
    Names,
    clean_name,
    filename,
    name_of,
)


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ('attachment; filename="data.csv"', "data.csv"),
        ("attachment; filename=data.csv", "data.csv"),
        ("ATTACHMENT; FileName = data.csv ; x=y", "data.csv"),
        ("inline; filename=my data.csv", "my data.csv"),
        ('filename="myimage.jpg"', "myimage.jpg"),
        ('attachment; filename="a;b.csv"', "a;b.csv"),
        (r'attachment; filename="a\"b.csv"', 'a"b.csv'),
        ('attachment; x=";filename=evil"; filename="good"', "good"),
        ('attachment; filename="first"; filename="second"', "first"),
        ("attachment; filename*=UTF-8''na%C3%AFve%20plan.txt", "naïve plan.txt"),
        ("attachment; filename=plain.txt; filename*=utf-8'en'%e2%82%ac.txt", "€.txt"),
        ("attachment; filename*=iso-8859-1''%A3.txt; filename=x", "£.txt"),
        ("attachment; filename*=UTF-8''%FF%FE; filename=plain.txt", "plain.txt"),
        ("attachment; filename*=utf-7''%2BAC8-; filename=plain.txt", "plain.txt"),
        ("attachment; filename*=UTF-8'x; filename=plain.txt", "plain.txt"),
        ('attachment; filename="unclosed', "unclosed"),
        ("attachment", ""),
        ("attachment; filename=", ""),
        ("", ""),
        (";;;=;", ""),
    ],
)
def test_a_disposition_is_read_as_the_standards_have_it(header: str, name: str) -> None:
    assert filename(header) == name


@given(st.text(max_size=40).filter(lambda text: not any("\ud800" <= c <= "\udfff" for c in text)))
def test_an_extended_name_comes_back_as_it_was(name: str) -> None:
    assert filename(f"attachment; filename*=UTF-8''{quote(name, safe='')}") == name


@given(st.text(max_size=40))
def test_a_quoted_name_comes_back_as_it_was(name: str) -> None:
    quoted = name.replace("\\", "\\\\").replace('"', '\\"')
    assert filename(f'attachment; filename="{quoted}"; later=x') == name


@given(st.text(alphabet=st.sampled_from("filename*=\"\\;' UTF-8%2e/a"), max_size=80))
def test_no_disposition_is_an_error(header: str) -> None:
    clean_name(filename(header))


@pytest.mark.parametrize(
    ("given_name", "name"),
    [
        ("data.csv", "data.csv"),
        ("Müller Bericht.pdf", "Müller Bericht.pdf"),
        ("报告（终稿）.pdf", "报告（终稿）.pdf"),
        ("../../etc/passwd", "passwd"),
        ("..\\..\\boot.ini", "boot.ini"),
        ("C:\\temp\\a.txt", "a.txt"),
        ("/etc/", "etc"),
        ("..", ""),
        (".", ""),
        ("...", ""),
        ("", ""),
        ("   ", ""),
        ("a/..", ""),
        ("\u2025", ""),
        ("\uff0e\uff0e", ""),
        ("a\uff0fb", "a_b"),
        ("a\u2215b", "a\u2215b"),
        (".bashrc", "bashrc"),
        (".cofferdam-0123456789abcdef", "cofferdam-0123456789abcdef"),
        ("a.txt. . .", "a.txt"),
        ("a\0b.txt", "ab.txt"),
        ("a\r\nSet-Cookie: x", "a Set-Cookie_ x"),
        ("a\x1b[31m.txt", "a[31m.txt"),
        ("invoice\u202efdp.exe", "invoicefdp.exe"),
        ("a\u200bb\ufeff.txt", "ab.txt"),
        ("a\u2028b", "a b"),
        ('<a>:"b"|?*.txt', "_a___b____.txt"),
        ("CON", "_CON"),
        ("nul.txt", "_nul.txt"),
        ("Com1.tar.gz", "_Com1.tar.gz"),
        ("com¹.txt", "_com¹.txt"),
        ("aux .txt", "_aux .txt"),
        ("console.txt", "console.txt"),
        ("-rf", "_-rf"),
        ("~root", "_~root"),
        ("e\u0301.txt", "é.txt"),
        ("\ud800.txt", "txt"),
    ],
)
def test_a_name_is_cleaned(given_name: str, name: str) -> None:
    assert clean_name(given_name) == name


@given(st.text(max_size=300))
@example("\u0338" * 200 + ".tar.gz")
@example("." + "é" * 300)
@example("a" + "\U0001f600" * 100 + ".jpeg")
def test_a_cleaned_name_is_one_plain_part_of_a_path(text: str) -> None:
    name = clean_name(text)
    assert clean_name(name) == name
    if not name:
        return
    for form in (name, unicodedata.normalize("NFKC", name)):
        assert not set(form) & set("/\\\0")
        assert form.strip(" .")
        assert not form.startswith(".")
    assert not any(unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp") for char in name)
    assert len(name.encode()) <= MOST_BYTES
    assert Path("folder", name).parent == Path("folder")
    assert not name.endswith((" ", "."))


def test_a_long_name_keeps_its_ending() -> None:
    assert clean_name("é" * 500 + ".tar.gz") == "é" * 96 + ".tar.gz"
    assert clean_name("x" * 10_000_000 + ".csv") == "x" * MOST_BYTES


def test_a_folder_full_of_numbers_is_counted_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Names(["a.csv", *(f"a-{number}.csv" for number in range(2, 2000))])
    looks = []
    monkeypatch.setattr(fetching_names, "_folded", lambda name: (looks.append(name), name)[1])
    assert [found.distinct("a.csv") for _ in range(200)][-1] == "a-2199.csv"
    assert len(looks) < 3000


def test_equal_names_are_told_apart() -> None:
    names = Names(["Data.csv"])
    given_names = [
        "data.csv",
        "DATA.CSV",
        "a.tar.gz",
        "a.tar.gz",
        "",
        "",
        "ﬁle",
        "straße",
        "STRASSE",
    ]
    assert [names.distinct(name) for name in given_names] == [
        *("data-2.csv", "DATA-3.CSV", "a.tar.gz", "a-2.tar.gz"),
        *("file", "file-2", "ﬁle-3", "straße", "STRASSE-2"),
    ]


@given(st.lists(st.text(alphabet="aA.-2éE\u0301", max_size=5), max_size=30))
def test_no_two_of_a_folder_are_the_same_to_any_system(texts: list[str]) -> None:
    names = Names()
    found = [names.distinct(clean_name(text)) for text in texts]
    folded = {unicodedata.normalize("NFKC", name).casefold() for name in found}
    assert len(folded) == len(texts)


@pytest.mark.parametrize(
    ("header", "asked", "final", "name"),
    [
        ("attachment; filename=h.csv", "/a.csv?Content-Disposition=filename%3Dq.csv", "", "h.csv"),
        ("", "/a.jpg?Content-Disposition=filename%3D%22my%20image.jpg%22", "", "my image.jpg"),
        ("", "/a?response-content-disposition=attachment%3B%20filename%3Dq.csv", "", "q.csv"),
        ("", "/a?x=1", "/b?response-content-disposition=filename%3Dq.csv", "q.csv"),
        ("", "/short", "/files/data.csv?signature=x", "data.csv"),
        ("", "/files/data.csv", "/", "data.csv"),
        ("attachment; filename=..", "/a%20b.csv", "", "a b.csv"),
        ("", "/x/..%2f..%2fetc%2fpasswd", "", "passwd"),
        ("", "/%FF.csv", "", "_.csv"),
        ("", "/", "", ""),
    ],
)
def test_a_name_is_the_servers_then_the_urls(
    header: str, asked: str, final: str, name: str
) -> None:
    first = httpx.URL(f"https://files.example{asked}")
    last = httpx.URL(f"https://files.example{final or asked}")
    assert name_of(header, first, last) == name
