"""The files of a model's tokenizer, read as one: which tokens it has besides its vocabulary, how each is matched, which have names, and the
chat template. The precedence is that of `transformers` 5, so that the ids are the same:

    tokenizer.json           the vocabulary, the steps from text to tokens, and what is put around a prompt (whatever add_bos_token says)
    tokenizer_class          some classes replace the steps (`baton.engine.facts.tokenizer_class`)
    tokenizer_config.json    named tokens; `added_tokens_decoder`, whose flags go before those of tokenizer.json
    special_tokens_map.json, added_tokens.json
                             only if there is no `added_tokens_decoder`; the map's names then go before those of tokenizer_config.json
    chat_template.jinja      before `chat_template` in tokenizer_config.json, before chat_template.json

Standard library only: the router, the workers and `baton doctor` read the same facts.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from baton.engine.facts.fields import CheckpointError, Fields
from baton.engine.facts.tokenizer_class import AS_THE_FILE_SAYS, REBUILT, chosen_class, rebuilt

TOKENIZER, SETTINGS, MAP, OLDER = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
TEMPLATE, OLDER_TEMPLATE = "chat_template.jinja", "chat_template.json"
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_EXTRA, _OLDER_EXTRA = "extra_special_tokens", "additional_special_tokens"
_Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is looked for in the text before anything else. The flags are those of the `tokenizers` library."""

    content: str
    special: bool = False
    normalized: bool = True
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


@dataclass(frozen=True, slots=True)
class ToldToken:
    """A token, and the file and field that name it."""

    token: AddedToken
    place: str
    flagged: bool = True  # the place says how it is matched; else it is a special token like any other

    @property
    def content(self) -> str:
        return self.token.content


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    definition: str  # tokenizer.json, with the steps that the class replaces
    made_by: str  # the class, by its name in `transformers`
    added: tuple[AddedToken, ...]  # to be added to `definition`, in this order
    ids: Mapping[str, int]  # of every token, once they are
    beyond: tuple[ToldToken, ...]  # tokens that are not added: the model has no embedding for them
    named: Mapping[str, ToldToken]
    template: str | None = None
    template_place: str = ""

    @classmethod
    def read(cls, path: Path) -> "TokenizerFiles":
        """Those of a model folder. Raises ValueError, which names file and field, and OSError."""
        if not (path / TOKENIZER).is_file():
            raise ValueError(f"model.path: {path} holds no {TOKENIZER}")
        settings = Fields.read_if_there(path / SETTINGS)
        template, place = _template(path, settings)
        made = gather((path / TOKENIZER).read_text(encoding="utf-8"), settings, Fields.read_if_there(path / "config.json"))
        return replace(made, template=template, template_place=place)

    @property
    def end_token(self) -> tuple[int, str] | None:
        """The id of `eos_token`, and the place that names it. None if no file names one, or if the model has no embedding for it."""
        told = self.named.get("eos_token")
        return None if told is None or told.content not in self.ids else (self.ids[told.content], told.place)


def gather(definition: str, settings: Fields, config: Fields) -> TokenizerFiles:
    """Joins the texts of tokenizer.json, tokenizer_config.json, config.json, and the older files beside them. Raises CheckpointError."""
    path = settings.file.parent
    tree = _tree(definition, path / TOKENIZER)
    settings.only("split_special_tokens", False)
    settings.only("fix_mistral_regex", False)
    settings.only("fast_tokenizer_files", [TOKENIZER])
    newer = settings.has("added_tokens_decoder")
    beside = Fields(path / MAP, {}) if newer else Fields.read_if_there(path / MAP)
    made_by = chosen_class(settings, config, definition)
    extra, special = _extra(settings, beside)
    named = _named(settings, beside, made_by)
    if newer:
        declared = dict(_decoder(settings))
    else:
        special |= {told.content for name, told in named.items() if name in NAMES}
        declared = {**dict(_older(Fields.read_if_there(path / OLDER), special)), **dict(_own(tree, path / TOKENIZER))}
    flags = {told.content: told for told in declared.values()}
    named |= {
        name: replace(named[name], token=flags[named[name].content].token, flagged=True) for name in NAMES if _is_in(named, name, flags)
    }
    if made_by != AS_THE_FILE_SAYS:
        tree = rebuilt(tree, made_by, settings, path / TOKENIZER)
        definition = json.dumps(tree, ensure_ascii=False)
    added = _to_add([told for _, told in _own(tree, path / TOKENIZER)], declared, named, extra)
    if made_by == "Qwen2Tokenizer":  # adds them once more, without their flags
        added += [replace(told, token=_plain(told.content)) for told in (*named.values(), *extra)]
    ids, beyond = _ids(tree, added, config)
    _compare(declared, ids, {told.content for told in beyond}, path)
    kept = tuple(told.token for told in added if told.content in ids)
    return TokenizerFiles(definition, made_by, kept, ids, beyond, MappingProxyType(named))


def _tree(definition: str, file: Path) -> _Json:
    try:
        tree = json.loads(definition)
    except ValueError as error:
        raise CheckpointError(file, "", f"cannot be read: {error}") from None
    if not isinstance(tree, dict) or not isinstance(tree.get("model"), dict):
        raise CheckpointError(file, "model", "is missing: this is no tokenizer")
    return tree


def _plain(content: str) -> AddedToken:
    return AddedToken(content, special=True, normalized=False)


def _is_in(named: Mapping[str, ToldToken], name: str, flags: Mapping[str, ToldToken]) -> bool:
    return name in named and named[name].content in flags


def _told(value: Any, f: Fields, name: str, special: bool = False) -> ToldToken | None:
    """A token is written as its text, or as an object with its text and how it is matched. `special`: an object is, whatever it says."""
    place = f"{f.file.name}: {f.path}{name}"
    if value is None or isinstance(value, str):
        return None if value is None else ToldToken(_plain(value), place, flagged=False)
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        raise f.error(name, f"must be a token: a string, or an object with a content, got {value!r}")
    given = Fields(f.file, value, f"{f.path}{name}.")
    special = special or given.flag("special")
    flags = {flag: given.flag(flag) for flag in ("lstrip", "rstrip", "single_word")}
    return ToldToken(AddedToken(value["content"], special, given.flag("normalized", not special), **flags), place)


def _own(tree: _Json, file: Path) -> Iterator[tuple[int, ToldToken]]:
    """id → token, as tokenizer.json has them."""
    f = Fields(file, tree)
    for i, value in enumerate(f.get("added_tokens", [])):
        told = _told(value, f, f"added_tokens[{i}]")
        if told is None or not isinstance(value, dict) or type(value.get("id")) is not int:
            raise f.error(f"added_tokens[{i}]", "must be an object with a content and an id")
        yield value["id"], told


def _decoder(settings: Fields) -> Iterator[tuple[int, ToldToken]]:
    decoder = settings.inner("added_tokens_decoder")
    for key, value in decoder.raw.items():
        told = _told(value, decoder, key)
        if not (key.isascii() and key.isdigit()) or told is None or not told.flagged:
            raise decoder.error(key, f"must be a token id and an object with the content of the token, got {value!r}")
        yield int(key), told


def _older(f: Fields, special: set[str]) -> Iterator[tuple[int, ToldToken]]:
    for content, id_ in f.raw.items():
        if type(id_) is not int or id_ < 0:
            raise f.error(content, f"must be a token id, got {id_!r}")
        yield id_, ToldToken(AddedToken(content, content in special, content not in special), f"{OLDER}: {content}")


def _extra(settings: Fields, beside: Fields) -> tuple[list[ToldToken], set[str]]:
    """Special tokens without a name, and those among them by which `added_tokens.json` knows what is special."""
    first = _list(settings, _EXTRA) or _list(settings, _OLDER_EXTRA)
    known = _contents(first)
    first += [told for told in _list(beside, _EXTRA) if told.content not in known]
    # The older name is looked at only if the newer one is nowhere.
    return first if first or _EXTRA in settings.raw else _list(beside, _OLDER_EXTRA), _contents(first)


def _contents(tolds: Iterable[ToldToken]) -> set[str]:
    return {told.content for told in tolds}


def _list(f: Fields, name: str) -> list[ToldToken]:
    given = f.get(name, [])
    if isinstance(given, dict) and name == _EXTRA:  # tokens with names of their own
        return []
    if not isinstance(given, list):
        raise f.error(name, f"must be a list of tokens, got {given!r}")
    tolds = (_told(value, f, f"{name}[{i}]", special=f.file.name == MAP) for i, value in enumerate(given))
    return [told for told in tolds if told is not None]


def _named(settings: Fields, beside: Fields, made_by: str) -> dict[str, ToldToken]:
    """Tokens by name, in the order in which `transformers` adds them."""
    found = {name: ToldToken(_plain(content), f"the default of {made_by}", False) for name, content in REBUILT.get(made_by, {}).items()}
    own: dict[str, ToldToken] = {}
    for f in (settings, beside):
        for name, value in f.raw.items():
            if name in NAMES:
                found.pop(name, None)  # null: there is none
                if (told := _told(value, f, name, special=f is beside)) is not None:
                    found[name] = told
            elif name.endswith("_token") and isinstance(value, str | dict) and (told := _told(value, f, name)) is not None:
                own[name] = told
        more = f.get(_EXTRA)
        for name, value in more.items() if isinstance(more, dict) else ():
            if (told := _told(value, f, f"{_EXTRA}.{name}")) is not None:
                own[name] = told
    return {name: found[name] for name in NAMES if name in found} | own


def _to_add(
    own: list[ToldToken], declared: Mapping[int, ToldToken], named: Mapping[str, ToldToken], extra: list[ToldToken]
) -> list[ToldToken]:
    """The tokens that `own`, those of the tokenizer, lack, or have with other flags."""
    there = {told.token for told in own}
    added = [told for _, told in sorted(declared.items()) if told.token not in there]
    known = _contents([*own, *added])
    for told in (*named.values(), *extra):
        if told.content not in known:
            known.add(told.content)
            added.append(told)
    names = _contents(named.values())
    return [replace(told, token=replace(told.token, special=True)) if told.content in names else told for told in added]


def _ids(tree: _Json, added: list[ToldToken], config: Fields) -> tuple[Mapping[str, int], tuple[ToldToken, ...]]:
    """The id of every token, as the `tokenizers` library gives them, and the tokens that the model has no embedding for. A name such as
    `pad_token` is often given to a token that the model never got; `transformers` fails when a prompt contains it."""
    given = tree["model"].get("vocab") or {}
    vocabulary = dict(given) if isinstance(given, dict) else {piece: i for i, (piece, *_) in enumerate(given)}
    size, ids = len(vocabulary), vocabulary | {token["content"]: token["id"] for token in tree.get("added_tokens") or ()}
    last = max((token["id"] for token in tree.get("added_tokens") or ()), default=-1)
    rows = config.get("vocab_size")
    beyond = []
    for told in added:
        if told.content in ids:
            last = max(last, ids[told.content])
        elif type(rows) is int and max(last + 1, size) >= rows:
            beyond.append(told)
        else:
            ids[told.content] = last = max(last + 1, size)
    return MappingProxyType(ids), tuple(beyond)


def _compare(declared: Mapping[int, ToldToken], ids: Mapping[str, int], beyond: set[str], path: Path) -> None:
    """Raises CheckpointError for a token that would get another id than the one that a file declares."""
    for id_, told in declared.items():
        if told.content not in beyond and ids.get(told.content) != id_:
            name, _, where = told.place.partition(": ")
            raise CheckpointError(
                path / name,
                where,
                f"declares {told.content!r} as token {id_}, but in the vocabulary of {TOKENIZER} it is {ids[told.content]}",
            )


def _template(path: Path, settings: Fields) -> tuple[str | None, str]:
    """The chat template for ordinary conversations, and the place that has it."""
    for file in path.glob("additional_chat_templates/default.jinja"):
        raise CheckpointError(file, "", f"the default template is read from {TEMPLATE}")
    if (path / TEMPLATE).exists():
        return (path / TEMPLATE).read_text(encoding="utf-8"), TEMPLATE
    for f in (settings, Fields.read_if_there(path / OLDER_TEMPLATE)):
        given, place = f.get("chat_template"), f"{f.file.name}: chat_template"
        if given is None or isinstance(given, str):
            if given is not None:
                return given, place
            continue
        if isinstance(given, list) and all(isinstance(entry, dict) and {"name", "template"} <= entry.keys() for entry in given):
            given = {entry["name"]: entry["template"] for entry in given}
        if not isinstance(given, dict) or not all(isinstance(template, str) for template in given.values()):
            raise f.error("chat_template", "must be a template or a list of named templates")
        return given.get("default"), f"{place} (default)"  # no default: a chat would have to name one
    return None, ""
