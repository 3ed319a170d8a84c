"""What a client is told at a path that clients of OpenAI, vLLM and other servers know and that is not served here.

404, not 501: clients try again after a status of 500 and more, and no second try could end otherwise.
"""

_GENERATES = "this server generates text, at /v1/chat/completions and /v1/completions"
_STATELESS = "this server keeps nothing between requests; send the whole conversation to /v1/chat/completions"
_OPERATED = "this is done by those who run the cluster, with `baton` on the command line"

# First segment of a path, or the first two, without a version → what it is, what is served instead.
_KNOWN = {
    **dict.fromkeys(("embeddings", "pooling", "embed"), ("embeddings", _GENERATES)),
    **dict.fromkeys(("score", "rerank", "classify", "generative_scoring"), ("scores and ranks", _GENERATES)),
    "moderations": ("moderation", _GENERATES),
    "audio": ("audio", _GENERATES),
    "images": ("images", _GENERATES),
    "videos": ("videos", _GENERATES),
    "realtime": ("realtime sessions", "send stream: true to /v1/chat/completions"),
    **dict.fromkeys(("files", "uploads"), ("files", "put the text into the messages of /v1/chat/completions")),
    "batches": ("batches", "send the requests to /v1/chat/completions or /v1/completions, with a priority if others are to go first"),
    **dict.fromkeys(("fine_tuning", "evals", "graders"), ("training and evaluation", "serve a trained model instead: model.path")),
    **dict.fromkeys(("assistants", "threads"), ("assistants and threads", _STATELESS)),
    **dict.fromkeys(("conversations", "chatkit"), ("stored conversations", _STATELESS)),
    **dict.fromkeys(("vector_stores", "containers", "skills"), ("stores and containers", _STATELESS)),
    **dict.fromkeys(("organization", "projects"), ("accounts", "keys and limits of tenants are in a file: security.api_keys")),
    **dict.fromkeys(("load_lora_adapter", "unload_lora_adapter"), ("adapters", _OPERATED)),
    **dict.fromkeys(("sleep", "wake_up", "is_sleeping", "reset_prefix_cache", "reset_mm_cache"), ("control of an engine", _OPERATED)),
    **dict.fromkeys(("start_profile", "stop_profile", "collective_rpc", "scale_elastic_ep"), ("control of an engine", _OPERATED)),
    **dict.fromkeys(("load", "server_info", "get_server_info"), ("figures of an engine", "see /metrics")),
    "ping": ("this probe", "ask /livez, /readyz or /health"),
    "tokenizer_info": ("the tokenizer's files", "/tokenize and /detokenize convert text and token ids"),
    "abort_requests": ("aborting by id", "close the connection of a request, and it ends everywhere"),
    "inference/abort_requests": ("aborting by id", "close the connection of a request, and it ends everywhere"),
    "invocations": ("SageMaker's path", "use /v1/chat/completions or /v1/completions"),
    **dict.fromkeys(("api", "generate", "generate_stream"), ("another server's own API", _GENERATES)),
}  # fmt: skip


def sentence(path: str) -> str:
    parts = [part for part in path.strip("/").split("/") if part not in ("v1", "v2")]
    known = _KNOWN.get("/".join(parts[:2])) or _KNOWN.get(parts[0] if parts else "")
    if known is None:
        return f"nothing is served at {path[:80]!r}; /openapi.json lists what is"
    what, instead = known
    return f"{what}: not served at {path[:80]!r}; {instead}"
