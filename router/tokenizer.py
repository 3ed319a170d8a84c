"""Converts text and conversations to token ids, and token ids back to bytes, using only `tokenizers` and `jinja2`.

A plain prompt is the caller's own: control tokens that it spells out are read as such, unless the caller asks for plain text. In a
conversation they come from the template alone, never from what a participant wrote, although the tokenizer would recognise them:

    render
      1 the template renders the conversation twice: with the contents, and with stand-ins for them (ChatTemplate.outline)
      2 control tokens are looked for only in the outline, where every one is the template's own
      3 the text between two of them, with the contents filled in, is encoded as plain text

The tokenizer itself would have cut the text into the same pieces, so for contents without control tokens the ids are exactly those of
`transformers`. White space that the template trims from a content is trimmed here too. A template that inspects the contents (for example,
one that drops an assistant's reasoning) renders a text that differs from the outline. That text is used if no control token in it can stem
from a content. Otherwise the outline is used, without the changes that the template would have made. A template that cuts or reverses
contents has no outline; then there is only the text, and a conversation from which a control token could stem is refused.

Other threads must be able to run meanwhile, above all the one with the event loop. The library's `Tokenizer.encode` holds the GIL until it
is done (0.8 s for 1 MiB); `encode_batch` does not, so everything goes through it, without offsets where nobody needs them (a third of the
time). Reading an Encoding as a Python list holds the GIL too, and so does freeing the Encoding. So a prompt that is much too long is
recognised by its token count alone, taken piece by piece.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import tokenizers
from tokenizers import AddedToken, Encoding

from baton.cluster.errors import invalid
from baton.engine.facts.fingerprint import tokenizer_fingerprint
from baton.engine.facts.tokenizer_files import TOKENIZER, TokenizerFiles
from router.chat_map import Known
from router.chat_template import ChatTemplate, Message, Outline, TakenApart, fill
from router.conversation import PLAIN, Setting, data_of, told_words
from router.validate import too_long

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_ROUNDS = 8  # of cutting control tokens out of plain text
_PIECE = 1 << 16  # characters of a long text that are counted at a time
_MAY_FIT = 8  # characters for each token that is allowed: a text of no more is encoded whole, not counted first
_CUT_COSTS = 16  # tokens by which a piece of plain text counted alone may exceed its count in the whole text
_Json = dict[str, Any]


class Tokenizer:
    """Immutable after construction; safe to use from several threads."""

    def __init__(self, files: TokenizerFiles, fingerprint: str = "") -> None:
        """Raises ValueError if the `tokenizers` library cannot make a tokenizer of `files`."""
        self.fingerprint = fingerprint
        tree = json.loads(files.definition)
        self._parser = _build(files.definition, files)
        self._plain = _build(files.definition, files)
        self._plain.encode_special_tokens = True
        self._inner = self._plain  # for text that is not at the beginning
        if _drop_first_prefix(tree):
            self._inner = _build(json.dumps(tree), files)
            self._inner.encode_special_tokens = True
        added = self._plain.get_added_tokens_decoder()
        # The library never forgets that a token was special, although it may be added again as an ordinary one.
        special = {token["content"] for token in tree.get("added_tokens") or () if token.get("special")}
        special |= {token.content for token in files.added if token.special}
        self.added_ids = frozenset(added)  # read as one token wherever they are spelled out; control tokens and others
        self.special_ids = frozenset(id_ for id_, token in added.items() if token.content in special)
        # An unknown character becomes the unknown token, so text may produce that token.
        self._control = self.special_ids - {self.id_for(_unknown(tree))}
        # Such tokens are looked for after the whole text was normalized, so text between them cannot be encoded by itself.
        self._late = tree.get("normalizer") is not None and any(added[id_].normalized for id_ in self._control)
        self.vocab_size = max(self._plain.get_vocab().values(), default=-1) + 1  # every id is below this
        tokens = {name: told.content for name, told in files.named.items()}
        self._chat = ChatTemplate(files.template, tokens) if files.template is not None else None
        decoder = tree.get("decoder")
        self._byte_level = _has(decoder, "ByteLevel")
        self._byte_fallback = _has(decoder, "ByteFallback")
        # Characters that one token stands for; None: no bound is known.
        self.longest_token, self.longest_spelling = self._find_longest(tree)  # of plain text; of text in which control tokens are read
        self._around = self._find_around()
        # A cut may go through an added token. One that swallows white space may do that from afar.
        strips = any(token.lstrip or token.rstrip for token in added.values())
        self._cut_costs = None if strips else _CUT_COSTS + max((len(token.content.encode()) for token in added.values()), default=0)
        self._anchor = None if self._byte_level else self._find_anchor()
        self._pieces: dict[int, bytes | None] = {}

    @classmethod
    def load(cls, model_path: Path) -> Self:
        """Loads the tokenizer of a model folder. Raises ValueError if there is none or it cannot be used, OSError if it cannot be read."""
        files = TokenizerFiles.read(model_path)
        try:
            return cls(files, tokenizer_fingerprint(model_path))
        except ValueError as error:
            raise ValueError(f"{model_path / TOKENIZER}: {error}") from None

    def encode(self, text: str, most: int | None = None, *, parse_special: bool = True, add_special_tokens: bool = True) -> list[int]:
        """Encodes a plain prompt. `parse_special`: a control token that `text` spells out is read as that token, else it stays text.
        `add_special_tokens`: with what the post-processor puts around a prompt.

        `most`: a prompt of this many tokens or more is refused with CONTEXT_LENGTH. Raises INVALID_FIELD (`text`) for the rare text that
        this tokenizer can only write with a control token, if it is to stay text.
        """
        if parse_special:
            self._check_count([text], most, "text", self._parser)
            return _fast(self._parser, text, add_special_tokens).ids
        self._check_count([text], most, "text", self._plain)
        encodings = self._as_text(text, self._plain, "text")
        if not add_special_tokens:
            return [id_ for encoding in encodings for id_ in encoding.ids]
        if len(encodings) == 1 and self._around is not None:
            before, after = self._around
            return before + encodings[0].ids + after
        return self._plain.post_process(Encoding.merge(encodings, growing_offsets=True)).ids

    def encode_output(self, text: str, field: str) -> list[int]:
        """Encodes what a model might write: no control tokens, and nothing around it. Raises INVALID_FIELD as `encode` does."""
        return [id_ for encoding in self._as_text(text, self._inner, field) for id_ in encoding.ids]

    def render(
        self,
        messages: Sequence[Message],
        names: Sequence[str] = (),
        most: int | None = None,
        setting: Setting = PLAIN,
        known: Known = lambda text, at, encode: encode(),
    ) -> list[int]:
        """Encodes a conversation of (role, content) with the model's chat template, up to where the assistant begins to write.

        `names`: of the participants, one per message; "" for none. Contents and names are data. Roles are treated as the template's own
        words, so only known roles may be passed. `most`: as for `encode`. `known` is asked for the ids of each text between two control
        tokens. Raises INVALID_FIELD (`chat`) if there is no chat template or if
        it refuses the conversation, INTERNAL if it fails.
        """
        if self._chat is None:
            raise invalid("chat", "this model has no chat template; send text")
        data = [*(content for _, content in messages), *names, *data_of(setting)]
        self._check_count(data, most, "chat", self._plain)
        for field, word in told_words(setting):
            if inside := self._controls(self._parse(word)):
                raise invalid(field, f"holds the control token {self.name(inside[0])}, which only the chat template may write")
        text = self._chat.render(messages, names, setting)
        try:
            outline = self._chat.outline(messages, names, setting)
        except TakenApart:
            ids = self._parse(text)
            if not self._all_from_template(ids, self._chat.silhouette(messages, names, setting), data):
                raise invalid("chat", "has text that the chat template cuts up and that this model could read as a control token") from None
            return ids
        if text != outline.text or self._late:
            ids = self._parse(text)
            if self._all_from_template(ids, outline.shape, data):
                return ids
        return self._encode_outline(outline, known)

    @property
    def template(self) -> str | None:
        """The source of the chat template."""
        return self._chat.source if self._chat is not None else None

    @property
    def variables(self) -> frozenset[str]:
        """What the chat template reads."""
        return self._chat.variables if self._chat is not None else frozenset()

    def spelled(self, ids: Iterable[int]) -> str:
        """The text of `ids` with the spelling of control tokens."""
        pieces = ((self.piece(id_), self.name(id_)) for id_ in ids)
        return b"".join(name.encode() if piece is None else piece for piece, name in pieces).decode(errors="replace")

    def _check_count(self, texts: Sequence[str], most: int | None, field: str, by: tokenizers.Tokenizer) -> None:
        """Raises CONTEXT_LENGTH as soon as it is certain that `texts` have at least `most` tokens. Texts that may fit are not checked: to
        count them would cost as much as to encode them."""
        if most is None or self._cut_costs is None or sum(map(len, texts)) <= max(_PIECE, _MAY_FIT * most):
            return
        count = 0
        for text in texts:
            for at in range(0, len(text), _PIECE):
                count += max(0, len(_fast(by, text[at : at + _PIECE])) - self._cut_costs)
                if count >= most:
                    raise too_long(field, count, most, "at least ")

    def stop_tokens(self, stops: Sequence[str]) -> frozenset[int]:
        """The control tokens that stop strings spell: they have no text, so no search in the text could find them.

        Raises INVALID_FIELD (`sampling.stop[i]`) for a stop string that has a control token inside: no output can contain that.
        """
        found = set()
        for i, stop in enumerate(stops):
            if (id_ := self.id_for(stop)) in self._control:
                found.add(id_)
            elif inside := self._controls(self._parse(stop)):
                name = self.name(inside[0])
                raise invalid(
                    f"sampling.stop[{i}]", f"no text contains the control token {name}; name its id, {inside[0]}, in stop_token_ids"
                )
        return frozenset(id_ for id_ in found if id_ is not None)

    def id_for(self, token: str | None) -> int | None:
        """The id of a token by its spelling in the vocabulary."""
        return None if token is None else self._plain.token_to_id(token)

    def name(self, token_id: int) -> str:
        """The spelling of a token in the vocabulary; empty for an unknown id."""
        return self._plain.id_to_token(token_id) or ""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a whole output, without special tokens. Streams use `router.detokenizer` instead."""
        return self._plain.decode(list(ids), skip_special_tokens=True)

    def piece(self, token_id: int, first: bool = False) -> bytes | None:
        """The bytes that a token adds to the text, not always whole characters; None if it is not text (special token, unknown id).

        `first`: the token begins the text; some tokenizers drop a leading space there.
        """
        if first and not self._byte_level:
            return self._first_piece(token_id)
        if token_id not in self._pieces:
            self._pieces[token_id] = self._find_piece(token_id)
        return self._pieces[token_id]

    def _parse(self, text: str) -> list[int]:
        return _fast(self._parser, text).ids

    def _all_from_template(self, ids: list[int], shape: str, data: Sequence[str]) -> bool:
        """True if no control token of the text encoded as `ids` can stem from `data`. `shape`: that text without `data`."""
        if any(self._controls(self._parse(text)) for text in data):
            return False
        return self._controls(ids) == self._controls(self._parse(shape))

    def _controls(self, ids: Iterable[int]) -> list[int]:
        return [id_ for id_ in ids if id_ in self._control]

    def _encode_outline(self, outline: Outline, known: Known) -> list[int]:
        contents = iter(outline.contents)
        encoding = _encode(self._parser, outline.shape)
        ids: list[int] = []
        done = 0
        for id_, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if id_ in self._control:
                ids += self._between(outline.shape[done:start], len(ids), contents, known)
                ids.append(id_)
                done = end
        ids += self._between(outline.shape[done:], len(ids), contents, known)
        return ids

    def _between(self, shape: str, at: int, contents: Iterator[str], known: Known) -> Sequence[int]:
        """Whatever stands around it: the result depends on nothing but the text and whether it begins the prompt."""

        def encode() -> list[int]:
            encodings = self._as_text(text, self._inner if at else self._plain, "chat")
            return [id_ for encoding in encodings for id_ in encoding.ids]

        text = fill(shape, contents)
        return known(text, at, encode) if text else ()

    def _as_text(self, text: str, first: tokenizers.Tokenizer, field: str) -> list[Encoding]:
        """Encodes `text` without control tokens. Some models (above all Unigram) have such a spelling as a word, which is cut in two."""
        parts = [text]
        for _ in range(_ROUNDS):
            encodings = [_fast(self._inner if i else first, part) for i, part in enumerate(parts)]
            if all(self._control.isdisjoint(encoding.ids) for encoding in encodings):  # nearly always
                return encodings
            spans = [self._control_spans(_encode(self._inner if i else first, part)) for i, part in enumerate(parts)]
            if any(end - start < 2 for found in spans for start, end in found):
                break
            parts = [cut for part, found in zip(parts, spans, strict=True) for cut in _cut(part, found)]
        raise invalid(field, "contains text that this model can only read as a control token")

    def _control_spans(self, encoding: Encoding) -> list[tuple[int, int]]:
        return [span for id_, span in zip(encoding.ids, encoding.offsets, strict=True) if id_ in self._control]

    def _find_longest(self, tree: _Json) -> tuple[int | None, int | None]:
        """The most characters that one token can stand for, without and with control tokens; None if no bound is certain. In byte-level BPE
        and with byte fallback, no token stands for more characters than its spelling has, as long as nothing shortens the text first (a
        normalizer may strip, an added token may swallow the space around it)."""
        if not (self._byte_level or self._byte_fallback) or tree["model"].get("type") != "BPE":
            return None, None
        if any(node.get("type") not in ("Sequence", "Prepend", "Replace", None) for node in _nodes(tree.get("normalizer"))):
            return None, None
        if any(len(_spelling(node)) > 1 for node in _nodes(tree.get("normalizer")) if node.get("type") == "Replace"):
            return None, None
        added = self._plain.get_added_tokens_decoder().values()
        if any(token.lstrip or token.rstrip for token in added):
            return None, None
        sizes = {id_: len(token) for token, id_ in self._plain.get_vocab().items()}
        return max((size for id_, size in sizes.items() if id_ not in self._control), default=None), max(sizes.values(), default=None)

    def _find_around(self) -> tuple[list[int], list[int]] | None:
        """What the post-processor puts before and after a prompt. None if it does more than that."""
        found: tuple[list[int], list[int]] | None = None
        for probe in ("a", "a b\n3 c"):
            bare, whole = _encode(self._plain, probe).ids, self._plain.encode_batch([probe])[0].ids
            extra = len(whole) - len(bare)
            at = next((i for i in range(extra + 1) if whole[i : i + len(bare)] == bare), None)
            if at is None:
                return None
            around = whole[:at], whole[at + len(bare) :]
            if found not in (None, around):
                return None
            found = around
        return found

    def _find_piece(self, token_id: int) -> bytes | None:
        token = self._text_token(token_id)
        if token is None:
            return None
        if self._byte_level:
            # Like the ByteLevel decoder: a token with a character outside the alphabet is used as it is.
            return bytes(map(_BYTE_OF.__getitem__, token)) if _BYTE_OF.keys() >= set(token) else token.encode()
        if (byte := self._byte(token)) is not None:
            return byte
        if self._anchor is None:
            return self.decode([token_id]).encode()
        return self.decode([self._anchor, token_id]).removeprefix(self.decode([self._anchor])).encode()

    def _first_piece(self, token_id: int) -> bytes | None:
        token = self._text_token(token_id)
        if token is None:
            return None
        byte = self._byte(token)
        return byte if byte is not None and not byte.isascii() else self.decode([token_id]).encode()

    def _text_token(self, token_id: int) -> str | None:
        return None if token_id in self.special_ids else self._plain.id_to_token(token_id)

    def _byte(self, token: str) -> bytes | None:
        match = _BYTE.fullmatch(token) if self._byte_fallback else None
        return bytes.fromhex(match[1]) if match else None

    def _find_anchor(self) -> int | None:
        """A token of letters and digits only. What another token adds after it is what that token adds anywhere but at the beginning."""
        ids = sorted(set(self._plain.get_vocab().values()) - self.special_ids)
        return next((id_ for id_ in ids if self._byte(self._plain.id_to_token(id_) or "") is None and self.decode([id_]).isalnum()), None)


def _encode(tokenizer: tokenizers.Tokenizer, text: str) -> Encoding:
    """Encodes without holding the GIL."""
    return tokenizer.encode_batch([text], add_special_tokens=False)[0]


def _fast(tokenizer: tokenizers.Tokenizer, text: str, add_special_tokens: bool = False) -> Encoding:
    """The same without offsets."""
    return tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]


def _spelling(replace: _Json) -> str:
    """The text that a Replace normalizer removes; a regular expression may remove any amount."""
    pattern = replace.get("pattern", {})
    return pattern.get("String", "any") if isinstance(pattern, dict) else "any"


def _cut(text: str, spans: list[tuple[int, int]]) -> Iterator[str]:
    """`text` in pieces, cut in the middle of each span."""
    done = 0
    for start, end in spans:
        middle = (start + end) // 2
        yield text[done:middle]
        done = middle
    yield text[done:]


def _build(definition: str, files: TokenizerFiles) -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_str(definition)
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"not a tokenizer: {error}") from None
    tokenizer.no_truncation()  # a silently truncated prompt would get a wrong answer
    tokenizer.no_padding()
    tokenizer.add_tokens([AddedToken(**asdict(token)) for token in files.added])
    for token in files.added:
        if tokenizer.token_to_id(token.content) != files.ids[token.content]:
            raise ValueError(f"the token {token.content!r} would get the id {tokenizer.token_to_id(token.content)}")
    return tokenizer


def _unknown(tree: _Json) -> str | None:
    model = tree["model"]
    if isinstance(index := model.get("unk_id"), int):  # Unigram
        return str(model["vocab"][index][0])
    unknown: str | None = model.get("unk_token")
    return unknown


def _drop_first_prefix(tree: _Json) -> bool:
    """Makes of a tokenizer the one for text that does not begin the prompt: there, Metaspace with `first` adds no space. Returns whether
    there is a difference."""
    changed = False
    for node in _nodes(tree.get("pre_tokenizer")):
        if node.get("type") == "Metaspace" and node.get("prepend_scheme") == "first":
            node["prepend_scheme"] = "never"
            changed = True
    return changed


def _has(tree: Any, kind: str) -> bool:
    return any(node.get("type") == kind for node in _nodes(tree))


def _nodes(tree: Any) -> Iterator[_Json]:
    if isinstance(tree, dict):
        yield tree
    for child in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield from _nodes(child)


def _byte_alphabet() -> dict[str, int]:
    """The characters with which byte-level tokenizers write bytes (Radford et al. 2019): printable ones represent themselves."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
