"""What a trained checkpoint can do, in numbers: held-out loss, recall by distance, agreement of draft and target, samples."""

import math
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import Any, cast

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional

from baton.models.train import tool_talk
from baton.models.train.corpus import EOS, SPECIAL, documents, render
from baton.models.train.dialogues import Message, long_document
from baton.models.train.recipe import CONTEXT, SEED

HELD_OUT = {150: 200, 350: 100, 1250: 40}  # words of a document: how many
DISTANCES = (32, 64, 128, 256, 512, 1024, 1800)  # tokens between the fact and the question
WORDS_PER_TOKEN = 0.815  # of stories
RECALL_TRIALS = 50  # for each distance
SUMS = 100  # of each kind
USES_TRIED = 50  # likewise


@dataclass(frozen=True, slots=True)
class Loss:
    """Nats per token. `assistant`: only for the tokens that the model itself says in a dialogue."""

    all: float
    assistant: float
    tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.all)


@torch.inference_mode()
def held_out_loss(model: nn.Module, tokenizer: Tokenizer) -> Loss:
    total = own = 0.0
    count = own_count = 0
    for ids in held_out(tokenizer):
        each = functional.cross_entropy(_logits(model, ids[:-1]), ids[1:], reduction="none")
        mask = _own(ids)
        total, count = total + each.sum().item(), count + len(each)
        own, own_count = own + each[mask].sum().item(), own_count + int(mask.sum())
    return Loss(total / count, own / own_count, count)


@torch.inference_mode()
def agreement(draft: nn.Module, target: nn.Module, tokenizer: Tokenizer) -> float:
    """Share of positions in held-out text at which both choose the same token greedily."""
    same = count = 0
    for ids in held_out(tokenizer):
        same += int((_logits(draft, ids[:-1]).argmax(-1) == _logits(target, ids[:-1]).argmax(-1)).sum())
        count += len(ids) - 1
    return same / count


@torch.inference_mode()
def recall(model: nn.Module, tokenizer: Tokenizer, distance: int, trials: int = RECALL_TRIALS) -> tuple[float, float]:
    """Share of questions answered right, word for word, by greedy decoding, and the actual mean distance in tokens.

    Four facts are told, and one is asked for about `distance` tokens later; stories fill the space between.
    """
    right = 0
    distances = []
    for trial in range(trials):
        prompt, answer, gap = recall_question(tokenizer, distance, trial)
        right += _says(model, prompt, answer)
        distances.append(gap)
    return right / trials, sum(distances) / trials


def _says(model: nn.Module, prompt: list[int], answer: list[int]) -> bool:
    """Whether greedy decoding produces `answer`: each of its tokens is the best choice after the right ones before it."""
    ids = torch.tensor(prompt + answer)
    return bool((_logits(model, ids[:-1])[len(prompt) - 1 :].argmax(-1) == ids[len(prompt) :]).all())


@torch.inference_mode()
def sums(model: nn.Module, tokenizer: Tokenizer) -> dict[str, float]:
    """Share of small sums that are right, by greedy decoding. There are `SUMS` of each kind, as in training."""
    rng = Random(f"{SEED}/sums")
    right: dict[str, float] = {}
    for kind, largest in (("plus", 20), ("minus", 20), ("times", 10)):
        count = 0
        for _ in range(SUMS):
            y, x = sorted(rng.randint(0, largest) for _ in range(2))
            result = {"plus": x + y, "minus": x - y, "times": x * y}[kind]
            prompt = tokenizer.encode(ask(f"What is {x} {kind} {y}?"), add_special_tokens=False).ids
            count += _says(model, prompt, tokenizer.encode(f"{x} {kind} {y} is {result}.{EOS}", add_special_tokens=False).ids)
        right[kind] = count / SUMS
    return right


@torch.inference_mode()
def tool_use(model: nn.Module, tokenizer: Tokenizer) -> dict[str, dict[str, float]]:
    """Share of questions for which greedy decoding writes the right calls, word for word, and, given their results, the right answer.

    `USES_TRIED` questions of each kind, asked first. The offer is that of `baton chat`, or the one tool that the question needs."""
    found: dict[str, dict[str, float]] = {}
    for tool, make, _ in tool_talk.USES:
        rng = Random(f"{SEED}/tools/{make.__name__}")
        chat = (tool_talk.CALCULATE, tool_talk.TIME, tool_talk.LOOK_UP)
        offer = tool_talk.offer(chat if tool in chat else (tool,))
        calls = answers = 0
        for use in (make(rng) for _ in range(USES_TRIED)):
            asked = [offer, Message("user", use.question)]
            called = [*asked, Message("assistant", use.written), *use.told]
            calls += _replies(model, tokenizer, asked, use.written)
            answers += _replies(model, tokenizer, called, use.answer)
        found[make.__name__.replace("_", " ")] = {"calls": calls / USES_TRIED, "answers": answers / USES_TRIED}
    return found


def _replies(model: nn.Module, tokenizer: Tokenizer, messages: list[Message], reply: str) -> bool:
    prompt, answer = (tokenizer.encode(text, add_special_tokens=False).ids for text in (render(messages, reply=True), reply + EOS))
    return _says(model, prompt, answer)


def recall_question(tokenizer: Tokenizer, distance: int, trial: int) -> tuple[list[int], list[int], int]:
    """Prompt, right answer with its EOS, and the tokens between the value in the fact and the end of the question."""
    rng = Random(f"{SEED}/recall/{distance}/{trial}")
    long = long_document(rng, int(max(0, distance - 40) * WORDS_PER_TOKEN))
    asked = rng.choice(long.facts)
    text = render([*long.messages, Message("user", asked.question)], reply=True)
    told = text.index(asked.value)
    prompt = tokenizer.encode(text, add_special_tokens=False).ids
    gap = len(tokenizer.encode(text[told:], add_special_tokens=False).ids)
    return prompt, tokenizer.encode(asked.answer + EOS, add_special_tokens=False).ids, gap


@torch.inference_mode()
def generate(model: nn.Module, tokenizer: Tokenizer, text: str, temperature: float, seed: int, limit: int = 400) -> str:
    """Continues `text`, special tokens spelled out, until the model ends it."""
    ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False).ids])
    torch.manual_seed(seed)
    options = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    out = cast(Any, model).generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit, pad_token_id=SPECIAL.index(EOS), **options
    )
    return str(tokenizer.decode(out[0, ids.shape[1] :].tolist()))


def ask(*contents: str) -> str:
    """A prompt: what user and assistant said alternately."""
    return render([Message("user" if i % 2 == 0 else "assistant", content) for i, content in enumerate(contents)], reply=True)


def held_out(tokenizer: Tokenizer) -> list[Tensor]:
    rows = []
    for size, count in HELD_OUT.items():
        for text in islice(documents(SEED, "held out", size), count):
            rows.append(torch.tensor(tokenizer.encode(text, add_special_tokens=False).ids[:CONTEXT]))
    return rows


def _logits(model: nn.Module, ids: Tensor) -> Tensor:
    """[tokens, vocabulary]"""
    logits: Tensor = model(input_ids=ids[None], use_cache=False).logits[0]
    return logits


def _own(ids: Tensor) -> Tensor:
    """Whether the assistant says it, for each of ids[1:]."""
    own, said = False, []
    user, assistant, system = (SPECIAL.index(f"<|{role}|>") for role in ("user", "assistant", "system"))
    for token, following in zip(ids.tolist(), ids.tolist()[1:], strict=False):
        own = token == assistant or (own and token not in (user, system))
        said.append(own and following not in (user, assistant, system))
    return torch.tensor(said)
