"""Why tokens of a prompt were computed although prompts are cached: the words, which `router.uncached` finds."""

from typing import Final, Literal, get_args

Cause = Literal[
    "off", "scored", "computing", "unfetched", "unloaded", "stale", "failed", "unusable", "busy", "dearer", "unlent",
    "evicted", "restarted", "changed", "grown", "salt", "new", "partial",
]  # fmt: skip
UNCACHED: Final[dict[Cause, str]] = {  # docs/architecture.md says the same, which a test checks
    "off": "nothing is cached (engine.prefix_caching)",
    "scored": "prompt_logprobs: the whole prompt is computed",
    "computing": "another request was still computing them",
    "unfetched": "they could not be fetched from the worker that holds them",
    "unloaded": "the worker did not load them from its tiers",
    "stale": "the worker no longer held what the router thought",
    "failed": "the worker that holds them had failed this request",
    "unusable": "the worker that holds them drains, hangs or is put aside",
    "busy": "the worker that holds them had more to do",
    "dearer": "to move them costs more than to compute them",
    "unlent": "the worker that holds them does not lend",
    "evicted": "they were cached, and made room for others",
    "restarted": "the worker that held them has restarted or left",
    "changed": "an earlier prompt began in the same way and went on differently",
    "grown": "they follow the end of an earlier prompt",
    "salt": "they were cached under another salt of this tenant",
    "new": "no earlier prompt began in this way",
    "partial": "they fill no block, or are the last token",
}
assert tuple(UNCACHED) == get_args(Cause)
