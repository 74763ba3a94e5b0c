"""Arrays of a shell script."""

from __future__ import annotations

import re
from collections.abc import Sequence

MAX_KEYS = 5000
"""Maximum number of settings of a configuration, and of words in its arrays."""
_ARRAY = re.compile(r"([A-Za-z_]\w*)(\+?)=\((.*)", re.DOTALL)
_DECLARES = frozenset({"declare", "typeset", "local", "readonly", "export"})
_ELEMENTS = re.compile(r"\$\{([A-Za-z_]\w*)\[[@*]\]\}")


class ShellArrays:
    """Arrays of a script: `NAME=(...)` and `NAME+=(...)` over any number of lines. Their words replace `"${NAME[@]}"`.

    Arrays inside a condition are skipped, because it is unknown which branch would run.
    """

    def __init__(self, notes: list[str]) -> None:
        self.notes = notes
        self.elements: dict[str, list[str]] = {}
        self.filled: list[str] | None = None  # words of the array whose closing `)` has not been read yet
        self.depth = 0

    def expand(self, words: Sequence[str]) -> list[str]:
        expanded: list[str] = []
        for word in words:
            match = _ELEMENTS.fullmatch(word)
            inner = self.elements.get(match.group(1)) if match else None
            expanded += [word] if inner is None or len(expanded) + len(inner) > MAX_KEYS else inner
        return expanded

    def take(self, words: list[str]) -> bool:
        """Add a line's words to the array that it belongs to. Return False if it belongs to none."""
        if self.filled is None:
            bare = words
            while bare and (bare[0] in _DECLARES or (len(bare) < len(words) and bare[0].startswith("-"))):
                bare = bare[1:]
            match = _ARRAY.fullmatch(bare[0]) if bare else None
            if match is None:
                begins = bool(words) and words[0] in ("if", "case", "for", "while", "until")
                ends = sum(
                    word.rstrip(";") in ("fi", "esac", "done") and (n == 0 or words[n - 1].endswith(";"))
                    for n, word in enumerate(words)
                )
                self.depth = max(0, self.depth + begins - ends)
                return False
            name, more, first = match.groups()
            words = [first, *bare[1:]] if first else bare[1:]
            if self.depth:
                self.notes.append(f"`{name}{more}=(...)` depends on a condition: its settings were skipped")
                self.filled = []
            else:
                self.filled = self.elements[name] = list(self.elements.get(name, [])) if more else []
        open_array, depth = self.filled, 0
        for n, word in enumerate(words):
            depth += word.count("(") - word.count(")")
            if depth < 0:  # end of the array, not of a `$(command)` in it; what follows is no element
                last = word[: word.rindex(")")]
                words, self.filled = [*words[:n], *([last] if last else [])], None
                break
        open_array += self.expand(words)[: MAX_KEYS - len(open_array)]
        return True
