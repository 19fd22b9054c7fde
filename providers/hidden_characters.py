"""Characters that a reader does not see, or that show others in another order than they stand.

Whoever approves a value, or reads what somebody hostile wrote, sees each of them spelled out.
"""

from __future__ import annotations

import re

# Controls without tab and line feed, and every character that is invisible or reorders others
# (Unicode Technical Report 36, sections 2.5 and 3.6; the bidi ones are those of CVE-2021-42574).
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f"
    "\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb"
    "\U0001d173-\U0001d17a\U000e0000-\U000e0fff]+"
)


_SPELLED_LENGTH = len("[U+200B]")


class _Spellings(dict[str, str]):
    def __missing__(self, character: str) -> str:
        spelled = self[character] = f"[U+{ord(character):04X}]"
        return spelled


# There are some five thousand of them.
_SPELLED = _Spellings()


def visible(text: str) -> str:
    """`text` with every character that cannot be seen, or that moves others, spelled out."""
    return _HIDDEN.sub(lambda found: "".join(map(_SPELLED.__getitem__, found[0])), text)


def spelled_length(text: str) -> int:
    """How many characters `visible` makes of the text, about."""
    return len(text) + (_SPELLED_LENGTH - 1) * sum(map(len, _HIDDEN.findall(text)))
