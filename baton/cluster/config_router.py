"""The sections of the configuration that say how the router works and by which objectives it judges."""

from typing import Literal, Self

from pydantic import Field, model_validator

from baton.cluster.measures import read_measures
from baton.section import Section


class RouterConfig(Section):
    replicas: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Routers; each serves any request. The ports below are the first one's, others get free ones.",
    )
    port: int = Field(default=8470, ge=0, le=65535, description="Port of the public gRPC API; 0: any free one.")
    admin_port: int = Field(default=8471, ge=0, le=65535, description="Port of the admin API; 0: any free one.")
    http_port: int = Field(default=8000, ge=0, le=65535, description="Port of the OpenAI-compatible HTTP API; 0: any free one.")
    page_port: int = Field(default=8472, ge=0, le=65535, description="Port of the live page; 0: any free one.")
    http_max_connections: int = Field(
        default=2048, ge=1, le=1_000_000, description="Maximum number of HTTP connections at a time; more are refused."
    )
    http_read_timeout_s: float = Field(
        default=20.0, gt=0, le=3600, description="Time limit for receiving an HTTP request's headers, and again for its body, seconds."
    )
    http_idle_s: float = Field(default=75.0, gt=0, le=3600, description="How long an HTTP connection stays open between requests, seconds.")
    cors_origins: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="Origins whose pages may use the HTTP API from a browser: https://app.example, or * for all. Empty: none.",
    )
    reasoning_field: Literal["both", "reasoning", "reasoning_content"] = Field(
        default="both", description="Name under which the HTTP API tells what a model thinks; requests may use either."
    )
    stall_s: float = Field(
        default=30.0,
        gt=0,
        le=3600,
        description="How long a client, over gRPC or HTTP, may leave its answer unread before the router drops the request, seconds.",
    )
    backlog_bytes: int = Field(
        default=4 << 20,
        ge=64 << 10,
        le=1 << 30,
        description="How much of an answer may wait for its client to read, as the worker sent it (a token has about 70 bytes, with 20"
        " log-probabilities 300), bytes. Beyond that, the request ends with STALLED.",
    )
    stream_interval_s: float = Field(
        default=0.0,
        ge=0,
        le=10,
        description="Shortest time between two messages of one stream, seconds. Tokens that come sooner wait and travel together, which"
        " costs the router less; the first ones and the end never wait. 0: each token is sent as it comes, unless the router's event loop"
        " is behind: then tokens wait for each other, up to 15 ms.",
    )
    max_inflight: int = Field(
        default=256,
        ge=1,
        le=65536,
        description="Maximum number of sequences served at a time: each choice of a request is one, and each beam.",
    )
    max_choices: int = Field(default=128, ge=1, le=1024, description="Maximum number of choices that are computed for one request.")
    max_answer_tokens: int = Field(
        default=1 << 17, ge=128, le=1 << 24, description="Maximum number of tokens of all choices of a request together, if it has several."
    )
    max_queue: int = Field(default=512, ge=0, le=65536, description="Maximum number of requests waiting for admission; more are refused.")
    queue_timeout_s: float = Field(
        default=60.0, gt=0, le=3600, description="Longest wait for admission, and again for a decode worker with room, seconds."
    )
    overload: Literal["queue", "codel", "lifo"] = Field(
        default="codel",
        description="What to do with requests that would wait so long that they miss their deadline or an objective of the slo section."
        " queue: let them wait. codel: refuse them immediately, and shorten a standing queue. lifo: as codel, and while the queue stands,"
        " serve the newest request first.",
    )
    degrade: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="What requests get less of under overload, level by level, each with all before it: speculation (nothing is guessed),"
        " max_tokens=N (no answer is longer), priority=N (requests of a higher number are refused). Empty: nothing.",
    )
    degrade_below: float = Field(
        default=0.9,
        gt=0,
        lt=1,
        description="The next level is entered when a smaller share of the requests meets the objectives of the slo section.",
    )
    degrade_hold_s: float = Field(
        default=15.0,
        ge=1,
        le=3600,
        description="How long nearly all must have met them before a level is left, seconds; longer for one that was entered again.",
    )
    tokenizer_threads: int = Field(default=2, ge=1, le=64, description="Threads that turn prompts into tokens.")
    known_texts_mib: int = Field(
        default=64,
        ge=0,
        le=65536,
        description="Memory for the token ids of long messages of conversations, so that only what is new in a turn is tokenized. 0: none.",
    )
    default_timeout_s: float = Field(default=300.0, gt=0, le=86400, description="Deadline of a request if its client sets none, seconds.")
    max_timeout_s: float = Field(default=600.0, gt=0, le=86400, description="Longest deadline that a client can set, seconds.")
    max_retries: int = Field(default=3, ge=0, le=16, description="How many times a request is retried after a worker fails.")
    retry_budget: int = Field(
        default=100,
        ge=0,
        le=1_000_000,
        description="Failures that all requests together may have before a request that has streamed nothing yet is no longer retried: half"
        " of this. Ten calls that end well make up for one. 0: no limit but max_retries.",
    )
    outlier_share: float = Field(
        default=0.5,
        ge=0,
        lt=1,
        description="Largest share of the workers of a role that is put aside at a time because they fail, damage KV or are slow, unlike"
        " their peers. 0: none ever is.",
    )
    outlier_s: float = Field(
        default=30.0,
        ge=1,
        le=3600,
        description="How long a worker is put aside the first time, seconds. Each further time takes that much longer, up to ten times.",
    )
    outlier_pace: float = Field(
        default=4.0,
        ge=2,
        le=1000,
        description="A worker is slow if its tokens take this many times as long as its peers'; twice this if it has only one peer.",
    )
    bypass_tokens: int = Field(
        default=32, ge=0, description="With this many uncached prompt tokens or fewer, the decode worker computes the prompt itself."
    )
    fetch_tokens: int = Field(
        default=128,
        ge=0,
        description="A prefill worker fetches a cached prefix from another worker if that saves more tokens than this. 0: never.",
    )
    load_tokens: int = Field(
        default=64,
        ge=0,
        description="A prefix that a worker keeps in its tiers counts as cached there if that saves more tokens than this, and costs as"
        " much. 0: tiers do not count.",
    )
    predict_ttl_s: float = Field(
        default=2.0,
        ge=0,
        le=60,
        description="How long a prefix that was just sent to a worker counts as cached there before the worker confirms it, seconds.",
    )
    max_message_bytes: int = Field(
        default=4_194_304, ge=1024, le=1 << 30, description="Maximum size of a request (gRPC message or HTTP body), bytes."
    )
    responses_keep_s: float = Field(
        default=3600.0,
        ge=0,
        le=2_592_000,
        description="How long Redis keeps an answer of /v1/responses, to which a later request may refer (previous_response_id), seconds."
        " 0: none is kept.",
    )
    response_bytes: int = Field(
        default=1 << 20,
        ge=1024,
        le=8 << 20,
        description="Largest answer that is kept, with the conversation that led to it, bytes. A larger one is answered with store: false.",
    )
    responses_bytes: int = Field(
        default=64 << 20,
        ge=1024,
        le=1 << 40,
        description="Room in Redis for all answers that are kept, of all routers together, bytes. When it is full, the oldest answer of the"
        " tenant that holds the most makes room.",
    )
    recover_wait_s: float = Field(
        default=10.0, ge=0, le=600, description="How long a request whose worker died waits for another worker, seconds."
    )
    hang_s: float = Field(
        default=2.0,
        ge=0.2,
        le=600,
        description="How long a worker may not answer, or its engine may make no progress, before the router stops choosing it, seconds."
        " After twice that time, its requests continue on other workers.",
    )
    quarantine_s: float = Field(
        default=600.0,
        ge=0,
        le=86400,
        description="How long a prompt is refused after it has killed two workers, seconds. 0: it may be tried again immediately.",
    )
    connection_age_s: float | None = Field(
        default=None,
        ge=1,
        le=86400,
        description="After this time a gRPC client is told to connect again, while its running calls finish: a load balancer then spreads"
        " connections over new routers, seconds. Not set: never.",
    )
    drain_s: float = Field(default=30.0, ge=0, le=3600, description="How long a stopping router waits for its requests to finish, seconds.")
    reflection: bool | None = Field(
        default=None, description="Offer gRPC server reflection. Not set: only if no API keys are needed (security.api_keys)."
    )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.default_timeout_s > self.max_timeout_s:
            raise ValueError(f"default_timeout_s ({self.default_timeout_s:g}) must not exceed max_timeout_s ({self.max_timeout_s:g})")
        try:
            read_measures(self.degrade)
        except ValueError as error:
            raise ValueError(f"degrade: {error}") from None
        return self


class SloConfig(Section):
    """Objectives by which the router judges requests. An objective that is not set always holds."""

    ttft_s: float | None = Field(default=None, gt=0, le=3600, description="Longest time to the first token, seconds.")
    tpot_s: float | None = Field(default=None, gt=0, le=3600, description="Longest time per output token after the first, seconds.")
    e2e_s: float | None = Field(default=None, gt=0, le=86400, description="Longest time to the last token, seconds.")
    window: int = Field(default=1000, ge=1, le=1_000_000, description="Number of recent requests over which attainment is computed.")
