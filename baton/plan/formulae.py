"""The arithmetic of serving, one formula each. SI units throughout: bytes, FLOP, seconds; a GB is 10^9 bytes.

Rooflines (Williams et al., "Roofline", 2009) are bounds: nothing is faster, and what is measured on a device is a share of them
(`baton.plan.hardware.Efficiency`). A product of a matrix with one vector counts two FLOP for each weight.
"""

from math import ceil, erfc, exp, sqrt


def weight_bytes(parameters: float, bits: float = 16) -> float:
    """`bits` of a number as it is stored, scales included: 4.5 where groups of 32 share a scale of 16 bits."""
    return parameters * bits / 8


def kv_bytes_per_token(layers: int, kv_heads: int, head_dim: int, number_bytes: float = 2, parts: int = 2) -> float:
    """Keys and values of one token in all layers. Grouped-query attention (Ainslie et al. 2023) has fewer `kv_heads` than query heads,
    multi-query attention (Shazeer 2019) one. Multi-head latent attention (DeepSeek-V2, 2024) has one head of `rank + rope` numbers, which
    are key and value at once: `parts=1`."""
    return layers * parts * kv_heads * head_dim * number_bytes


def transfer_seconds(nbytes: float, bytes_per_s: float, latency_s: float = 0.0) -> float:
    """The time over a link. 200 Gbit/s are 25 GB/s."""
    return latency_s + nbytes / bytes_per_s


def attention_flop(tokens: int, cached: int, layers: int, heads: int, key_dim: int, value_dim: int | None = None) -> float:
    """Scores and weighted sums of `tokens` new positions that follow `cached` ones, each with all before it and itself."""
    pairs = tokens * cached + tokens * (tokens + 1) / 2
    return 2 * pairs * layers * heads * (key_dim + (key_dim if value_dim is None else value_dim))


def prefill_flop(tokens: int, active_parameters: float, head_parameters: float, attention: float) -> float:
    """`active_parameters`: the weights that a token is multiplied with, without embedding and head; the head is applied to the last
    position alone. `attention`: `attention_flop`."""
    return 2 * (tokens * active_parameters + head_parameters) + attention


def roof_seconds(flop: float, nbytes: float, flop_per_s: float, bytes_per_s: float) -> float:
    """The least time of work that computes `flop` and moves `nbytes` to and from memory."""
    return max(flop / flop_per_s, nbytes / bytes_per_s)


def ridge_batch(bits: float, flop_per_s: float, bytes_per_s: float) -> float:
    """Sequences from which on a decode step is bound by computing rather than by reading the weights, KV left out."""
    return flop_per_s / bytes_per_s * bits / 16


def experts_read(experts: int, per_token: int, tokens: int) -> float:
    """How many experts of a layer a step with so many tokens reads, on average, if all are equally likely."""
    return experts * (1 - (1 - per_token / experts) ** tokens)


def tokens_per_step(acceptance: float, guesses: int) -> float:
    """Expected tokens of speculation if each guess is right with this probability as long as those before it were (Leviathan et al. 2023,
    equation 1)."""
    if acceptance == 1:
        return guesses + 1.0
    return (1 - acceptance ** (guesses + 1)) / (1 - acceptance)


def speculation_gain(acceptance: float, guesses: int, guess_cost: float, verify_cost: float = 1.0) -> float:
    """How many times as many tokens a second. Costs in units of a plain step: of one guess, and of the step that verifies them all (1 where
    it is bound by reading the weights)."""
    return tokens_per_step(acceptance, guesses) / (verify_cost + guesses * guess_cost)


def best_guesses(acceptance: float, guess_cost: float, verify_cost: float = 1.0, most: int = 16) -> int:
    """How many guesses a step gain most; 0: none pays."""
    return max(range(most + 1), key=lambda guesses: speculation_gain(acceptance, guesses, guess_cost, verify_cost if guesses else 1.0))


def fragmentation(mean_tokens: float, block_size: int) -> float:
    """Share of the allocated slots that no token fills: on average half a block less half a slot at the end of each sequence (Kwon et al.,
    "PagedAttention", 2023)."""
    empty = (block_size - 1) / 2
    return empty / (mean_tokens + empty)


def reserved_in_vain(mean_tokens: float, longest: int) -> float:
    """Share of the slots that no token fills where each sequence gets room for the longest one at once, as before paged KV (the same
    paper, figure 2)."""
    return 1 - mean_tokens / longest


def sequences_that_fit(
    memory_bytes: float, weights: float, kv_per_token: float, tokens: int, block_size: int = 16, reserve: float = 0.1
) -> int:
    """How many sequences of `tokens` have room beside the weights, if `reserve` of the memory is for everything else."""
    room = memory_bytes * (1 - reserve) - weights
    return max(0, int(room // (ceil(tokens / block_size) * block_size * kv_per_token)))


def ring_seconds(nbytes: float, devices: int, bytes_per_s: float) -> float:
    """An all-reduce of `nbytes` among devices whose link carries `bytes_per_s` in each direction (Patarasuk and Yuan 2009), no latency."""
    return 2 * (devices - 1) / devices * nbytes / bytes_per_s


def pipeline_bubble(stages: int, microbatches: int) -> float:
    """Share of the time in which a stage waits (Huang et al., "GPipe", 2019)."""
    return (stages - 1) / (microbatches + stages - 1)


def erlang_c(servers: int, load: float) -> float:
    """Probability that who comes must wait for one of `servers`, `load` of which are busy on average (Erlang 1917); 1 if that is all.
    By the recursion for Erlang's B, which no factorial makes overflow."""
    if load >= servers:
        return 1.0
    blocked = 1.0
    for number in range(1, servers + 1):
        blocked = load * blocked / (number + load * blocked)
    return blocked / (1 - load / servers * (1 - blocked))


def wait_within(seconds: float, servers: int, load: float, service_s: float, arrivals_cv2: float, service_cv2: float) -> float:
    """Probability that a wait for one of `servers` is no longer than that: who waits at all (`erlang_c`) does so for an exponential time
    (Kingman, "On queues in heavy traffic", 1962) whose mean grows with the squared coefficients of variation of the gaps between arrivals
    and of the service times (Allen and Cunneen; Allen, "Probability, Statistics, and Queueing Theory", 1978)."""
    if seconds < 0 or load >= servers:
        return 0.0
    waits = erlang_c(servers, load)
    mean = service_s / (servers - load) * (arrivals_cv2 + service_cv2) / 2
    return 1 - waits * exp(-seconds / mean) if mean > 0 else 1.0


def peakedness(arrivals_cv2: float) -> float:
    """Variance over mean of how many are being served where nobody waits: 1 for Poisson arrivals (Eckberg, "Generalized peakedness of
    teletraffic processes", 1983, for exponential service)."""
    return (arrivals_cv2 + 1) / 2


def normal_below(value: float, mean: float, deviation: float) -> float:
    """Probability that a normal variable is at most `value`."""
    if deviation <= 0:
        return 1.0 if value >= mean else 0.0
    return 0.5 * erfc((mean - value) / (deviation * sqrt(2)))


def cost_per_million(price_per_hour: float, tokens_per_s: float) -> float:
    """The cost of a million tokens at full use, in the currency of the price."""
    return price_per_hour / (tokens_per_s * 3600) * 1e6
