"""Grammars behind the library: what they accept, what they refuse and how, and that a mask is a function of the output alone."""

import json
import random
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from turns import within

import baton.models
from baton.engine.core.grammar import Grammar, GrammarRefused
from baton.engine.core.masks import allowed_ids
from baton.engine.facts.tokenizer_files import TokenizerFiles
from baton.engine.grammars.library import Compiled, Vocabulary, compile_grammar
from baton.models.make_small import make_toy

TALE = Path(baton.models.__file__).parent / "tale"
EOS = 1


@cache
def vocabulary() -> Vocabulary:
    return Vocabulary.load(TALE, 2048, [EOS])


def compiled(kind: str, text: Any, strict: bool = True) -> Compiled:
    return compile_grammar(vocabulary(), Grammar(kind, text if isinstance(text, str) else json.dumps(text), strict))


def accepts(form: Compiled, text: str) -> bool:
    """Whether the text, and then the end, fits. Only masks are asked for the end; the tokens may be others than a model would choose."""
    words = form.matcher().mask(vocabulary().tokens.tokenize_str(text))
    return words is not None and EOS in allowed_ids(words, 2048)


def refusal(kind: str, text: Any, strict: bool = True) -> GrammarRefused:
    with pytest.raises(GrammarRefused) as caught:
        compiled(kind, text, strict)
    return caught.value


def walk(form: Compiled, seed: int, most: int = 300) -> tuple[list[int], bool]:
    """Random tokens under the masks, and whether they ended."""
    rng, matcher, output = random.Random(seed), form.matcher(), list[int]()
    while len(output) < most:
        words = matcher.mask(output)
        assert words is not None and words.any(), matcher.failure
        output.append(int(rng.choice(allowed_ids(words, 2048).tolist())))
        if output[-1] == EOS:
            return output, True
    return output, False


@pytest.mark.parametrize(
    "kind, text, right, wrong",
    [
        ("json_schema", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False},
         ['{"a":1}', '{"a":-20}'], ['{"a": 1}', '{"a":"1"}', "{}", '{"a":1,"b":2}', '{"a":1']),
        ("json_schema", True, ["1", '"x"', "[1,[]]"], ["1 ", "[1, 2]", "x"]),
        ("json", "", ["{}", '{"a":[1,{}]}'], ["[]", "1", '{"a": 1}']),
        ("regex", "[0-9]{3}(-[a-z]+)?", ["123", "123-ab"], ["12", "1234", "123-"]),
        ("choice", ["yes", 'a "b"\n', "yesterday"], ["yes", 'a "b"\n', "yesterday"], ["no", "yest", ""]),
        ("ebnf", 'root ::= "a" (b | "c")+\nb ::= [0-9]', ["a1", "acc7"], ["a", "b", "a1x"]),
        ("lark", 'start: "a" /[0-9]+/', ["a1"], ["a"]),
        ("structural", {"tags": [{"trigger": "<f", "begin": "<f=x>", "grammar": {"type": "integer"}, "end": "</f>"}]},
         ["hello", "see <f=x>12</f> ok", "<f=x>1</f><f=x>2</f>"], ["<f=y>1</f>", "<f=x>a</f>"]),
    ],
)  # fmt: skip
def test_what_each_kind_accepts(kind: str, text: Any, right: list[str], wrong: list[str]) -> None:
    form = compiled(kind, text)
    assert all(accepts(form, each) for each in right) and not any(accepts(form, each) for each in wrong)


@pytest.mark.parametrize(
    "kind, text, path, why",
    [
        ("json_schema", {"minimum": 5, "maximum": 3, "type": "integer"}, "$", "Unsatisfiable"),
        ("json_schema", {"$ref": "#"}, "$", "no output fits"),
        ("json_schema", {"$ref": "#/$defs/none"}, "$", "none"),
        ("json_schema", {"properties": {"a": {"pattern": "(?=a)"}}}, "$.properties.a.pattern", "look-around"),
        ("json_schema", {"items": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "$.items.oneOf", "at most one"),
        ("json", "{}", "", "no text"),
        ("regex", "(?=a)b", "", "look-around"),
        ("regex", r"(a)\1", "", "backreference"),
        ("regex", "(a", "", "unclosed"),
        ("regex", "(a{1000}){1000}", "", "repetitions"),
        ("regex", "[^\\s\\S]", "", ""),
        ("choice", [], "$", "at least one"),
        ("choice", ["a", ""], "$[1]", "empty"),
        ("choice", "x", "$", "JSON"),
        ("choice", [str(i) for i in range(5001)], "$", "5000"),
        ("ebnf", "root ::= nothing", "", ""),
        ("ebnf", "x" * 20_000, "", "16384"),
        ("lark", "start: foo", "", "foo"),
        ("structural", {"tags": []}, "$", "1 to"),
        ("structural", {"tags": [{"trigger": "<", "begin": "<", "grammar": {}, "end": "x" * 10_001}]}, "$.tags[0].end", "may have"),
        ("choice", ["a", "b" * 10_001], "$[1]", "may have"),
        ("structural", {"tags": [{"trigger": "<", "begin": "x", "grammar": {}, "end": ""}]}, "$.tags[0].begin", "trigger"),
        ("structural", {"tags": [{"trigger": "<", "begin": "<", "grammar": {"not": {}}, "end": ""}]}, "$.not", "enforced"),
        ("regex", "a" * 70_000, "", "65536"),
        ("regex", "\ud800", "", "Unicode"),
        ("poem", "", "", "kind"),
    ],
)  # fmt: skip
def test_what_is_refused_and_where(kind: str, text: Any, path: str, why: str) -> None:
    refused = refusal(kind, text)
    assert refused.path == path and why in refused.why


def test_a_client_cannot_turn_enforcement_off_in_its_schema() -> None:
    refusal("json_schema", {"x-guidance": {"lenient": True}, "not": {}})
    assert not accepts(compiled("json_schema", {"x-guidance": {"whitespace_flexible": True}, "type": "array"}), "[1, 2]")


def test_what_a_request_that_is_not_strict_does_not_get_is_told() -> None:
    schema = {"oneOf": [{"type": "integer"}, {"type": "number"}], "not": {"const": 3}}
    form = compiled("json_schema", schema, strict=False)
    assert [each.split(":")[0] for each in form.relaxed] == ["$.not", "$.oneOf"] and accepts(form, "3")
    assert not compiled("json_schema", {"oneOf": [{"type": "integer"}, {"type": "string"}]}).relaxed, "that is certain"


SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
     "required": ["name", "age"], "additionalProperties": False},
    {"type": "array", "items": {"enum": ["red", "green", 3, None, {"a": [1]}]}, "minItems": 1, "maxItems": 4},
    {"anyOf": [{"type": "string", "pattern": "^[a-c]{2,4}$"}, {"type": "boolean"}, {"type": "number", "multipleOf": 0.5, "minimum": 0,
     "maximum": 9}]},
    {"$ref": "#/$defs/tree", "$defs": {"tree": {"type": "object", "properties": {"v": {"type": "null"}, "l": {"$ref": "#/$defs/tree"}},
     "required": ["v"], "additionalProperties": False}}},
    {"type": "string", "format": "ipv4"},
]  # fmt: skip


@pytest.mark.parametrize("schema", SCHEMAS)
def test_whatever_is_drawn_under_the_masks_is_valid_when_it_ends(schema: dict[str, Any]) -> None:
    form, ended = compiled("json_schema", schema), 0
    for seed in range(20):
        output, complete = walk(form, seed)
        if complete:
            ended += 1
            Draft202012Validator(schema).validate(json.loads(vocabulary().tokens.decode_str(output[:-1])))
    assert ended > 5


@pytest.mark.parametrize("schema", SCHEMAS)
def test_a_mask_is_a_function_of_the_output(schema: dict[str, Any]) -> None:
    """Replayed, rolled back, after guesses that are right, wrong, or no continuation at all: always the mask of an undisturbed walk."""
    form, rng = compiled("json_schema", schema), random.Random(1)
    output, _ = walk(form, 3, most=60)
    quiet = form.matcher()
    undisturbed = [quiet.mask(output[:n]) for n in range(len(output))]
    other = walk(form, 4, most=60)[0]
    busy = form.matcher()
    for _ in range(150):
        n = rng.randrange(len(output))
        guesses = rng.choice([output[n : n + 4], other[:4], [rng.randrange(2048) for _ in range(4)], [EOS, EOS]])
        for k in range(len(guesses)):
            busy.mask([*output[:n], *guesses[: k + 1]])
        at = rng.randrange(max(0, n - 3), min(len(output), n + 2))
        found, expected = busy.mask(output[:at]), undisturbed[at]
        assert found is not None and expected is not None and np.array_equal(found, expected)
    replayed = form.matcher(output[:-1])
    assert np.array_equal(replayed.mask(output[:-1]), undisturbed[-1])  # type: ignore[arg-type]


def test_an_output_that_does_not_fit_is_not_continued() -> None:
    form = compiled("regex", "[0-9]+")
    assert form.matcher().mask(vocabulary().tokens.tokenize_str("x")) is None
    with pytest.raises(GrammarRefused):
        form.matcher(vocabulary().tokens.tokenize_str("x"))


def hostile() -> Iterator[tuple[str, str, Any]]:
    schema = "json_schema"
    yield "large enum", schema, {"enum": list(range(9_900))}
    yield "long enum", schema, {"enum": ["x" * 30 + str(i) for i in range(1500)]}
    yield "long const", schema, {"const": "x" * 9_990}
    yield "too long const", schema, {"const": "x" * 60_000}
    yield "row of constants", schema, {"type": "array", "prefixItems": [{"const": "x" * 1600}] * 6, "minItems": 6}
    yield "long choices", "choice", ["x" * 9_990 + str(i) for i in range(6)]
    yield "long name", schema, {"properties": {"x" * 9_990: {}}, "required": ["x" * 9_990]}
    yield "many names", schema, {"properties": {f"k{i}": {"type": "string"} for i in range(1000)}}
    yield "many required", schema, {"required": [f"k{i}" for i in range(1000)]}
    yield "deep", schema, '{"items":' * 28 + "{}" + "}" * 28
    yield "counted", schema, {"pattern": "^a{9990}$"}
    yield "nested counts", schema, {"pattern": "^(a{90}){100}$"}
    yield "unicode", schema, {"pattern": r"^\w{1,5000}$"}
    yield "pairs", schema, {"allOf": [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(12)]}
    yield "wide", schema, {"anyOf": [{"properties": {f"p{i}_{j}": {} for j in range(20)}} for i in range(40)]}
    yield "circle", schema, {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    yield "exponential", schema, {"$ref": "#/$defs/d0", "$defs": {
        **{f"d{i}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)}, "d40": {}}}  # fmt: skip
    yield "endless", schema, {"type": "string", "minLength": 10**9}
    yield "backtracking", "regex", "(a+)+b|(a|aa)+c|.*a.{30}"
    yield "rules", "lark", 'start: z{90}\nz: y{90}\ny: "a"'
    yield "doubling", "ebnf", "root ::= a0\n" + "".join(f"a{i} ::= a{i + 1} a{i + 1}\n" for i in range(40)) + 'a40 ::= "x"'


@pytest.mark.parametrize("name, kind, text", list(hostile()))
def test_a_hostile_grammar_is_refused_or_its_masks_are_quick(name: str, kind: str, text: Any) -> None:
    """The compilation, with the first mask, is not on an engine's step. What follows is: 20 ms of its thread at most."""
    began = time.thread_time()
    try:
        form = compiled(kind, text)
    except GrammarRefused:
        form = None
    within(time.thread_time() - began, 3.0)
    matcher, output, rng = form.matcher() if form else None, list[int](), random.Random(0)
    longest = 0.0
    while matcher is not None and len(output) < 80:
        began = time.thread_time()
        words = matcher.mask(output)
        longest = max(longest, time.thread_time() - began)
        if words is None or not words.any():
            assert words is None or matcher.failure
            break
        output.append(int(rng.choice(allowed_ids(words, 2048).tolist())))
        if output[-1] == EOS:
            break
    within(longest, 0.02)


def test_a_toy_has_a_vocabulary_too(tmp_path: Path) -> None:
    make_toy(tmp_path)
    form = compile_grammar(Vocabulary.load(tmp_path, 300, [256]), Grammar("regex", "a+"))
    assert allowed_ids(form.matcher().mask([97]), 300).tolist() == [97, 256]  # type: ignore[arg-type]


def test_a_model_without_an_end_token_holds_no_output_to_a_grammar() -> None:
    with pytest.raises(ValueError, match="end token"):
        Vocabulary(TokenizerFiles.read(TALE), 2048, [])
