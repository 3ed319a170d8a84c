"""llguidance behind `baton.engine.core.grammar`: grammars in, masks out. The router compiles only to refuse; the engine keeps the matchers.

The library has no limit of time. Its fuel bounds the work of a phase, the walk over a schema bounds what it is given, and the first mask,
where counted repetitions cost most, is made with the compilation, so that no step of an engine pays for it.

A mask may be narrower than what the library accepts afterwards: where the text is forced, only the canonical token is in it. So guesses are
judged by masks, like everything else, and `try_consume_tokens` only moves on.
"""

import json
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
from llguidance import LLMatcher, LLTokenizer

from baton.engine.core.grammar import KINDS, Grammar, GrammarRefused
from baton.engine.core.masks import NOTHING, Matcher, Words, common
from baton.engine.core.thinking import ThinkingBudget
from baton.engine.facts.tokenizer_files import TokenizerFiles
from baton.engine.grammars.closing import Closer
from baton.engine.grammars.keywords import COMPACT, MAX_BYTES, MAX_LITERAL, MAX_WRITTEN_OUT, SchemaReading, joined, read_schema
from baton.engine.grammars.repetition import written_out

MAX_CHOICES = 5_000
MAX_TAGS = 128
MAX_EBNF_BYTES = 1 << 14  # it is rewritten in Python
_LIMITS: Any = llguidance.LLParserLimits(
    initial_lexer_fuel=200_000,
    step_lexer_fuel=100_000,  # 7 ms
    step_max_items=10_000,
    max_lexer_states=20_000,
    max_grammar_size=50_000,
    verbose_errors=False,  # a grammar is the client's: it belongs in no log
)


class Vocabulary:
    """The bytes of a model's tokens. Immutable; safe to use from several threads."""

    def __init__(self, files: TokenizerFiles, vocab_size: int, eos_token_ids: Seq[int]) -> None:
        """`vocab_size`: width of the logits. Raises ValueError if the library cannot read the tokenizer, or if no token ends an output."""
        if not eos_token_ids:
            raise ValueError("the model names no end token, so no document could end")
        try:
            self.tokens: Any = LLTokenizer(_definition(files), n_vocab=vocab_size, eos_token=sorted(eos_token_ids))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"grammars cannot be used with this tokenizer: {error}") from None

    @classmethod
    def load(cls, model_path: Path, vocab_size: int, eos_token_ids: Seq[int]) -> "Vocabulary":
        """Raises ValueError, also for a tokenizer that cannot be read, and OSError."""
        return cls(TokenizerFiles.read(model_path), vocab_size, eos_token_ids)

    def spelled(self, token: int, marks: str) -> bytes:
        """The bytes that a token adds to the text. A control token has none, unless it is in `marks`."""
        piece: bytes = self.tokens.decode_bytes([token])
        return b"" if self.tokens.is_special_token(token) and piece.decode(errors="replace") not in marks else piece


def _definition(files: TokenizerFiles) -> str:
    tree = json.loads(files.definition)
    known = {token["id"] for token in tree.get("added_tokens") or ()}
    more = [token for token in files.added if files.ids[token.content] not in known]
    if not more:
        return files.definition
    flags = ("content", "special", "normalized", "lstrip", "rstrip", "single_word")
    told = [{"id": files.ids[token.content], **{flag: getattr(token, flag) for flag in flags}} for token in more]
    tree["added_tokens"] = sorted([*(tree.get("added_tokens") or ()), *told], key=lambda token: token["id"])
    return json.dumps(tree)


@dataclass(frozen=True, slots=True)
class Compiled:
    """`base`: None for a request that only bounds its thinking. `relaxed`: what of a schema is not enforced, because the request is not
    strict; sentences with paths."""

    vocabulary: Vocabulary
    base: Any
    relaxed: tuple[str, ...] = ()

    def matcher(self, output: Seq[int] = (), thinking: ThinkingBudget | None = None) -> Matcher:
        """Raises GrammarRefused if `output` does not match."""
        made: Matcher | None = GrammarFollower(self.base) if self.base is not None else None
        if thinking is not None:
            marks = "\n".join(text for each in thinking.marks for text in (each.begin, *each.ends))
            made = Closer(thinking, lambda token: self.vocabulary.spelled(token, marks), self.vocabulary.tokens.vocab_size, made)
        assert made is not None
        if output and made.mask(list(output)) is None:
            raise GrammarRefused("the output so far does not fit it")
        return made


def compile_grammar(vocabulary: Vocabulary, grammar: Grammar) -> Compiled:
    """Compiles a grammar and its first mask. Takes milliseconds for what applications send, a second at worst. Raises GrammarRefused."""
    if grammar.kind not in KINDS:
        raise GrammarRefused(f"the kind must be one of {', '.join(KINDS)}")
    if len(grammar.text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        raise GrammarRefused(f"may have {MAX_BYTES} bytes")
    try:
        grammar.text.encode()
    except UnicodeEncodeError:
        raise GrammarRefused("is not valid Unicode") from None
    if grammar.kind == "json_schema":
        return _compile_schema(vocabulary, read_schema(grammar.text, grammar.strict), grammar.strict)
    return Compiled(vocabulary, _matcher(vocabulary, _WRITTEN[grammar.kind](grammar.text)))


def _compile_schema(vocabulary: Vocabulary, reading: SchemaReading, strict: bool) -> Compiled:
    text, relaxed = json.dumps(reading.schema), tuple(reading.dropped)
    try:
        return Compiled(vocabulary, _matcher(vocabulary, _written_schema(text, False)), relaxed)
    except GrammarRefused as refused:
        if "oneOf" not in refused.why:
            raise GrammarRefused(refused.why, _blamed(refused.why, reading)) from None
    why = "it is not certain that at most one of its schemas holds"
    if strict:
        raise GrammarRefused(why, ", ".join(reading.one_of))
    relaxed += tuple(f"{path}: read as anyOf, as {why}" for path in reading.one_of)
    try:
        return Compiled(vocabulary, _matcher(vocabulary, _written_schema(text, True)), relaxed)
    except GrammarRefused as refused:
        raise GrammarRefused(refused.why, _blamed(refused.why, reading)) from None


def _blamed(why: str, reading: SchemaReading) -> str:
    """The library names no path. An error of a pattern shows it."""
    return next((path for path, pattern in reading.patterns if pattern and pattern in why), "$")


def _written_schema(text: str, coerce: bool) -> str:
    options: Any = {**COMPACT, "coerce_one_of": coerce}
    return LLMatcher.grammar_from_json_schema(text, overrides=options)


def _json_object(text: str) -> str:
    if text:
        raise GrammarRefused("kind json has no text")
    return _written_schema('{"type": "object"}', False)


def _regex(text: str) -> str:
    _check_size(text)
    return LLMatcher.grammar_from_regex(text)


def _check_size(pattern: str) -> None:
    if written_out(pattern) > MAX_WRITTEN_OUT:
        raise GrammarRefused(f"with its repetitions written out it has more than {MAX_WRITTEN_OUT} characters")


def _choice(text: str) -> str:
    choices = _json(text)
    if not isinstance(choices, list) or not choices or not all(isinstance(each, str) for each in choices):
        raise GrammarRefused("must be a JSON list of at least one string", "$")
    if len(choices) > MAX_CHOICES:
        raise GrammarRefused(f"may have {MAX_CHOICES} choices", "$")
    if "" in choices:
        raise GrammarRefused("must not be empty", f"$[{choices.index('')}]")
    if long := [i for i, choice in enumerate(choices) if len(choice) > MAX_LITERAL]:
        raise GrammarRefused(f"may have {MAX_LITERAL} characters", f"$[{long[0]}]")
    return llguidance.grammar_from("choice", text)


def _lark(text: str) -> str:
    _check_size(text)
    return LLMatcher.grammar_from_lark(text)


def _ebnf(text: str) -> str:
    if len(text) > MAX_EBNF_BYTES:
        raise GrammarRefused(f"may have {MAX_EBNF_BYTES} characters")
    try:
        text = llguidance.gbnf_to_lark.any_to_lark(text)
    except Exception as error:  # the library raises whatever went wrong
        raise GrammarRefused(f"cannot be read as GBNF: {error}") from None
    return _lark(text)


def _structural(text: str) -> str:
    given = _json(text)
    tags = given.get("tags") if isinstance(given, dict) and set(given) == {"tags"} else None
    if not isinstance(tags, list) or not 1 <= len(tags) <= MAX_TAGS:
        raise GrammarRefused(f"must be an object with tags, a list of 1 to {MAX_TAGS}", "$")
    made = []
    for i, tag in enumerate(tags):
        if not isinstance(tag, dict) or set(tag) != {"trigger", "begin", "grammar", "end"}:
            raise GrammarRefused("must have trigger, begin, grammar and end, and nothing else", f"$.tags[{i}]")
        inner = tag["grammar"]
        if not all(isinstance(tag[name], str) for name in ("trigger", "begin", "end")) or not isinstance(inner, str | dict):
            raise GrammarRefused("trigger, begin and end are strings, grammar is a schema or Lark", f"$.tags[{i}]")
        if not tag["trigger"] or not tag["begin"].startswith(tag["trigger"]):
            raise GrammarRefused("must begin with the trigger, which must not be empty", joined(f"$.tags[{i}]", "begin"))
        if long := [name for name in ("begin", "end") if len(tag[name]) > MAX_LITERAL]:
            raise GrammarRefused(f"may have {MAX_LITERAL} characters", joined(f"$.tags[{i}]", long[0]))
        if isinstance(inner, str):
            _check_size(inner)
        else:
            inner = {**read_schema(json.dumps(inner)).schema, "x-guidance": COMPACT}
        made.append(llguidance.StructTag(trigger=tag["trigger"], begin=tag["begin"], grammar=inner, end=tag["end"]))
    return llguidance.StructTag.to_grammar(made, assume_special=False)


_WRITTEN: dict[str, Callable[[str], str]] = {
    "json": _json_object, "regex": _regex, "choice": _choice, "lark": _lark, "ebnf": _ebnf, "structural": _structural,
}  # fmt: skip


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise GrammarRefused("is not JSON", "$") from None


def _matcher(vocabulary: Vocabulary, written: str) -> Any:
    base = LLMatcher(vocabulary.tokens, written, log_level=0, limits=_LIMITS)
    if base.is_error():
        raise GrammarRefused(_short(base.get_error()))
    words = np.frombuffer(base.compute_bitmask(), np.int32)
    if base.is_error() or not words.any():
        raise GrammarRefused(f"no output fits it, or it is too complex ({_short(base.get_error())})")
    return base


def _short(error: str) -> str:
    return " ".join(error.replace("<non-verbose/>", "").split())[:300]


class GrammarFollower:
    """A `Matcher`. The library's object follows the output; what it has seen in vain is rolled back."""

    def __init__(self, base: Any) -> None:
        self._base = base
        self._at = base.deep_copy()
        self._seen: list[int] = []  # tokens that `_at` has consumed
        self.failure = ""

    def mask(self, output: Seq[int]) -> Words | None:
        if not self._follow(output):
            return None
        data = self._at.compute_bitmask()
        if self._at.is_error():
            self.failure = _short(self._at.get_error()) or "the grammar is too complex"
            self._restart()
            return NOTHING
        return NOTHING if data == bytes(len(data)) else np.frombuffer(data, np.int32)

    def _follow(self, output: Seq[int]) -> bool:
        """Whether the whole output matches. Consumes only what is certain to be accepted: a wrong token would be an error for ever."""
        same = common(self._seen, output)
        if same < len(self._seen):
            if not self._at.rollback(len(self._seen) - same):
                self._restart()
                same = 0
            del self._seen[same:]
        if same == len(output):
            return True
        new = list(output[same:])
        taken = self._at.try_consume_tokens(new)
        self._seen += new if taken == len(new) else new[:taken]
        if self._at.is_error():
            self.failure = _short(self._at.get_error())
            self._restart()
        return len(self._seen) == len(output)

    def _restart(self) -> None:
        self._at, self._seen = self._base.deep_copy(), []
