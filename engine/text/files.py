"""A checkpoint's tokenizer files: their places, their content, and their faults.

Owns: reading tokenizer.json, or its substitute, tokenizer_config.json and the chat template into one object.
Does not know: text, requests.

They are read here and not by transformers' AutoTokenizer, since its import imports torch: 1.7 s and 247 MB
for a process that only handles text, against 0.05 s and 24 MB for tokenizers and jinja2.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
from tokenizers import AddedToken, Tokenizer

from engine.text.conversion import convert_tokenizer
from engine.types.errors import WeightsError

if TYPE_CHECKING:
    from engine.text.chat import ChatTemplate

_MAX_FILE_BYTES: Final = 256 << 20

T = TypeVar("T")


class _TokenizerJson(msgspec.Struct):
    """The part of tokenizer.json that the tokenizers library does not return."""

    decoder: dict[str, Any] | None = None


class _Token(msgspec.Struct):
    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False
    special: bool = False


class _NamedTokens(msgspec.Struct):
    """The file special_tokens_map.json, which only older checkpoints have."""

    bos_token: str | _Token | None = None
    eos_token: str | _Token | None = None
    unk_token: str | _Token | None = None
    pad_token: str | _Token | None = None
    sep_token: str | _Token | None = None
    cls_token: str | _Token | None = None
    mask_token: str | _Token | None = None

    def texts(self) -> dict[str, str]:
        """Return name -> the token's text, for the names that are set."""
        named = ((name, getattr(self, name)) for name in _NamedTokens.__struct_fields__)
        return {
            name: token.content if isinstance(token, _Token) else token for name, token in named if token is not None
        }


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


class _TokenizerConfig(_NamedTokens):
    """The file tokenizer_config.json.  Its add_bos_token and add_eos_token are not read: tokenizer.json decides which
    special tokens go around a text, and transformers 5 does the same."""

    added_tokens_decoder: dict[int, _Token] | None = None
    chat_template: str | list[_NamedTemplate] | None = None


class _ProcessorTemplate(msgspec.Struct):
    """The file chat_template.json, in which older models that see have the template of their processor."""

    chat_template: str | None = None


class TokenizerFiles:
    """The content of the files.  tokenizer: ready to encode.  decoder: its "decoder" object.  template: None for none.

    named: the text of bos_token and the like, by that name."""

    def __init__(self, directory: Path) -> None:
        """Read the files.  Raises WeightsError that names the file."""
        path = directory / "tokenizer.json"
        data = _read(path)
        if data is None and (converted := convert_tokenizer(directory)):
            path, data = converted, _read(converted)
        if data is None:
            raise WeightsError(
                f"{path}: no such file; set model.tokenizer to a directory that has one, or to 'none' to work with "
                "token ids only; transformers writes one: AutoTokenizer.from_pretrained(path).save_pretrained(path)"
            )
        self.decoder = _decode(path, data, _TokenizerJson).decoder
        try:
            self.tokenizer = Tokenizer.from_buffer(data)
        except Exception as error:  # the library raises nothing more specific
            raise WeightsError(f"{path}: not a tokenizer: {error}") from None
        # These are settings of the tokenizer's training, not limits of the model.
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        config_path = directory / "tokenizer_config.json"
        config = _read_json(config_path, _TokenizerConfig)
        named = {**_read_json(directory / "special_tokens_map.json", _NamedTokens).texts(), **config.texts()}
        self.named = named
        self._add_tokens(config_path, config.added_tokens_decoder or {}, named)
        own = config.chat_template or _read_json(directory / "chat_template.json", _ProcessorTemplate).chat_template
        self.template = _template(directory / "chat_template.jinja", config_path, own, named)

    def _add_tokens(self, path: Path, declared: dict[int, _Token], named: dict[str, str]) -> None:
        """Add the tokens that are only in the configuration, or only there special."""
        known = {token.content: token.special for token in self.tokenizer.get_added_tokens_decoder().values()}
        for token_id, token in sorted(declared.items()):
            if token.content in known and known[token.content] >= token.special:
                continue
            self.tokenizer.add_tokens([AddedToken(**msgspec.structs.asdict(token))])
            found = self.tokenizer.token_to_id(token.content)
            if found != token_id:
                raise WeightsError(
                    f"{path}: declares token {token.content!r} as {token_id}, but by tokenizer.json it is {found}"
                )
            known[token.content] = token.special
        for content in named.values():
            if self.tokenizer.token_to_id(content) is not None and not known.get(content):
                self.tokenizer.add_special_tokens([AddedToken(content, special=True, normalized=False)])


def token_id(directory: Path, text: str) -> int:
    """Return the id of a token of a directory's tokenizer.  Raises WeightsError naming the file if there is none."""
    found: int | None = TokenizerFiles(directory).tokenizer.token_to_id(text)
    if found is None:
        raise WeightsError(f"{directory / 'tokenizer.json'}: has no token {text!r}, which model.score_tokens names")
    return found


def read_template(path: Path) -> "ChatTemplate":
    """Return the template in a file that the configuration names.  Raises WeightsError naming it."""
    template = _template(path, path, None, {})
    if template is None:
        raise WeightsError(f"{path}: no such file; model.score_template names it")
    return template


def _template(
    path: Path, config_path: Path, configured: str | list[_NamedTemplate] | None, variables: dict[str, str]
) -> "ChatTemplate | None":
    """Return the chat template from its own file, else from the configuration: of several, the one named 'default'."""
    from engine.text.chat import ChatTemplate  # with Jinja, which the description of a model does not need

    data = _read(path)
    if data is not None:
        try:
            return ChatTemplate(data.decode(), origin=str(path), variables=variables)
        except UnicodeDecodeError as error:
            raise WeightsError(f"{path}: not UTF-8 at byte {error.start}") from None
    if isinstance(configured, list):
        configured = {named.name: named.template for named in configured}.get("default")
    if configured is None:
        return None
    return ChatTemplate(configured, origin=str(config_path), variables=variables)


def _read_json(path: Path, kind: type[T]) -> T:
    """Return the decoded file; defaults if there is no such file."""
    data = _read(path)
    return kind() if data is None else _decode(path, data, kind)


def _decode(path: Path, data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WeightsError(f"{path}: not valid: {error}") from None


def _read(path: Path) -> bytes | None:
    """Return the bytes of the file; None if there is no such file."""
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise WeightsError(f"{path}: larger than {_MAX_FILE_BYTES >> 20} MiB, so it is no tokenizer file")
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise WeightsError(f"{path}: {error.strerror or error}") from None
