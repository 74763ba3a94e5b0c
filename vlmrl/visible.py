"""Functions that make untrusted text (from a model, a dataset, a reward, a file name) safe to show.

`visible` is the only function for this. All code that shows text to people calls it: the terminal (`cli/output.py`,
`cli/show/progress.py`), logs (`store/runs.py`), pages (`report/page_shell.py`). The text that it returns cannot move
the cursor, colour a terminal, hide characters, or change the order in which text is read (Trojan Source,
arXiv:2111.00169).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

HIDDEN = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
"""Unicode categories of characters that are invisible or break the line: controls, formats (including bidirectional
marks and zero-width characters), half surrogate pairs, private use, line and paragraph separators."""
JOINERS = "\u200c\u200d"
"""Format characters that join or separate letters of some scripts, and emoji: kept behind a non-ASCII character."""
UNUSUAL = re.compile(r"[^\x20-\x7e\n\t]")


def visible(text: str) -> str:
    r"""Return `text` with every hidden character as an escape such as `\u001b` or `\U000e0001`. Newlines, tabs stay.

    The escapes are plain ASCII, so applying the function twice changes nothing more. TOML's basic strings accept them.
    """
    return text if text.isascii() and text.isprintable() else _escaped(text, _code)


def encodable(text: str) -> str:
    r"""Return `text` in a form that UTF-8 can encode: half surrogate pairs become escapes such as `\ud800`."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def one_line(text: str) -> str:
    """Return `visible` of `text` on one line: runs of white space become one blank."""
    return visible(" ".join(text.split()))


def visible_json(text: str) -> str:
    """Return a JSON text in which JSON's own escapes replace hidden characters in strings. Its value stays the same.

    Newlines are kept: in a JSON text, they can only be between values.
    """
    return _escaped(text, _json_code)


def _escaped(text: str, code: Callable[[str], str]) -> str:
    def shown(match: re.Match[str]) -> str:
        character, before = match[0], text[match.start() - 1] if match.start() else " "
        if character in JOINERS and not before.isascii():
            return character
        return code(character) if unicodedata.category(character) in HIDDEN else character

    return UNUSUAL.sub(shown, text)


def _code(character: str) -> str:
    number = ord(character)
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def _json_code(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[i : i + 4]}" for i in range(0, len(units), 4))


def plural(number: int) -> str:
    """Return the plural ending for a number: nothing for 1, else `s`."""
    return "" if number == 1 else "s"
