"""The text of one output, token by token, and where it ends. Whoever replays the same tokens gets the same text and is in the same state.

So a stream that began at another router continues inside a character or a possible stop string as if there had been no interruption, and
nothing about the text is taken from the client.
"""

from collections.abc import Collection, Sequence

from baton.cluster.errors import invalid
from baton.engine.core.sampling import SamplingParams
from router.detokenizer import Detokenizer
from router.request import FinishReason
from router.stop import StopMatcher
from router.tokenizer import Tokenizer

PROMPT_TAIL = 8  # ids; only whether any of them is text matters


class Transcript:
    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], params: SamplingParams, stops: Sequence[str]) -> None:
        """`stops`: stop strings."""
        self.length = 0  # tokens
        self.shown = 0  # characters returned
        self.stop: str | None = None  # the stop string that has ended the output
        self._params = params
        self._text = Detokenizer(tokenizer, prompt[-PROMPT_TAIL:])
        self._matcher = StopMatcher(stops)

    def push(self, token_id: int) -> str:
        """The text that the token completes and that is certainly output. A stop token that ends the output has no text."""
        self.length += 1
        hidden = token_id in self._params.stop_token_ids and self._may_end
        visible, self.stop = self._matcher.push("" if hidden else self._text.push(token_id), self._may_end)
        self.shown += len(visible)
        return visible

    def flush(self) -> str:
        """Returns what was held back, at the end of the output. It may still complete a stop string."""
        visible, self.stop = self._matcher.push(self._text.flush(), self._may_end)
        return visible if self.stop is not None else visible + self._matcher.flush()

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
        if self.stop is not None:
            return "stop"
        if self._may_end and (last in params.stop_token_ids or (last in eos and not params.ignore_eos)):
            return "stop"
        return "length" if self.length >= params.max_tokens else None
