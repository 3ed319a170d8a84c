"""What `baton size` tells: memory, times and cost of one model on one kind of device, each line with the formula that gave it."""

from collections.abc import Iterator
from dataclasses import dataclass

from baton.plan import formulae
from baton.plan.hardware import Device, Efficiency
from baton.plan.shape import Shape

UNITS = {"B": ("B", "kB", "MB", "GB", "TB"), "s": ("s", "ms", "µs", "ns")}
RESERVE = 0.1  # of a device's memory, for activations, graphs and the allocator


@dataclass(frozen=True, slots=True)
class Asked:
    """One replica of `devices` with tensor parallelism, and its load."""

    prompt: int
    output: int
    batch: int
    devices: int = 1
    weight_bits: float = 16
    kv_bits: float = 16
    block_size: int = 16
    link_bytes_per_s: float = 25e9  # between a prefill and a decode worker
    price: float | None = None  # of one device for an hour
    acceptance: float | None = None  # of guesses
    guess_cost: float = 0.1  # of a guess, in plain steps
    cached: int = 0  # tokens of the prompt that need not be computed
    longest: int | None = None  # tokens that a sequence may reach


@dataclass(frozen=True, slots=True)
class Figure:
    name: str
    value: float
    unit: str  # B, s, tokens/s, or what is counted
    formula: str


def figures(shape: Shape, device: Device, reached: Efficiency, asked: Asked) -> Iterator[Figure]:
    """Raises ValueError if the weights do not fit."""
    weights = formulae.weight_bytes(shape.parameters, asked.weight_bits)
    memory = device.memory * asked.devices
    if weights > memory * (1 - RESERVE):
        least = -(-weights // (device.memory * (1 - RESERVE)))
        raise ValueError(
            f"{shape.name} has {weights / 1e9:.1f} GB of weights, and {asked.devices} x {device.name} {memory / 1e9:.0f} GB,"
            f" of which {RESERVE:.0%} are for other things: at least {least:.0f} are needed"
        )
    flop_per_s = device.flop_rate(asked.weight_bits) * reached.compute * asked.devices
    bytes_per_s = device.bytes_per_s * reached.bandwidth * asked.devices
    kv = shape.kv_bytes(asked.kv_bits / 8)
    yield Figure("parameters", shape.parameters, "", "all matrices and norms")
    if shape.experts:
        yield Figure("parameters a token uses", shape.active_parameters + shape.head_parameters, "", "its experts alone")
    yield Figure("weights", weights, "B", f"parameters x {asked.weight_bits:g} bits")
    yield Figure("KV of a token", kv, "B", _kv_formula(shape, asked))
    each = formulae.kv_bytes_per_token(shape.layers, shape.heads, shape.head_dim, asked.kv_bits / 8)
    if each > kv:
        kind = "latent attention" if shape.latent else "one head for all" if shape.kv_heads == 1 else f"{shape.kv_heads} heads of KV"
        yield Figure("times less than a head each", each / kv, "x", f"{kind} for {shape.heads} query heads")
    yield Figure("KV of a prompt", kv * asked.prompt, "B", f"KV of a token x {asked.prompt}")
    whole = asked.prompt + asked.output
    kept = kv * shape.kv_copies(asked.devices)
    fits = formulae.sequences_that_fit(memory, weights, kept, whole, asked.block_size, RESERVE)
    copies = f", {shape.kv_copies(asked.devices):g} copies" if kept > kv else ""
    room = f"({1 - RESERVE:.0%} of {memory / 1e9:.0f} GB - weights) / KV of {whole} tokens in blocks{copies}"
    yield Figure("sequences that fit", fits, "", room)
    yield Figure(
        "slots lost to blocks", formulae.fragmentation(whole, asked.block_size), "%", f"half a block of {asked.block_size} a sequence"
    )
    lost = formulae.reserved_in_vain(whole, asked.longest) if asked.longest else 0.0
    if lost > 0:
        yield Figure("slots lost without blocks", lost, "%", f"room for {asked.longest} tokens for each sequence")
    yield from _times(shape, asked, kv, flop_per_s, bytes_per_s)
    yield from _disaggregation(shape, device, asked, kv)


def _times(shape: Shape, asked: Asked, kv: float, flop_per_s: float, bytes_per_s: float) -> Iterator[Figure]:
    new = max(1, asked.prompt - asked.cached)
    flop = shape.prefill_flop(new, asked.prompt - new)
    read = formulae.weight_bytes(shape.read_parameters(new), asked.weight_bits)
    prefill = formulae.roof_seconds(flop, read, flop_per_s, bytes_per_s)
    yield Figure("prefill of a prompt", prefill, "s", f"{flop / 1e12:.3g} TFLOP at {flop_per_s / 1e12:.0f} TFLOP/s: TTFT without a queue")
    yield Figure("prefill", new / prefill, "tokens/s", f"{new} tokens that are not cached / prefill of a prompt")
    context = asked.prompt + asked.output / 2
    read = formulae.weight_bytes(shape.read_parameters(asked.batch), asked.weight_bits)
    step_bytes = read + asked.batch * context * kv * shape.kv_copies(asked.devices)
    step_flop = asked.batch * (2 * (shape.active_parameters + shape.head_parameters) + shape.attention_flop(1, int(context)))
    step = formulae.roof_seconds(step_flop, step_bytes, flop_per_s, bytes_per_s)
    bound = "reading" if step_bytes / bytes_per_s >= step_flop / flop_per_s else "computing"
    yield Figure(
        "decode step: TPOT", step, "s", f"{step_bytes / 1e9:.3g} GB at {bytes_per_s / 1e12:.2f} TB/s, bound by {bound}, batch {asked.batch}"
    )
    yield Figure("decode", asked.batch / step, "tokens/s", f"batch {asked.batch} / decode step")
    ridge = formulae.ridge_batch(asked.weight_bits, flop_per_s, bytes_per_s)
    yield Figure("batch at which computing binds", ridge, "", "FLOP/s over bytes/s, KV left out")
    busy = prefill + asked.output * step / asked.batch
    yield Figure("requests, colocated", 1 / busy, "1/s", "1 / (prefill + output x step / batch), without interference")
    if asked.price is not None:
        hourly = asked.price * asked.devices
        cost = formulae.cost_per_million(hourly, asked.output / busy)
        yield Figure("cost of a million output tokens", cost, "", f"{hourly:g} an hour, prompts included, at full use")
    if asked.acceptance is not None:
        guesses = formulae.best_guesses(asked.acceptance, asked.guess_cost)
        gain = formulae.speculation_gain(asked.acceptance, guesses, asked.guess_cost)
        yield Figure("guesses a step", guesses, "", f"the best for acceptance {asked.acceptance:g}, {asked.guess_cost:g} steps a guess")
        yield Figure("gain by speculation", gain, "x", "(1 - a^(k+1)) / (1 - a) / (1 + k c), while reading binds")


def _disaggregation(shape: Shape, device: Device, asked: Asked, kv: float) -> Iterator[Figure]:
    handoff = formulae.transfer_seconds(kv * (asked.prompt - asked.cached), asked.link_bytes_per_s)
    yield Figure("handoff of a prompt", handoff, "s", f"KV of what is not there yet at {asked.link_bytes_per_s / 1e9:g} GB/s")
    if asked.devices > 1:
        nbytes = 2 * shape.layers * asked.batch * shape.hidden * 2
        seconds = formulae.ring_seconds(nbytes, asked.devices, device.link_bytes_per_s)
        yield Figure(
            "all-reduces of a decode step", seconds, "s", f"two a layer over {device.link_bytes_per_s / 1e9:.0f} GB/s, latency not counted"
        )


def _kv_formula(shape: Shape, asked: Asked) -> str:
    if shape.latent:
        return f"{shape.layers} layers x ({shape.latent.rank} + {shape.latent.rope}) x {asked.kv_bits:g} bits"
    return f"2 x {shape.layers} layers x {shape.kv_heads} heads x {shape.head_dim} x {asked.kv_bits:g} bits"


def shown(figure: Figure) -> str:
    """Three significant digits, in the unit that suits."""
    value, unit = figure.value, figure.unit
    if unit == "%":
        return f"{value:.1%}"
    if unit == "" and value >= 1e6:
        return f"{value / 1e9:.3g} billion" if value >= 1e9 else f"{value / 1e6:.3g} million"
    names, factor = UNITS.get(unit, (unit,)), 1e-3 if unit == "s" else 1e3
    step = 0
    while step < len(names) - 1 and (0 < value < 1 if unit == "s" else value >= 1000):
        value, step = value / factor, step + 1
    return f"{value:,.0f} {names[step]}".strip() if value >= 100 else f"{value:.3g} {names[step]}".strip()
