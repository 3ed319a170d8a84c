"""What a whole answer of the OpenAI API tells of its prompt: the text (`echo`), and what the model says of each token."""

from dataclasses import dataclass, field
from typing import Any

from router.detokenizer import Detokenizer
from router.http.errors import to_json
from router.http.openai_in import Asked
from router.request import PromptToken, Scores
from router.tokenizer import Tokenizer
from router.validate import Ask

LOWEST_LOGPROB = -9999.0  # JSON has no infinity


@dataclass(slots=True)
class PromptOut:
    text: str = ""  # before the output's
    entries: list[bytes] = field(default_factory=list)  # of `prompt_logprobs`, in JSON
    columns: dict[str, list[bytes]] = field(default_factory=dict)  # of `logprobs`, before the output's
    _text: Detokenizer | None = None
    _length: int = 0

    @classmethod
    def of(cls, asked: Asked, ask: Ask, tokenizer: Tokenizer) -> "PromptOut":
        if not asked.echoes:
            return cls()
        return cls(tokenizer.decode(list(ask.token_ids or ())) if ask.text is None else ask.text)

    def take(self, scores: Scores, asked: Asked, tokenizer: Tokenizer) -> int:
        """Returns the bytes that were kept."""
        size = 0
        for token in scores.tokens:
            if asked.prompt_logprobs is not None:
                self.entries.append(entry := to_json(_ranked(token, asked.prompt_logprobs, tokenizer)))
                size += len(entry)
            if asked.echoed_logprobs is not None:
                size += self._echo(token, asked.echoed_logprobs, tokenizer)
        return size

    def _echo(self, token: PromptToken, count: int, tokenizer: Tokenizer) -> int:
        if self._text is None:
            self._text = Detokenizer(tokenizer)
        told: dict[str, Any] = {
            "tokens": token_text(tokenizer, token.id),
            "token_logprobs": None,
            "top_logprobs": None,
            "text_offset": self._length,
        }
        if token.index:
            best = (*token.top[:count], (token.id, token.logprob))
            told["token_logprobs"] = finite(token.logprob)
            told["top_logprobs"] = {token_text(tokenizer, id_): finite(logprob) for id_, logprob in best}
        self._length += len(self._text.push(token.id))
        written = {name: to_json(value) for name, value in told.items()}
        for name, entry in written.items():
            self.columns.setdefault(name, []).append(entry)
        return sum(map(len, written.values()))


def _ranked(token: PromptToken, count: int, tokenizer: Tokenizer) -> dict[str, Any] | None:
    """A token in vLLM's form: null for the first, and the token itself before the best."""
    if not token.index:
        return None
    ranks = {token.id: (token.logprob, token.rank)}
    ranks |= {id_: (logprob, rank) for rank, (id_, logprob) in enumerate(token.top[:count], 1) if id_ != token.id}
    return {
        str(id_): {"logprob": finite(logprob), "rank": rank, "decoded_token": token_text(tokenizer, id_)}
        for id_, (logprob, rank) in ranks.items()
    }


def token_text(tokenizer: Tokenizer, id_: int) -> str:
    """A token as people can read it: its text, the spelling of a special token, or the bytes of a token that is not text by itself."""
    piece = tokenizer.piece(id_)
    if piece is None:
        return tokenizer.name(id_)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def finite(logprob: float | None) -> float:
    return max(LOWEST_LOGPROB, logprob if logprob is not None else LOWEST_LOGPROB)
