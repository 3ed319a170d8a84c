"""The text of one output, token by token, and where it ends. Whoever replays the same tokens gets the same text and is in the same state.

So a stream that began at another router continues inside a character or a possible stop string as if there had been no interruption, and
nothing about the text is taken from the client.
"""

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from baton.cluster.errors import invalid
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.speculation import Follower
from router.detokenizer import Detokenizer
from router.request import FinishReason
from router.stop import StopMatcher
from router.tokenizer import Tokenizer
from router.tools.delta import Content, Delta
from router.tools.reading import Reader

PROMPT_TAIL = 8  # ids; only whether any of them is text matters
_NOTHING: Mapping[int, bytes] = MappingProxyType({})


class Said(NamedTuple):
    """What a token completes. `deltas`: all of it in order, if calls or thinking are told apart; `text`: the content."""

    text: str
    deltas: tuple[Delta, ...] = ()


class Transcript:
    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        params: SamplingParams,
        stops: Sequence[str],
        reader: Reader | None = None,
        marks: Mapping[int, bytes] = _NOTHING,
    ) -> None:
        """`stops`: stop strings. `reader`: of calls and thinking. `marks`: control tokens that it must see, with their spelling."""
        self.reader = reader
        self.reasoning_tokens = 0
        self.length = 0  # tokens
        predicted = params.speculation.prediction
        self._follower = Follower(predicted) if predicted else None
        self.shown = 0  # characters returned
        self.stop: str | None = None  # the stop string that has ended the output
        self._params = params
        self._text = Detokenizer(tokenizer, prompt[-PROMPT_TAIL:], marks)
        self._matcher = StopMatcher(stops)

    def push(self, token_id: int) -> Said:
        """What the token completes and is certainly output. A stop token that ends the output has no text."""
        self.length += 1
        if self._follower is not None:
            self._follower.follow(token_id)
        hidden = token_id in self._params.stop_token_ids and self._may_end
        visible, self.stop = self._matcher.push("" if hidden else self._text.push(token_id), self._may_end)
        if self.reader is None:
            return self._said(visible)
        thought = self.reader.thinks
        said = self._said(visible, self.reader.push(visible))
        self.reasoning_tokens += thought or self.reader.thinks
        return said

    def flush(self, reason: FinishReason | None) -> Said:
        """Returns what was held back, at the end of the output. It may still complete a stop string. `reason`: why it ends, unless so."""
        visible, self.stop = self._matcher.push(self._text.flush(), self._may_end)
        if self.stop is None:
            visible += self._matcher.flush()
        if self.reader is None:
            return self._said(visible)
        return self._said(visible, [*self.reader.push(visible), *self.reader.flush(self.stop is None and reason == "length")])

    @property
    def ended(self) -> bool:
        """Whether a stop string, or the only call that the answer may have, ends the output."""
        return self.stop is not None or (self.reader is not None and self.reader.complete)

    def _said(self, visible: str, deltas: Sequence[Delta] | None = None) -> Said:
        text = visible if deltas is None else "".join(delta.text for delta in deltas if isinstance(delta, Content))
        self.shown += len(text)
        return Said(text, tuple(deltas or ()))

    @property
    def predicted(self) -> tuple[int, int]:
        """Tokens of the prediction that the output has in its order, and that it does not have."""
        return (0, 0) if self._follower is None else (self._follower.accepted, self._follower.rejected)

    @property
    def _may_end(self) -> bool:
        """Neither a stop token nor a stop string ends an output of fewer tokens than `min_tokens`."""
        return self.length >= self._params.min_tokens

    def replay(self, output: Sequence[int], eos: Collection[int]) -> FinishReason | None:
        """Pushes tokens that were streamed before. Returns why the output ends with the last of them; None: it goes on.

        `eos`: the model's end tokens. Raises INVALID_FIELD for a token after the end.
        """
        finish: FinishReason | None = None
        for i, token_id in enumerate(output):
            if finish is not None:
                raise invalid(f"output_so_far.ids[{i}]", f"comes after the end of the output ({finish})")
            self.push(token_id)
            finish = self._finish(token_id, eos)
        return finish

    def _finish(self, last: int, eos: Collection[int]) -> FinishReason | None:
        """The engine's rule (`baton.engine.core.sequence`), and the stop strings, which only the router knows."""
        params = self._params
        if self.ended or (params.structured is not None and last in eos):
            return "stop"
        if self._may_end and (last in params.stop_token_ids or (last in eos and not params.ignore_eos)):
            return "stop"
        return "length" if self.length >= params.max_tokens else None
