"""Words as Docker reads them: quotes, escapes, and variables in their place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from dsec.layers.dockerfile.faults import At, shown

SPACE: Final = " \t\r\n\v\f"
MAX_EXPANDED: Final = 256 << 10
"""Characters of one word after substitution."""
MAX_DEPTH: Final = 16
"""Of ${x:-${y:-...}}."""
_SPECIAL: Final = frozenset("@*#?-$!0")


class Cursor:
    """Reads raw words: quotes and escapes stay in them."""

    def __init__(self, text: str, escape: str) -> None:
        self._text = text
        self._escape = escape
        self._at = 0

    def word(self) -> str:
        """The next one; empty at the end."""
        text, size = self._text, len(self._text)
        while self._at < size and text[self._at] in SPACE:
            self._at += 1
        start, quote = self._at, ""
        while self._at < size and (quote or text[self._at] not in SPACE):
            char = text[self._at]
            if char == self._escape and quote != "'":
                self._at += 1
            elif char == quote:
                quote = ""
            elif not quote and char in "'\"":
                quote = char
            self._at += 1
        self._at = min(self._at, size)
        return text[start : self._at]

    def rest(self) -> str:
        return self._text[self._at :]


def split(text: str, escape: str) -> list[str]:
    """Raw words."""
    cursor = Cursor(text, escape)
    words = []
    while word := cursor.word():
        words.append(word)
    return words


def expand(word: str, values: Mapping[str, str], escape: str, at: At) -> str:
    """A word without its quotes and escapes, its variables replaced. Raises InvalidArgument."""
    return _Expansion(word, values, escape, at).run()


def expand_body(text: str, values: Mapping[str, str], escape: str, at: At) -> str:
    """As `expand`, for a heredoc: quotes are characters like others."""
    return _Expansion(text, values, escape, at, quotes=False).run()


class _Expansion:
    def __init__(
        self, text: str, values: Mapping[str, str], escape: str, at: At, *, quotes: bool = True
    ) -> None:
        self._text = text
        self._values = values
        self._escape = escape
        self._where = at
        self._quotes = quotes
        self._at = 0
        self._size = 0

    def run(self) -> str:
        return self._until("", 0)

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self) -> str:
        char = self._peek()
        self._at += 1
        return char

    def _until(self, stop: str, depth: int) -> str:
        """Up to `stop`, which is taken, or with an empty `stop` to the end."""
        if depth > MAX_DEPTH:
            raise self._where.bad(f"variables are nested deeper than {MAX_DEPTH}: use an ARG in between")
        out: list[str] = []
        while char := self._take():
            if char == stop:
                return "".join(out)
            out.append(self._piece(char, depth))
            self._count(out[-1])
        if stop:
            raise self._where.bad(f"{shown(self._text)}: a ${{ has no end: add the brace that closes it")
        return "".join(out)

    def _count(self, piece: str) -> None:
        self._size += len(piece)
        if self._size > MAX_EXPANDED:
            raise self._where.bad(f"more than {MAX_EXPANDED} characters after substitution")

    def _piece(self, char: str, depth: int) -> str:
        if self._quotes and char == "'":
            return self._single()
        if self._quotes and char == '"':
            return self._double(depth)
        if char == "$":
            return self._dollar(depth)
        if char == self._escape:
            return self._escaped()
        return char

    def _escaped(self) -> str:
        if self._quotes or self._peek() in ("$", self._escape):
            return self._take()
        return self._escape

    def _single(self) -> str:
        end = self._text.find("'", self._at)
        if end < 0:
            raise self._where.bad(f"{shown(self._text)}: a single quote has no end")
        found, self._at = self._text[self._at : end], end + 1
        return found

    def _double(self, depth: int) -> str:
        out: list[str] = []
        while char := self._take():
            if char == '"':
                return "".join(out)
            if char == "$":
                char = self._dollar(depth)
            elif char == self._escape:
                follows = self._peek()
                char = self._take() if follows and follows in ('"', "$", self._escape) else char
            out.append(char)
            self._count(char)
        raise self._where.bad(f"{shown(self._text)}: a double quote has no end")

    def _dollar(self, depth: int) -> str:
        if self._peek() != "{":
            name = self._name()
            return self._values.get(name, "") if name else "$"
        self._at += 1
        name = self._name()
        if not name:
            raise self._where.bad(f"{shown(self._text)}: ${{ without a name")
        return self._braced(name, depth)

    def _braced(self, name: str, depth: int) -> str:
        value = self._values.get(name)
        sign = self._take()
        if sign == "}":
            return value or ""
        filled = value is not None
        if sign == ":":
            filled, sign = bool(value), self._take()
        if sign not in ("-", "+", "?"):
            what = "has no end" if not sign else f"with {sign!r} is not supported: use :-, :+ or :?"
            raise self._where.bad(f"{shown(self._text)}: ${{{name} {what}")
        word = self._until("}", depth + 1)
        if sign == "+":
            return word if filled else ""
        if not filled and sign == "?":
            raise self._where.bad(f"{name}: {word or 'it is not set'}")
        return (value or "") if filled else word

    def _name(self) -> str:
        start = self._at
        first = self._peek()
        if first and first in _SPECIAL:
            self._at += 1
        elif first.isdigit():
            while self._peek().isdigit():
                self._at += 1
        else:
            while (char := self._peek()) and (char == "_" or (char.isascii() and char.isalnum())):
                self._at += 1
        return self._text[start : self._at]
