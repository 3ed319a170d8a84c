"""The part of `baton doctor` that reads a model's folder: which facts were taken from which file, and what other files say about them."""

from collections.abc import Callable, Iterator
from pathlib import Path

from baton.cli.doctor import Finding
from baton.cluster.config import Config
from baton.engine.facts.fields import Fields
from baton.engine.facts.model_facts import CONFIG, Fact, context_length, end_tokens, recommended
from baton.engine.facts.tokenizer_class import AS_THE_FILE_SAYS
from baton.engine.facts.tokenizer_files import TOKENIZER, TokenizerFiles

SHOWN = 6  # tokens of a list


def examine_model(config: Config) -> list[Finding]:
    """Nothing if no model is configured. A folder that would be refused at the start has a finding that fails, with file and field."""
    if not config.model.path:
        return []
    path = Path(config.model.path)
    parts: dict[str, Callable[[Path], Iterator[Finding]]] = {
        "context": lambda path: _context(path, config.model.max_model_len),
        "end": _end,
        "tokens": _tokenizer,
        "sampling": lambda path: _sampling(path, config.model.generation_config == "auto"),
    }
    findings: list[Finding] = []
    for subject, part in parts.items():
        try:
            findings += part(path)
        except (ValueError, OSError) as error:
            findings.append(Finding("fail", subject, str(error)))
    return findings


def _context(path: Path, chosen: int | None) -> Iterator[Finding]:
    fact = context_length(Fields.read(path / CONFIG))
    if chosen is None:
        yield Finding("ok", "context", _told(f"{fact.value} tokens", fact))
    elif chosen <= fact.value:
        yield Finding("ok", "context", f"{chosen} tokens, from model.max_model_len; {fact.place} {fact.value}")
    else:
        yield Finding("fail", "context", f"model.max_model_len {chosen} is more than {fact.value}, from {fact.place}")


def _told(what: str, fact: Fact) -> str:
    others = f"; also said: {', '.join(fact.also)}" if fact.also else ""
    return f"{what}, from {fact.place}{others}"


def _end(path: Path) -> Iterator[Finding]:
    found = end_tokens(path)
    if not found:
        yield Finding("warn", "end", "no file names an end token: outputs end at max_tokens, a stop token or a stop string")
        return
    spelled = {id_: content for content, id_ in TokenizerFiles.read(path).ids.items() if id_ in found}
    for id_, places in sorted(found.items()):
        if id_ in spelled:
            yield Finding("ok", "end", f"{spelled[id_]} ({id_}), from {', '.join(places)}")
        else:
            yield Finding("warn", "end", f"{id_}, which no token has, from {', '.join(places)}")


def _tokenizer(path: Path) -> Iterator[Finding]:
    files = TokenizerFiles.read(path)
    steps = f"as {TOKENIZER} says" if files.made_by == AS_THE_FILE_SAYS else f"with the steps of {files.made_by}"
    yield Finding("ok", "tokens", f"{len(files.ids)}, {steps}")
    named = (f"{name} {told.content} ({told.place})" for name, told in files.named.items() if told.content in files.ids)
    yield Finding("ok", "tokens", f"named: {', '.join(named) or 'none'}")
    if files.added:
        beside = list(dict.fromkeys(f"{token.content} ({files.ids[token.content]})" for token in files.added))
        more = f" and {len(beside) - SHOWN} more" if len(beside) > SHOWN else ""
        yield Finding("ok", "tokens", f"added or with other flags than in {TOKENIZER}: {', '.join(beside[:SHOWN])}{more}")
    for told in files.beyond:
        yield Finding("warn", "tokens", f"{told.content} is left out: the model has no embedding for it; from {told.place}")
    if files.template is None:
        yield Finding("warn", "template", "no chat template: chats are refused, prompts are served")
    else:
        yield Finding("ok", "template", f"{len(files.template)} characters, from {files.template_place}")


def _sampling(path: Path, counts: bool) -> Iterator[Finding]:
    found = recommended(path)
    facts = dict(found.numbers) | ({"max_tokens": found.max_tokens} if found.max_tokens else {})
    if not counts:
        yield Finding("ok", "sampling", "Baton's own defaults, from model.generation_config")
    elif not facts:
        yield Finding("ok", "sampling", "Baton's own defaults: no file recommends any")
    else:
        yield from (Finding("ok", "sampling", _told(f"{name} {fact.value}", fact)) for name, fact in facts.items())
    if counts and found.not_done:
        yield Finding("warn", "sampling", f"generation_config.json asks for {', '.join(found.not_done)}, which is not done here")
