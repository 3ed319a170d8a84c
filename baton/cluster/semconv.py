"""Names of spans and of their attributes.

The GenAI conventions of OpenTelemetry are still changing, so their names are copied here as text, and only here. Names that the conventions
lack begin with `baton.`; those of a handoff are in `baton.cluster.handoff`. No part of a prompt or an output is ever an attribute.
"""

# Spans. The span of the request itself is named "OPERATION MODEL", as the conventions require.
QUEUE = "baton.queue"  # router: validated, tokenized, admitted, a worker chosen
PREFILL = "baton.prefill"  # router: the call to a prefill worker
PREFILL_WORK = "baton.prefill.work"  # prefill worker: the same call
LEASE = "baton.lease"  # prefill worker: the KV is held for a reader
DECODE = "baton.decode"  # router: the call to a decode worker
DECODE_WORK = "baton.decode.work"  # decode worker: the same call
TRANSFER = "baton.transfer"  # decode worker: room, read, digests, lease check

CHAT = "chat"
TEXT_COMPLETION = "text_completion"
PROVIDER = "baton"

# GenAI, attributes of the request's span
OPERATION_NAME = "gen_ai.operation.name"
PROVIDER_NAME = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
REQUEST_TEMPERATURE = "gen_ai.request.temperature"
REQUEST_TOP_P = "gen_ai.request.top_p"
REQUEST_TOP_K = "gen_ai.request.top_k"
RESPONSE_ID = "gen_ai.response.id"
RESPONSE_MODEL = "gen_ai.response.model"
RESPONSE_FINISH_REASONS = "gen_ai.response.finish_reasons"
RESPONSE_TIME_TO_FIRST_TOKEN = "gen_ai.response.time_to_first_token"  # seconds
USAGE_INPUT_TOKENS = "gen_ai.usage.input_tokens"
USAGE_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
USAGE_CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
ERROR_TYPE = "error.type"

# Ours
WORKER = "baton.worker"
RETRIES = "baton.retries"
RECOMPUTED_TOKENS = "baton.recomputed_tokens"
CACHED_TOKENS = "baton.cached_tokens"
PREEMPTIONS = "baton.preemptions"
WAIT_SECONDS = "baton.wait_seconds"
COMPUTE_SECONDS = "baton.compute_seconds"

# The process, attributes of its resource
SERVICE_NAME = "service.name"
SERVICE_NAMESPACE = "service.namespace"
SERVICE_INSTANCE = "service.instance.id"
