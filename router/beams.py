"""What a beam search may be asked, and which workers have room for one. Pure."""

from collections.abc import Iterable, Iterator

from baton.cluster.errors import BatonError, Reason, Violation, invalid
from baton.cluster.records import WorkerRecord
from baton.engine.core.beams import EARLY_STOPPING, Beams, most_blocks
from baton.engine.core.sampling import NUMBERS, Range, SamplingParams
from router.validate import Ask

MAX_WIDTH = 32
MAX_TOKENS = 1 << 17  # of all beams together
_WIDTH = Range(2, MAX_WIDTH)
_PENALTY = Range(-5, 5)
NEUTRAL = {name: {number.default} for name, number in NUMBERS.items()} | {"temperature": {0, 1}, "top_k": {0, -1}}
WITH_BEAMS = "cannot be combined with beam search"


def refusals(ask: Ask, beams: Beams) -> Iterator[Violation]:
    """Everything of the ask that is out of bounds, or that the search would have to ignore."""
    if wrong := _WIDTH.refusal(beams.width):
        yield Violation("beam.width", wrong)
    elif not 1 <= beams.count <= beams.width:
        yield Violation("beam.count", f"must be 1 to {beams.width}, the beam width")
    if wrong := _PENALTY.refusal(beams.length_penalty):
        yield Violation("beam.length_penalty", wrong)
    if beams.early_stopping not in EARLY_STOPPING:
        yield Violation("beam.early_stopping", f"must be one of {', '.join(EARLY_STOPPING)}")
    asked = ask.sampling
    for name, values in NEUTRAL.items():
        if (value := getattr(asked, name)) is not None and value not in values:
            yield Violation(f"sampling.{name}", WITH_BEAMS)
    for name in ("logit_bias", "stop"):
        if getattr(asked, name):
            yield Violation(f"sampling.{name}", WITH_BEAMS)
    for name in ("logprobs", "prompt_logprobs", "structured"):
        if getattr(asked, name) is not None:
            yield Violation(f"sampling.{name}", WITH_BEAMS)
    if ask.output_so_far:
        yield Violation("output_so_far.ids", WITH_BEAMS)
    for name, given in (("n", ask.computed > 1), ("prediction", ask.predicted_text is not None or ask.speculation.prediction)):
        if given:
            yield Violation(name, WITH_BEAMS)
    if ask.setting.offered:
        yield Violation("tools", WITH_BEAMS)
    if ask.setting.max_thinking is not None:
        yield Violation("max_thinking_tokens", WITH_BEAMS)


def check_fit(params: SamplingParams, prompt_len: int, workers: Iterable[WorkerRecord]) -> None:
    """Raises INVALID_FIELD for a search that is too large, and CONTEXT_LENGTH for one that no worker could run, even if it were alone."""
    if (beams := params.beams) is None:
        return
    if beams.width * params.max_tokens > MAX_TOKENS:
        description = f"{beams.width} beams of {params.max_tokens} tokens are more than {MAX_TOKENS} tokens"
        raise invalid("sampling.max_tokens", description)
    said: list[str] = []
    for worker in workers:
        if 0 < worker.max_num_seqs < beams.width:
            said.append(f"a worker runs {worker.max_num_seqs} sequences at a time")
        elif (need := most_blocks(beams.width, prompt_len, prompt_len + params.max_tokens, worker.block_size)) > worker.kv_blocks:
            said.append(f"the beams may need {need} blocks of KV; a worker has {worker.kv_blocks}")
        else:
            return
    if said:
        violation = Violation("beam.width", said[0])
        raise BatonError(Reason.CONTEXT_LENGTH, f"{violation.field}: {violation.description}", (violation,))
