"""The tables of docs/apis.md: `python scripts/api_fields.py` writes them, `--check` only compares.

For each API: the names in the types of its SDK, those that other servers add, and those of the model that reads bodies here. What
becomes of a field follows from its type in that model. A new API is one entry of `APIS`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anthropic.types import beta, message_count_tokens_params, message_create_params
from made_page import settle
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from router.http.body import Body, Neutral
from router.http.messages_in import CountTokens, CreateMessage
from router.http.openai_in import Chat, Completion
from router.http.tokens_in import Generate, TokenSampling

PAGE = Path(__file__).resolve().parent.parent / "docs" / "apis.md"
BEGIN, END = "<!-- fields: written by scripts/api_fields.py -->", "<!-- end of fields -->"
# What the requests of vLLM 0.32 have besides OpenAI's.
VLLM = (
    "add_special_tokens", "allowed_token_ids", "bad_words", "cache_salt", "ec_transfer_params", "ignore_eos", "include_stop_str_in_output",
    "kv_transfer_params", "length_penalty", "logprob_token_ids", "min_p", "min_tokens", "mm_payload", "priority", "prompt_logprobs",
    "repetition_detection", "repetition_penalty", "request_id", "return_mm_kwargs", "return_token_ids", "return_token_offsets",
    "return_tokens_as_token_ids", "routed_experts_prompt_start", "session_id", "skip_special_tokens", "spaces_between_special_tokens",
    "stop_token_ids", "stream_interval", "structured_outputs", "thinking_token_budget", "top_k", "truncate_prompt_tokens",
    "truncation_side", "use_beam_search", "vllm_xargs", "watermarking",
)  # fmt: skip
VLLM_CHAT = (
    *VLLM, "add_generation_prompt", "chat_template", "chat_template_kwargs", "continue_final_message", "documents", "echo",
    "include_reasoning", "media_io_kwargs", "mm_processor_kwargs", "return_prompt_text",
)  # fmt: skip
VLLM_COMPLETION = (*VLLM, "prompt_embeds", "response_format")
VLLM_GENERATE = (
    "cache_salt", "content_parts", "ec_transfer_params", "features", "kv_transfer_params", "model", "output_mode", "priority",
    "reasoning_ended", "reasoning_parser_kwargs", "request_id", "return_token_ids", "sampling_params", "stream", "stream_options",
    "token_ids", "token_offsets",
)  # fmt: skip
VLLM_SAMPLING = (
    "allowed_token_ids", "bad_words", "detokenize", "extra_args", "flat_logprobs", "frequency_penalty", "ignore_eos",
    "include_stop_str_in_output", "logit_bias", "logprob_token_ids", "logprobs", "max_tokens", "min_p", "min_tokens", "n",
    "output_kind", "output_text_buffer_length", "presence_penalty", "prompt_logprob_start", "prompt_logprob_token_ids",
    "prompt_logprobs", "repetition_detection", "repetition_penalty", "routed_experts_prompt_start", "seed", "skip_clone",
    "skip_reading_prefix_cache", "skip_special_tokens", "spaces_between_special_tokens", "stop", "stop_token_ids", "stream_interval",
    "structured_outputs", "temperature", "thinking_token_budget", "top_k", "top_p", "trace_decode_token_ids", "watermarking",
)  # fmt: skip


@dataclass(frozen=True)
class Api:
    """`known`: whose name → the fields that its clients may send. `notes`: what the type of a field does not say."""

    title: str
    model: type[Body]
    known: Mapping[str, frozenset[str]]
    notes: Mapping[str, str] = field(default_factory=dict)


_OF_BETA = beta.message_create_params
ANTHROPIC = (message_create_params.MessageCreateParamsBase, message_create_params.MessageCreateParamsStreaming)
BETA = (_OF_BETA.MessageCreateParamsBase, _OF_BETA.MessageCreateParamsStreaming)
FORMER = frozenset({"output_format", "temperature", "top_k", "top_p"})  # that earlier SDKs have
HEADERS = {"betas", "user_profile_id", "workspace_id"}  # Anthropic's SDK sends them as headers


def names(*types: Any) -> frozenset[str]:
    """The members of TypedDicts."""
    return frozenset(name for each in types for name in each.__annotations__)


APIS = (
    Api(
        "`POST /v1/chat/completions`",
        Chat,
        {
            "OpenAI": names(chat_create_params.CompletionCreateParamsNonStreaming, chat_create_params.CompletionCreateParamsStreaming),
            "vLLM": frozenset(VLLM_CHAT),
        },
        {"max_tokens": "the old name of `max_completion_tokens`", "thinking_token_budget": "another name of `max_thinking_tokens`"},
    ),
    Api(
        "`POST /v1/completions`",
        Completion,
        {
            "OpenAI": names(completion_create_params.CompletionCreateParamsNonStreaming),
            "vLLM": frozenset(VLLM_COMPLETION),
        },
    ),
    Api("`POST /inference/v1/generate`", Generate, {"vLLM": frozenset(VLLM_GENERATE)}),
    Api("`sampling_params` of `/inference/v1/generate`", TokenSampling, {"vLLM": frozenset(VLLM_SAMPLING)}),
    Api(
        "`POST /v1/messages`",
        CreateMessage,
        {"Anthropic": (names(*ANTHROPIC, *BETA) | FORMER) - HEADERS},
        {"output_format": "the old name of `output_config.format`"},
    ),
    Api(
        "`POST /v1/messages/count_tokens`",
        CountTokens,
        {"Anthropic": names(message_count_tokens_params.MessageCountTokensParams, beta.MessageCountTokensParams) - HEADERS},
        {"output_format": "the old name of `output_config.format`"},
    ),
)


def fate(api: Api, name: str) -> str:
    """What becomes of a field."""
    found = api.model.model_fields.get(name)
    if found is None:
        return "refused"
    neutral = next((rule for rule in found.metadata if isinstance(rule, Neutral)), None)
    if neutral is not None:
        values = " or ".join(f"`{json.dumps(value)}`" for value in neutral.values)
        return f"refused, except {values}" if values else "refused"
    told = "harmless" if found.annotation is Any and not found.metadata else "honoured"
    return f"{told}: {api.notes[name]}" if name in api.notes else told


def table(api: Api) -> str:
    every = sorted(set(api.model.model_fields).union(*api.known.values()))
    lines = [f"## {api.title}", "", "| field | of | here |", "| -- | -- | -- |"]
    for name in every:
        of = ", ".join(owner for owner, theirs in api.known.items() if name in theirs) or "Baton"
        lines.append(f"| `{name}` | {of} | {fate(api, name)} |")
    return "\n".join(lines)


def page(text: str) -> str:
    """The page with current tables. Raises ValueError if it has no place for them."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE} has no {BEGIN} … {END}")
    tables = "\n\n".join(map(table, APIS))
    return f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}"


def main() -> None:
    settle(PAGE, page, "router/http")


if __name__ == "__main__":
    main()
