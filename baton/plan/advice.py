"""Why a configuration wins, why others lose, and what the choices are called: tensor, pipeline, data and expert parallelism, one pool
or two, unlike GPUs, fewer bits, tiers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from baton.plan.pools import Question, Speed
from baton.plan.search import Configuration, Found, Search, Stock, order
from baton.plan.values import KV_BITS, expert_parallel

MORE = 64  # times the GPUs that there are: what would be needed


@dataclass(frozen=True, slots=True)
class Advice:
    question: str
    answer: str
    why: str


Family = tuple[str, str, float, float]


def family(one: Configuration) -> Family:
    """Configurations that differ in nothing but numbers. Without a prefill pool, its device is empty."""
    kind = one.decode.kind
    return one.prefill.kind.device.name if one.prefill else "", kind.device.name, kind.weight_bits, kind.kv_bits


def best_of(found: Found, most: int, able: Sequence[Configuration]) -> list[Configuration]:
    """The cheapest of each family first, then what else is cheap; and always the two cheapest that are `able`."""
    first = {family(one): one for one in reversed(found.held)}
    leaders = sorted(first.values(), key=order)[:most]
    each = leaders + [one for one in found.held if one not in leaders]
    must = list(able[:2])
    room = most - sum(one not in each[:most] for one in must)
    return sorted({one.kinds: one for one in each[:room] + must}.values(), key=order)


def because(one: Configuration, asked: Question) -> str:
    """How much of what there is it uses: what would have to give first."""
    decode, parts = one.decode, []
    if one.prefill is not None:
        parts.append(f"prompts keep prefill {one.prefill.busy:.0%} busy")
    else:
        parts.append(f"prompts take {decode.busy:.0%} of the steps")
    within = sum(step <= asked.tpot_s for step in decode.speed.steps)
    parts.append(f"{decode.batch:.0f} sequences decode in a worker; TPOT allows {within}, memory {decode.speed.most}")
    return "; ".join(parts)


def losers(found: Found, search: Search, asked: Question, shown: Sequence[Configuration]) -> list[tuple[str, str]]:
    """Every family that is not shown, with its price or what makes it impossible."""
    told = {family(one) for one in shown}
    least = min(one.cost for one in found.held)
    lines = [(one.what, one.why) for one in found.rejected]
    for one in found.held:
        if family(one) not in told:
            told.add(family(one))
            lines.append((str(one), f"{one.cost:g} an hour, {one.cost / least:.1f} times the cheapest; {because(one, asked)}"))
    return lines + list(impossible(search, asked, {one.decode.kind.device.name for one in found.held}))


def impossible(search: Search, asked: Question, holding: set[str]) -> Iterator[tuple[str, str]]:
    """Each kind of GPU that no configuration decodes on, and the term that forbids it."""
    by_device: dict[str, list[Speed]] = {}
    for speed in search.speeds:
        by_device.setdefault(speed.kind.device.name, []).append(speed)
    for name, speeds in by_device.items():
        if name not in holding:
            yield f"decode on {name}", _term(speeds, asked, "tpot") or "there are too few of them for this rate"


def terms(search: Search, asked: Question) -> list[str]:
    """What makes the objectives impossible, whatever the number of GPUs; empty: nothing but their number."""
    found = [_term(search.speeds, asked, name) for name in ("ttft", "tpot")] if search.speeds else []
    return [term for term in found if term]


def _term(speeds: Sequence[Speed], asked: Question, objective: str) -> str:
    """The term of the best of these workers, without any queue."""
    if all(speed.most < 1 for speed in speeds):
        roomy = max(speeds, key=lambda speed: speed.kv_room)
        return f"memory: KV of one sequence, {roomy.sequence_bytes / 1e9:.2f} GB, does not fit beside the weights on {roomy.kind}"
    if objective == "tpot":
        fastest = min(speeds, key=lambda speed: speed.steps[0])
        if (seconds := fastest.steps[0]) <= asked.tpot_s:
            return ""
        return (
            f"TPOT: a step of a single sequence takes {1000 * seconds:.3g} ms on {fastest.kind}, the fastest there is, most of it to read"
            f" the weights; at least tpot={1000 * seconds:.3g}ms, weights of fewer bits, or memory with more bandwidth"
        )
    fastest = min(speeds, key=lambda speed: sum(alone for alone, _ in speed.prompts))
    within = sum(alone <= asked.ttft_s for alone, _ in fastest.prompts) / len(fastest.prompts)
    if within >= asked.attainment:
        return ""
    ordered = sorted(alone for alone, _ in fastest.prompts)
    needed = ordered[min(len(ordered) - 1, int(asked.attainment * len(ordered)))]
    return (
        f"TTFT: {fastest.kind}, the fastest there is, computes only {within:.0%} of the prompts within {1000 * asked.ttft_s:.3g} ms even if"
        f" none waits, and {asked.attainment:.0%} within {1000 * needed:.3g} ms; that is the least ttft, or shorter prompts are needed"
    )


def needed(asked: Question, stocks: Sequence[Stock], weight_bits: Sequence[float], kv_bits: Sequence[float]) -> Configuration | None:
    """The cheapest configuration if there were more GPUs of these kinds; None: no number of them would do."""
    many = [replace(stock, count=stock.count * MORE) for stock in stocks]
    held = Search(asked, many, weight_bits, kv_bits).found().held
    return held[0] if held else None


def decisions(asked: Question, stocks: Sequence[Stock], found: Found, bits: tuple[Sequence[float], Sequence[float]]) -> list[Advice]:
    best = found.held[0]
    told = [_tensor(found, asked), _pipeline(best, stocks), _data(best)]
    if asked.shape.experts is not None:
        told.append(_experts(best, asked))
    told.append(_pools(found))
    if len(stocks) > 1:
        told.append(_unlike(found))
    told += [_bits(asked, stocks, best, bits, which) for which in ("weights", "KV")]
    return [*told, _tiers(best, asked)]


def _tensor(found: Found, asked: Question) -> Advice:
    best = found.held[0]
    degrees = [pool.kind.tensor for pool in best.pools]
    kind = best.decode.kind
    weights = asked.shape.parameters * kind.weight_bits / 8e9
    step = 1000 * best.decode.speed.steps[0]
    why = f"weights have {weights:.0f} GB and a GPU {kind.device.memory / 1e9:.0f}; a step of one sequence takes {step:.3g} ms"
    if max(degrees) == 1:
        return Advice("tensor parallelism", "none", f"{why}, so one GPU does")
    single = next((one for one in found.held if all(kind.gpus == 1 for kind in one.kinds)), None)
    alone = "do not hold the objectives" if single is None else f"would cost {single.cost:g} an hour"
    why = f"{why}; workers of one GPU {alone}"
    return Advice("tensor parallelism", " and ".join(f"{each} GPUs" for each in dict.fromkeys(degrees)) + ", inside a node", why)


def _pipeline(best: Configuration, stocks: Sequence[Stock]) -> Advice:
    stages = max(pool.kind.stages for pool in best.pools)
    if stages == 1:
        return Advice("pipeline parallelism", "none", "a worker fits into a node; stages add to every step what tensor ranks divide")
    node = max(stock.per_node for stock in stocks)
    over = any(pool.kind.gpus > node for pool in best.pools)
    why = "the weights need more than a node" if over else "its GPUs would share layers over slow links, or keep all KV each"
    return Advice("pipeline parallelism", f"{stages} stages" + (", over nodes" if over else ", inside a node"), why)


def _data(best: Configuration) -> Advice:
    counts = " and ".join(str(pool.workers) for pool in best.pools)
    if counts == "1":
        return Advice("data parallelism", "none", "one worker is enough, but nothing goes on while it starts again: two are safer")
    return Advice("data parallelism", f"{counts} workers", "each with all weights, on any node: the router spreads requests, none is split")


def _experts(best: Configuration, asked: Question) -> Advice:
    experts = asked.shape.experts
    assert experts is not None
    kind = best.decode.kind
    batch = max(1.0, best.decode.batch)
    read = 1 - (1 - experts.per_token / experts.number) ** batch
    told = f"{experts.per_token} of {experts.number} experts a token; a step of {batch:.0f} sequences reads {read:.0%} of them"
    if kind.tensor == 1:
        return Advice("expert parallelism", "none", f"a GPU, or stage, has its experts whole; {told}")
    if expert_parallel(kind, asked.shape):
        return Advice("expert parallelism", f"over the {kind.tensor} GPUs of a worker", f"many small experts: {told}")
    return Advice("expert parallelism", "none: each GPU has a part of every expert", f"few large experts: {told}")


def _pools(found: Found) -> Advice:
    one = next((each for each in found.held if each.prefill is None), None)
    two = next((each for each in found.held if each.prefill is not None), None)
    if one is None or two is None:
        held, other = (two, "colocated") if one is None else (one, "disaggregated")
        return Advice("one pool or two", "two" if one is None else "one", f"nothing {other} holds; this costs {held.cost if held else 0:g}")
    why = f"colocated {one.cost:g} an hour ({one.attainment:.1%} estimated), disaggregated {two.cost:g} ({two.attainment:.1%})"
    answer = "two: prefill and decode" if two is found.held[0] else "one: colocated"
    return Advice("one pool or two", answer, why)


def _unlike(found: Found) -> Advice:
    def unlike(one: Configuration) -> bool:
        return len({pool.kind.device.name for pool in one.pools}) > 1

    mixed = next((each for each in found.held if unlike(each)), None)
    alike = next((each for each in found.held if not unlike(each)), None)
    costs = [f"{name} {each.cost:g} an hour" for name, each in (("unlike", mixed), ("alike", alike)) if each]
    return Advice("unlike GPUs", "yes" if unlike(found.held[0]) else "no", ", ".join(costs))


def _bits(
    asked: Question, stocks: Sequence[Stock], best: Configuration, bits: tuple[Sequence[float], Sequence[float]], which: str
) -> Advice:
    """What 8 bits would save, where they are not allowed."""
    weights = which == "weights"
    kind = best.decode.kind
    now = kind.weight_bits if weights else kind.kv_bits
    flag = "--weight-bits 8" if weights else "--kv-bits 8"
    if any(each < 16 for each in bits[0 if weights else 1]):
        return Advice(f"bits of {which}", f"{now:g}", "the cheapest of those that were allowed")
    fewer = ([8.0], bits[1]) if weights else (bits[0], [KV_BITS[8]])
    held = Search(asked, stocks, *fewer).found().held
    if not held or held[0].cost >= best.cost - 1e-9:
        return Advice(f"bits of {which}", f"{now:g}", "8 would cost no less")
    saved = 1 - held[0].cost / best.cost
    return Advice(
        f"bits of {which}", f"{now:g}", f"8 would cost {held[0].cost:g}, {saved:.0%} less ({held[0]}); it changes outputs: {flag}"
    )


def _tiers(best: Configuration, asked: Question) -> Advice:
    traffic = asked.traffic
    if traffic.cached < 0.01:
        return Advice("tiers of KV", "none", "prompts share almost nothing")
    pool = best.pools[0]
    kept = traffic.distinct_tokens * pool.speed.kv_token_bytes
    room = pool.speed.kv_room * pool.kind.stages * pool.workers
    share = f"{traffic.cached:.0%} of the prompt tokens came before"
    why = f"{share}; all prompts have {kept / 1e9:.3g} GB of KV, and {room / 1e9:.3g} GB have room on the GPUs"
    if kept <= room / 2:
        return Advice("tiers of KV", "none", why)
    return Advice("tiers of KV", "worth a try: tiers.memory_mib, with Baton's own engine", why)
