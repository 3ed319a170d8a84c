"""What a caller may ask for: bounds are checked before any work, defaults are filled in after the prompt is tokenized.

Input and output are plain data, so every door (gRPC, HTTP) asks in the same way. Field names are those of the proto.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass, replace
from types import MappingProxyType
from typing import Any, TypeVar

from baton.cluster.errors import BatonError, Reason, Violation, invalid
from baton.engine.core.beams import Beams
from baton.engine.core.grammar import KINDS, Grammar
from baton.engine.core.sampling import GREEDY_BELOW, LEAST_TOP_P, LOGPROBS_MODES, NUMBERS, RAW, Range, SamplingParams
from baton.engine.core.speculation import UNASKED, Offer, Speculation
from baton.engine.facts.model_facts import Recommended
from router import conversation
from router.backlog import Backlog
from router.conversation import PLAIN, Setting

ROLES = ("system", "user", "assistant", "tool")
DEFAULT_MAX_TOKENS = 256
MAX_PROMPT_LOGPROBS = 1 << 18  # log-probabilities of one prompt, all together
MAX_PREDICTED = 1 << 18  # tokens of the predictions of several choices, all together
MAX_KEPT_LOGPROBS = 1 << 19  # of choices that are kept until the best are known, all together
MAX_REQUEST_ID = 128  # characters; a longer one is refused
NO_PREDICTIONS = (
    "is not used here: the operator has turned it off (engine.predictions), or these workers could give another output with it than without"
)
MAX_VIOLATIONS = 20  # in one answer: they travel in the trailers, which gRPC limits to 8 KiB
T = TypeVar("T", int, float)
_INT32 = (1 << 31) - 1
_NO_BIAS: Mapping[int, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class RequestLimits:
    max_prompt_bytes: int = 1 << 20  # UTF-8, all messages of a chat together
    max_prompt_ids: int = 1 << 20
    max_messages: int = 1000
    max_stop: int = 16
    max_stop_bytes: int = 256
    max_stop_token_ids: int = 128
    max_logit_bias: int = 1024
    max_logprobs: int = 20
    max_request_id: int = MAX_REQUEST_ID
    max_salt: int = 256  # bytes
    max_name: int = 256  # bytes
    max_resume: int = 256  # bytes; a receipt has fewer
    max_structured: int = 1 << 16  # bytes
    max_choices: int = 128  # that are computed for one request
    max_answer_tokens: int = 1 << 17  # of all of them together


LIMITS = RequestLimits()


@dataclass(frozen=True, slots=True)
class Context:
    """What the served model can hold. A prompt of as many characters as `tokens` of the longest tokens is too long, whatever its text."""

    tokens: int  # prompt and output
    longest_token: int | None  # characters; None: a token of this model may stand for any number of them


# The numbers of `baton.engine.core.sampling`, each by its name, None if absent.
_Numbers: Any = make_dataclass("_Numbers", [(name, float | None, None) for name in NUMBERS], frozen=True, slots=True)


@dataclass(frozen=True, slots=True)
class AskSampling(_Numbers):  # type: ignore[misc]
    """None means absent."""

    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=lambda: _NO_BIAS)
    logprobs: int | None = None
    logprobs_mode: str | None = None
    prompt_logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    default_max_tokens: int = DEFAULT_MAX_TOKENS  # the door's default if max_tokens is absent; cut to what still fits the context
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    structured: Grammar | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """A request as it arrived. Exactly one of text, messages and token_ids holds the prompt."""

    request_id: str = ""
    model: str = ""
    text: str | None = None
    messages: tuple[tuple[str, str], ...] | None = None  # role, content
    names: tuple[str, ...] = ()  # of the participants, one per message; "" for none
    setting: Setting = PLAIN  # what else a chat holds
    token_ids: Sequence[int] | None = None
    parse_special: bool | None = None  # read the control tokens that `text` spells out; None: yes
    add_special_tokens: bool | None = None  # put around `text` what the model expects there; None: yes
    cache_salt: str = ""
    sampling: AskSampling = AskSampling()
    beams: Beams | None = None  # a search instead of sampling (`router.beams`)
    priority: int = 0  # among requests that wait for admission: the lowest goes first
    tenant: str = ""  # the owner of the API key that it came with
    traceparent: str = ""  # the caller's W3C Trace Context as it arrived; ignored if invalid
    tracestate: str = ""  # likewise; of several headers, joined
    speculation: Speculation = UNASKED  # with a prediction that is token ids
    predicted_text: str | None = None  # a prediction that is text
    output_so_far: Sequence[int] = ()  # the beginning of the output, which an earlier call has streamed
    resume: bytes = b""  # the receipt of that call (`router.resume`)
    backlog: Backlog = field(default_factory=Backlog, compare=False)  # shared by the choices of one answer
    n: int = 1  # choices
    best_of: int | None = None  # of so many that are computed; None: all are the answer

    @property
    def computed(self) -> int:
        """How many choices are computed."""
        return self.n if self.best_of is None else self.best_of

    @property
    def sequences(self) -> int:
        """How many sequences a worker runs for it."""
        return self.computed if self.beams is None else self.beams.width

    @property
    def guides(self) -> bool:
        """Whether it says how it may be guessed."""
        return self.predicted_text is not None or self.speculation != UNASKED


_RANGES = {
    **{name: number.range for name, number in NUMBERS.items()},
    "max_tokens": Range(1, _INT32),
    "min_tokens": Range(0, _INT32),
}
_BIAS = Range(-100, 100)


def check(
    ask: Ask,
    limits: RequestLimits,
    served_names: Collection[str],
    vocab_size: int,
    context: Context | None = None,
    offer: Offer | None = None,
    others: Iterable[Violation] = (),
) -> None:
    """Raises MODEL_NOT_FOUND, CONTEXT_LENGTH for a prompt whose size alone shows that it cannot fit, or INVALID_FIELD with every field that
    is wrong (of a list of ids, only the first wrong one).

    `others`: what else is wrong. The limits bound the work: the items of a list that is too long are not checked. An empty `ask.model`
    means the served model.
    """
    if ask.model and ask.model not in served_names:
        raise BatonError(Reason.MODEL_NOT_FOUND, f"model {ask.model[:80]!r} is not served here")
    if context is not None:
        _check_size(ask, context, limits)
    found = [
        *_identity(ask, limits),
        *_prompt(ask, limits, vocab_size),
        *_sampling(ask.sampling, limits, vocab_size),
        *_continuation(ask, limits, vocab_size, context),
        *_speculation(ask, limits, vocab_size, context, offer),
        *_choices(ask, limits),
        *others,
    ]
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        message = f"{found[0].field}: {found[0].description}{more}"
        raise BatonError(Reason.INVALID_FIELD, message, tuple(found[:MAX_VIOLATIONS]))


def recommend(asked: AskSampling, recommended: Recommended) -> AskSampling:
    """Fills in what the makers of the model recommend for what was not set.

    Their `max_new_tokens` takes the place of Baton's own default; a default that belongs to an API is only lowered to it.
    """
    numbers = {name: fact.value for name, fact in recommended.numbers.items() if getattr(asked, name) is None}
    most = asked.default_max_tokens
    if recommended.max_tokens is not None:
        most = recommended.max_tokens.value if most == DEFAULT_MAX_TOKENS else min(most, recommended.max_tokens.value)
    return replace(asked, default_max_tokens=most, **numbers)


def resolve(
    ask: Ask, prompt_tokens: int, context: int, draw_seed: int, limits: RequestLimits = LIMITS
) -> tuple[SamplingParams, tuple[str, ...]]:
    """Returns the complete parameters and the stop strings of an ask that passed `check`. `context`: longest prompt plus output, in tokens.

    Raises CONTEXT_LENGTH if the prompt leaves no room for an output, or not for as many tokens as were requested; INVALID_FIELD if the
    output so far is longer than the output may be, or if more log-probabilities are asked for than may be kept.
    """
    asked = ask.sampling
    max_tokens = _most_tokens(ask, prompt_tokens, context, limits)
    _check_scores(ask, prompt_tokens, max_tokens)
    if len(ask.output_so_far) > max_tokens:
        raise invalid("output_so_far.ids", _beyond(max_tokens))
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min(_or(asked.min_tokens, 0), max_tokens),
        **_numbers(asked),
        seed=_or(asked.seed, draw_seed),
        logit_bias=MappingProxyType(dict(asked.logit_bias)),
        logprobs=asked.logprobs,
        logprobs_mode=asked.logprobs_mode or RAW,
        prompt_logprobs=asked.prompt_logprobs,
        stop_token_ids=frozenset(asked.stop_token_ids),
        ignore_eos=bool(asked.ignore_eos),
        structured=asked.structured,
        beams=ask.beams,
    )
    return params, asked.stop


def _most_tokens(ask: Ask, prompt_tokens: int, context: int, limits: RequestLimits) -> int:
    """The longest output, in tokens: as asked for, or what fits the context and, of several choices, the answer. Raises CONTEXT_LENGTH;
    INVALID_FIELD for an empty prompt."""
    asked, field = ask.sampling, _prompt_field(ask)
    if prompt_tokens < 1:
        raise invalid(field, "the prompt has no tokens")
    room = context - prompt_tokens
    if room < 1:
        raise too_long(field, prompt_tokens, context)
    if asked.max_tokens is None:
        most = min(asked.default_max_tokens, room)
        return min(most, limits.max_answer_tokens // ask.computed) if ask.computed > 1 else most
    if asked.max_tokens > room:
        description = f"{prompt_tokens} prompt tokens and {asked.max_tokens} output tokens exceed the context of {context} tokens"
        raise _context_length("sampling.max_tokens", description, prompt_tokens, context)
    return asked.max_tokens


def _check_scores(ask: Ask, prompt_tokens: int, max_tokens: int) -> None:
    """Raises INVALID_FIELD if the log-probabilities, of the prompt or of choices that are kept until the best are known, are too many."""
    asked = ask.sampling
    if asked.prompt_logprobs is not None and prompt_tokens * (asked.prompt_logprobs + 1) > MAX_PROMPT_LOGPROBS:
        count = f"{asked.prompt_logprobs} and its own for each of {prompt_tokens} tokens"
        raise invalid("sampling.prompt_logprobs", f"{count} are more than {MAX_PROMPT_LOGPROBS}")
    if ask.computed > ask.n and ask.computed * max_tokens * ((asked.logprobs or 0) + 1) > MAX_KEPT_LOGPROBS:
        count = f"{asked.logprobs or 0} and its own for each of {max_tokens} tokens of {ask.computed} choices"
        raise invalid("sampling.logprobs", f"{count} are more than {MAX_KEPT_LOGPROBS}, and all are kept until the best are known")


def _numbers(asked: AskSampling) -> dict[str, Any]:
    """Those of `baton.engine.core.sampling`, as workers want them."""
    numbers: dict[str, Any] = {name: _or(getattr(asked, name), number.default) for name, number in NUMBERS.items()}
    numbers["temperature"] = numbers["temperature"] if numbers["temperature"] >= GREEDY_BELOW else 0.0
    numbers["top_k"] = max(0, numbers["top_k"])
    numbers["top_p"] = max(LEAST_TOP_P, numbers["top_p"])
    return numbers


def _prompt_field(ask: Ask) -> str:
    return "text" if ask.text is not None else "chat" if ask.messages is not None else "token_ids"


def _check_size(ask: Ask, context: Context, limits: RequestLimits) -> None:
    """Looks at lengths only. A prompt beyond the absolute limits is left to `_prompt`, which reports it as such at no greater cost."""
    if ask.token_ids is not None and context.tokens <= len(ask.token_ids) <= limits.max_prompt_ids:
        raise too_long("token_ids", len(ask.token_ids), context.tokens)
    if context.longest_token is None:
        return
    size = len(ask.text or "") + sum(len(content) for _, content in (ask.messages or ())[: limits.max_messages])
    if context.tokens * context.longest_token <= size <= limits.max_prompt_bytes:
        raise too_long(_prompt_field(ask), -(-size // context.longest_token), context.tokens, "at least ")


def _identity(ask: Ask, limits: RequestLimits) -> Iterator[Violation]:
    if len(ask.request_id) > limits.max_request_id or not (ask.request_id.isascii() and ask.request_id.isprintable()):
        yield Violation("request_id", f"must be at most {limits.max_request_id} printable ASCII characters")
    yield from _text("cache_salt", ask.cache_salt, limits.max_salt)
    if not -_INT32 <= ask.priority <= _INT32:
        yield Violation("priority", "must fit into 32 bits")


def _prompt(ask: Ask, limits: RequestLimits, vocab_size: int) -> Iterator[Violation]:
    given = [prompt is not None for prompt in (ask.text, ask.messages, ask.token_ids)]
    if sum(given) != 1:
        yield Violation("prompt", "exactly one of text, chat and token_ids must be set")
    if ask.text is not None:
        yield from _text("text", ask.text, limits.max_prompt_bytes)
        if not ask.text:
            yield Violation("text", "must not be empty")
    if ask.messages is not None:
        for name in ("parse_special", "add_special_tokens"):
            if getattr(ask, name):
                yield Violation(name, "does not apply to a chat, in which only the template writes control tokens")
        yield from _messages(ask.messages, limits, conversation.size_of(ask.setting))
        if len(ask.messages) <= limits.max_messages:
            yield from conversation.check(ask.setting, ask.messages, ask.sampling.max_tokens)
        for i, name in enumerate(ask.names):
            yield from _text(f"chat.messages[{i}].name", name, limits.max_name)
    if ask.token_ids is not None:
        if not 1 <= len(ask.token_ids) <= limits.max_prompt_ids:
            yield Violation("token_ids.ids", f"must be 1 to {limits.max_prompt_ids} ids")
        else:
            yield from _ids("token_ids.ids", ask.token_ids, vocab_size)


def _messages(messages: tuple[tuple[str, str], ...], limits: RequestLimits, others: int) -> Iterator[Violation]:
    """`others`: the size of what the messages hold besides contents."""
    if not 1 <= len(messages) <= limits.max_messages:
        yield Violation("chat.messages", f"must be 1 to {limits.max_messages} messages")
        return
    room = limits.max_prompt_bytes - others
    for i, (role, content) in enumerate(messages):
        if role not in ROLES:
            yield Violation(f"chat.messages[{i}].role", f"must be one of {', '.join(ROLES)}")
        size = _size(content, room)
        if size is None:
            yield Violation(f"chat.messages[{i}].content", "is not valid Unicode")
        elif size > room:
            yield Violation("chat.messages", f"contents must have at most {limits.max_prompt_bytes} bytes in total")
            return
        room -= size or 0


def _sampling(asked: AskSampling, limits: RequestLimits, vocab_size: int) -> Iterator[Violation]:
    for name, allowed in _RANGES.items():
        value = getattr(asked, name)
        if value is not None and (refusal := allowed.refusal(value)):
            yield Violation(f"sampling.{name}", refusal)
    most = asked.default_max_tokens if asked.max_tokens is None else asked.max_tokens
    if asked.min_tokens is not None and asked.min_tokens > max(most, 0):
        yield Violation("sampling.min_tokens", f"must not be more than max_tokens ({most})")
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(asked, name)
        if value is not None and not 0 <= value <= limits.max_logprobs:
            yield Violation(f"sampling.{name}", f"must be 0 to {limits.max_logprobs}")
    if asked.logprobs_mode not in (None, *LOGPROBS_MODES):
        yield Violation("sampling.logprobs_mode", f"must be one of {', '.join(LOGPROBS_MODES)}")
    if asked.seed is not None and not 0 <= asked.seed < 1 << 64:
        yield Violation("sampling.seed", "must fit into 64 bits")
    yield from _bias(asked.logit_bias, limits, vocab_size)
    if asked.structured is not None:
        if asked.structured.kind not in KINDS:
            yield Violation("sampling.structured.kind", f"must be one of {', '.join(KINDS)}")
        yield from _text("sampling.structured.text", asked.structured.text, limits.max_structured)
    if len(asked.stop_token_ids) > limits.max_stop_token_ids:
        yield Violation("sampling.stop_token_ids", f"must be at most {limits.max_stop_token_ids} ids")
    else:
        yield from _ids("sampling.stop_token_ids", asked.stop_token_ids, vocab_size)
    if len(asked.stop) > limits.max_stop:
        yield Violation("sampling.stop", f"must be at most {limits.max_stop} strings")
    else:
        for i, stop in enumerate(asked.stop):
            yield from _text(f"sampling.stop[{i}]", stop, limits.max_stop_bytes)
            if not stop:
                yield Violation(f"sampling.stop[{i}]", "must not be empty")


def _continuation(ask: Ask, limits: RequestLimits, vocab_size: int, context: Context | None) -> Iterator[Violation]:
    most = ask.sampling.default_max_tokens if ask.sampling.max_tokens is None else ask.sampling.max_tokens
    most = most if context is None else min(most, context.tokens - 1)
    if len(ask.output_so_far) > max(0, most):
        yield Violation("output_so_far.ids", _beyond(most))
    else:
        yield from _ids("output_so_far.ids", ask.output_so_far, vocab_size)
    if len(ask.resume) > limits.max_resume:
        yield Violation("resume", f"must have at most {limits.max_resume} bytes")


def _speculation(ask: Ask, limits: RequestLimits, vocab_size: int, context: Context | None, offer: Offer | None) -> Iterator[Violation]:
    """If there is no `offer`, no worker is ready and the request goes no further."""
    asked, text = ask.speculation, ask.predicted_text
    if offer is not None and asked.method and asked.method not in offer.names:
        yield Violation("speculation.method", f"must be one of {', '.join(offer.names)}")
    if asked.max_tokens is not None and not 1 <= asked.max_tokens <= (1 if offer is None else offer.max_tokens):
        most = 0 if offer is None else offer.max_tokens
        yield Violation("speculation.max_tokens", f"must be 1 to {most} (engine.speculation_tokens)" if most else "nothing is guessed here")
    if text is None and not asked.prediction:
        return
    if offer is not None and not offer.predictions:
        yield Violation("prediction", NO_PREDICTIONS)
    if text is not None:
        if context is not None and context.longest_token and len(text) > context.tokens * context.longest_token:
            yield Violation("prediction.text", f"must not be longer than the context, {context.tokens} tokens")
        else:
            yield from _text("prediction.text", text, limits.max_prompt_bytes)
    elif context is not None and (wrong := predicts_too_much(len(asked.prediction), ask, context.tokens)):
        yield Violation("prediction.token_ids", wrong)
    else:
        yield from _ids("prediction.token_ids.ids", asked.prediction, vocab_size)


def predicts_too_much(length: int, ask: Ask, context: int) -> str | None:
    """Why a prediction of so many tokens is refused, if it is: each choice is followed through it with a table of its own."""
    if length > context:
        return f"must not be longer than the context, {context} tokens"
    if ask.computed > 1 and ask.computed * length > MAX_PREDICTED:
        return f"{length} tokens for each of {ask.computed} choices are more than {MAX_PREDICTED}"
    return None


def _choices(ask: Ask, limits: RequestLimits) -> Iterator[Violation]:
    for name, count in (("n", ask.n), ("best_of", ask.computed)):
        if not 1 <= count <= limits.max_choices:
            yield Violation(name, f"must be from 1 to {limits.max_choices}")
            return
    if ask.computed < ask.n:
        yield Violation("best_of", f"must not be less than n ({ask.n})")
        return
    if ask.computed == 1:
        return
    total = ask.computed * (ask.sampling.max_tokens or 1)
    if total > limits.max_answer_tokens:
        many = f"{ask.computed} choices of {ask.sampling.max_tokens} tokens"
        yield Violation("sampling.max_tokens", f"{many} are more than the {limits.max_answer_tokens} that an answer may have")
    alone = "needs an answer of one choice: each choice can be continued by itself, as a request with its own seed"
    if ask.output_so_far:
        yield Violation("output_so_far", alone)
    if ask.resume:
        yield Violation("resume", alone)


def _beyond(max_tokens: int) -> str:
    return f"must not be more than max_tokens ({max_tokens}) ids"


def _bias(bias: Mapping[int, float], limits: RequestLimits, vocab_size: int) -> Iterator[Violation]:
    if len(bias) > limits.max_logit_bias:
        yield Violation("sampling.logit_bias", f"must be at most {limits.max_logit_bias} entries")
        return
    for id_, value in bias.items():
        if not 0 <= id_ < vocab_size:
            yield Violation(f"sampling.logit_bias[{id_}]", f"the id must be less than the vocabulary size, {vocab_size}")
        elif refusal := _BIAS.refusal(value):
            yield Violation(f"sampling.logit_bias[{id_}]", refusal)


def _ids(field: str, ids: Sequence[int], vocab_size: int) -> Iterator[Violation]:
    """Reports only the first bad id."""
    if not ids or (min(ids) >= 0 and max(ids) < vocab_size):
        return
    bad = next(i for i, id_ in enumerate(ids) if not 0 <= id_ < vocab_size)
    yield Violation(f"{field}[{bad}]", f"must be less than the vocabulary size, {vocab_size}")


def _text(field: str, text: str, max_bytes: int) -> Iterator[Violation]:
    size = _size(text, max_bytes)
    if size is None:
        yield Violation(field, "is not valid Unicode")
    elif size > max_bytes:
        yield Violation(field, f"must have at most {max_bytes} bytes")


def _size(text: str, max_bytes: int) -> int | None:
    """Bytes of UTF-8, or some number above `max_bytes` for a text that is certainly longer; None if it has a lone surrogate."""
    if len(text) > max_bytes:
        return len(text)
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        return None


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def too_long(field: str, prompt_tokens: int, context: int, about: str = "") -> BatonError:
    """The refusal of a prompt that leaves no room for an output. `about`: "at least " if `prompt_tokens` is not the whole count."""
    description = f"the prompt has {about}{prompt_tokens} tokens; prompt and output together may have {context}"
    return _context_length(field, description, prompt_tokens, context)


def _context_length(field: str, description: str, prompt_tokens: int, context: int) -> BatonError:
    metadata = {"prompt_tokens": str(prompt_tokens), "context": str(context)}
    return BatonError(Reason.CONTEXT_LENGTH, description, (Violation(field, description),), metadata)
