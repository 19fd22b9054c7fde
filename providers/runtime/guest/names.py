"""Names of files as text, and what is left out of an answer, each with its reason.

A name is bytes, and here it is text in which a byte that is not UTF-8 is a surrogate (os.fsdecode).
Most names stay as they are, also with spaces and signs that nobody sees. Two kinds of signs would
do harm in a line, a header or a database: control characters, and bytes that are not UTF-8. Each of
their bytes is written as `\\xNN`, and a backslash before what looks like that as `\\x5c`. So every
name has one text, and every text one name. The host uses this module too.
"""

# Of a name that is kept: characters of all of it, and bytes of each part.
MOST_CHARACTERS, PART_BYTES = 512, 255
# Of a list of what was left out: entries, characters of a name or a reason, and bytes of all.
MOST_OMISSIONS, MOST_SHOWN, OMISSION_BYTES = 50, 200, 20_000

_DIGITS = "0123456789abcdef"
_BACKSLASH = 0x5C


def escape(name: str) -> str:
    """Make text of a name that can stand anywhere. `unescape` makes the name of it again."""
    if name.isprintable() and "\\x" not in name:
        return name
    pieces = []
    for place, character in enumerate(name):
        code = ord(character)
        if _is_control(code):
            pieces += [f"\\x{byte:02x}" for byte in character.encode()]
        elif 0xDC80 <= code <= 0xDCFF:
            pieces.append(f"\\x{code & 0xFF:02x}")
        elif 0xD800 <= code <= 0xDFFF:
            # It stands for no byte, so that no file has such a name.
            pieces.append("\ufffd")
        elif code == _BACKSLASH and _escaped(name, place) is not None:
            pieces.append("\\x5c")
        else:
            pieces.append(character)
    return "".join(pieces)


def unescape(text: str) -> str:
    """Make the name of a text that `escape` made. Any other text is a name as it is."""
    if "\\x" not in text:
        return text
    name, place = bytearray(), 0
    try:
        while place < len(text):
            byte = _escaped(text, place) if text[place] == "\\" else None
            if byte is None:
                name += text[place].encode("utf-8", "surrogateescape")
                place += 1
            else:
                name.append(byte)
                place += 4
    except UnicodeEncodeError:
        return text
    return name.decode("utf-8", "surrogateescape")


def problem(name: object) -> str:
    """Say why a file cannot be kept under this name, "" where it can."""
    if not isinstance(name, str) or not name:
        return "it has no name"
    if not _is_text(name):
        return "the name has control characters, or is not UTF-8"
    if len(name) > MOST_CHARACTERS:
        return f"the name is too long: at most {MOST_CHARACTERS} characters are kept"
    for part in name.split("/"):
        if part in ("", ".", ".."):
            return "the name is not a relative path"
        if len(part.encode()) > PART_BYTES and len(_bytes_of(part)) > PART_BYTES:
            return f"the name is too long: a part of it has at most {PART_BYTES} bytes"
    return ""


def shorten(text: str) -> str:
    """Cut a text to what a list of names may have. What is escaped already stays as it is."""
    if not _is_text(text):
        text = escape(text)
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 1]}…"


def too_many(most: int, what: str = "files") -> str:
    """Give the reason for what is beyond a number."""
    return f"too many {what}: at most {most} are kept"


def too_large(most: int, together: str = "") -> str:
    """Give the reason for what is beyond a size in bytes, its own or that of all `together`."""
    of_all = f" in total for all {together}" if together else ""
    return f"too large: at most {most} bytes are kept{of_all}"


class Omissions:
    """What was left out, as [name, reason], and how many more there were than can be told."""

    def __init__(self) -> None:
        self._entries: "list[list[str]]" = []
        self._more = 0
        self._room = OMISSION_BYTES

    def add(self, name: str, reason: str) -> None:
        """Add an entry. `name` is as `escape` has it; anything else is made such text."""
        entry = [shorten(name), shorten(reason)]
        size = sum(len(text.encode()) for text in entry)
        if self._more or len(self._entries) >= MOST_OMISSIONS or size > self._room:
            self._more += 1
            return
        self._room -= size
        self._entries.append(entry)

    def add_claimed(self, claimed: object, of: str = "") -> None:
        """Add the entries of a list that a guest claims, as far as they are such; `of` what."""
        for entry in claimed[: MOST_OMISSIONS + 1] if isinstance(claimed, list) else ():
            is_entry = isinstance(entry, (list, tuple)) and len(entry) == 2
            if not is_entry or not all(isinstance(text, str) for text in entry):
                continue
            number = entry[1].removeprefix("and ").removesuffix(" more")
            if not entry[0] and entry[1] == f"and {number} more" and _is_number(number):
                self._more += int(number)
            else:
                self.add(f"{of}: {entry[0]}" if of else entry[0], entry[1])

    @property
    def entries(self) -> "list[list[str]]":
        """The list. An entry without a name says how many more there are."""
        return [*self._entries, *([["", f"and {self._more} more"]] if self._more else [])]


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10


def _is_text(text: str) -> bool:
    """Whether it has neither control characters nor what stands for bytes that are not UTF-8."""
    return text.isprintable() or not any(
        _is_control(ord(each)) or "\ud800" <= each <= "\udfff" for each in text
    )


def _is_control(code: int) -> bool:
    return code < 0x20 or 0x7F <= code <= 0x9F


def _escaped(text: str, place: int) -> "int | None":
    """The byte that `\\xNN` at this place stands for, None where there is none that is told so."""
    digits = text[place + 2 : place + 4]
    if text[place + 1 : place + 2] != "x" or len(digits) != 2:
        return None
    high, low = _DIGITS.find(digits[0]), _DIGITS.find(digits[1])
    byte = high * 16 + low
    is_told = 0 < byte < 0x20 or byte >= 0x7F or byte == _BACKSLASH
    return byte if high >= 0 <= low and is_told else None


def _bytes_of(part: str) -> bytes:
    return unescape(part).encode("utf-8", "surrogateescape")
