"""The text of tokens as they come: whole characters only, cut at stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_UNFINISHED = "\ufffd"  # what a tokenizer makes of a part of a character


class RowText:
    """The text of one row.

    Tokens are decoded with those before them, since tokenizers treat the first one otherwise. What
    may still become a part of a character or of a stop string is held back.

    Args:
        decode: Makes text of ids.
        stop: Strings at which the text ends; it does not contain them.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode, self._stop = decode, tuple(part for part in stop if part)
        self._ids: list[int] = []
        self._start = self._read = 0  # ids from `start` on give context, from `read` on are new
        self._text = ""
        self._shown = 0
        self.stopped = False

    @property
    def text(self) -> str:
        """All that was handed out."""
        return self._text[: self._shown]

    def add(self, token: int) -> str:
        """Take a token; returns what can be shown of it and of what was held back."""
        if self.stopped:
            return ""
        self._ids.append(token)
        whole = self._decode(self._ids[self._start :])
        if whole.endswith(_UNFINISHED):
            return ""
        self._append(whole)
        return self._show(len(self._text) - self._held_back())

    def finish(self) -> str:
        """Return what was held back; nothing follows."""
        if not self.stopped and self._read < len(self._ids):
            self._append(self._decode(self._ids[self._start :]))
        return self._show(len(self._text))

    def _append(self, whole: str) -> None:
        before = self._decode(self._ids[self._start : self._read])
        searched = max(0, len(self._text) - max(map(len, self._stop), default=0))
        self._text += whole[len(before) :]
        self._start, self._read = self._read, len(self._ids)
        places = [self._text.find(part, searched) for part in self._stop]
        found = [place for place in places if place >= 0]
        if found:
            self._text = self._text[: min(found)]
            self.stopped = True

    def _held_back(self) -> int:
        """Return how many characters at the end may begin a stop string."""
        if self.stopped:
            return 0
        return max(
            (
                length
                for part in self._stop
                for length in range(1, len(part))
                if self._text.endswith(part[:length])
            ),
            default=0,
        )

    def _show(self, stop: int) -> str:
        piece = self._text[self._shown : stop]
        self._shown = max(self._shown, stop)
        return piece


__all__ = ["RowText"]
