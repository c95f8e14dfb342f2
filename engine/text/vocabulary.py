"""The bytes of every token, so that text can be composed without the tokenizer.

Owns: reading a tokenizer's decoder once, as a table.  Does not know: requests, streams, encoding.

A stream cannot be built from the tokenizer's own ``decode``, which returns text and so has already replaced the
halves of a character by U+FFFD; nor from its ``DecodeStream``, which raises "Invalid prefix" on byte sequences that
are not UTF-8 and drops an incomplete end.  Bytes of single tokens can just be joined.  The text is that of ``decode``,
with one exception: if byte tokens (``<0xE4>``) spell invalid UTF-8, ``decode`` loses the whole run of byte tokens;
here only the invalid bytes become U+FFFD, since the valid ones before them may have been sent already.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from tokenizers import Tokenizer

from engine.types.errors import WeightsError

_UNREADABLE: Final = "\uffff"
_ALL_SPACES: Final = 1 << 30


class Vocabulary:
    """A table of token id -> bytes.

    visible_pieces: special tokens, those of special_ids, are empty.  all_pieces: they are their names.  Both by id.
    leading_spaces: number of spaces that a text loses at its start, since the tokenizer added them.
    """

    def __init__(self, pieces: list[bytes], special_ids: Iterable[int] = (), leading_spaces: int = 0) -> None:
        self.all_pieces = pieces
        self.visible_pieces = list(pieces)
        self.special_ids = sorted(special_ids)
        for token_id in self.special_ids:
            self.visible_pieces[token_id] = b""
        self.leading_spaces = leading_spaces

    @classmethod
    def read(cls, tokenizer: Tokenizer, decoder: Mapping[str, Any] | None) -> "Vocabulary":
        """Return a tokenizer's vocabulary.  decoder: as in tokenizer.json.  Raises WeightsError for an unknown kind."""
        reader = _PieceReader(decoder)
        by_id = {token_id: token for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items()}
        pieces = [b""] * (max(by_id, default=-1) + 1)
        for token_id, token in by_id.items():
            pieces[token_id] = reader.read(token)
        special_ids = [token_id for token_id, added in tokenizer.get_added_tokens_decoder().items() if added.special]
        return cls(pieces, special_ids, reader.leading_spaces)

    def showing(self, names: Iterable[str]) -> "Vocabulary":
        """Return a vocabulary in which these special tokens are visible."""
        wanted = {name.encode() for name in names}
        hidden = [token_id for token_id in self.special_ids if self.all_pieces[token_id] not in wanted]
        return (
            self if len(hidden) == len(self.special_ids) else Vocabulary(self.all_pieces, hidden, self.leading_spaces)
        )

    def __len__(self) -> int:
        """Return one more than the largest token id."""
        return len(self.all_pieces)

    def piece(self, token_id: int) -> bytes:
        """Return a token's bytes, special or not; none for an id that a padded model can produce but no token has."""
        return self.all_pieces[token_id] if 0 <= token_id < len(self.all_pieces) else b""


class _PieceReader:
    """Applies a decoder, step by step, to one token at a time."""

    def __init__(self, decoder: Mapping[str, Any] | None) -> None:
        self.leading_spaces = 0
        self._prefix = ""
        self._replacements: list[tuple[str, str]] = []
        self._byte_level = False
        self._byte_tokens: dict[str, bytes] = {}
        if decoder is None:  # tokens are words, joined by spaces
            self._prefix, self.leading_spaces = " ", 1
        else:
            self._add(decoder)

    def _add(self, step: Mapping[str, Any]) -> None:
        match step:
            case {"type": "Sequence", "decoders": [*steps]}:
                for inner in steps:
                    self._add(inner)
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                self._replacements.append((old, new))
            case {"type": "Metaspace", "replacement": str(mark)}:
                self._replacements.append((mark, " "))
                if step.get("prepend_scheme", "always") != "never":
                    self.leading_spaces = _ALL_SPACES
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0}:
                self.leading_spaces = start
            case {"type": "ByteFallback"}:
                self._byte_tokens = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}
            case {"type": "ByteLevel"}:
                self._byte_level = True
            case {"type": "Fuse"}:
                pass  # joins tokens, as everything here does
            case _:
                raise WeightsError(
                    f"tokenizer.json: cannot stream the decoder {dict(step)!r:.200}; known are ByteLevel, Metaspace, "
                    "and sequences of Replace (of a string), ByteFallback, Fuse and Strip (of spaces at the start)"
                )

    def read(self, token: str) -> bytes:
        """Return a token's bytes."""
        for old, new in self._replacements:
            token = token.replace(old, new)
        if token in self._byte_tokens:
            return self._byte_tokens[token]
        if self._byte_level:
            try:
                return token.translate(_BYTE_OF_LETTER).encode("latin-1")
            except UnicodeEncodeError:
                pass  # only added tokens hold characters outside the alphabet; they stand for themselves
        return (self._prefix + token).encode()


def _byte_alphabet() -> dict[int, str]:
    """Return code point of a letter -> character with the byte's value; an invalid one for others below 256.

    Byte-level BPE (Radford et al. 2019, GPT-2) writes printable Latin-1 bytes as themselves and the others, in order,
    as the characters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) if byte in printable else _UNREADABLE for byte in range(256)}
    table.update({0x100 + index: chr(byte) for index, byte in enumerate(others)})
    return table


_BYTE_OF_LETTER: Final = _byte_alphabet()
