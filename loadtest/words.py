"""Numbers and reasons in words, as sentences, tables and legends use them. Pure."""

from loadtest.estimate import Estimate
from loadtest.slo import Miss


def percent(share: float) -> str:
    return f"{100 * share:.3g} %" if share < 0.1 or share > 0.99 else f"{100 * share:.0f} %"


def with_interval(value: Estimate) -> str:
    if value.mean is None:
        return "none"
    if value.low is None or value.high is None:
        return f"{value.mean:.3g}"
    return f"{value.mean:.3g} ({value.low:.3g} to {value.high:.3g})"


def miss_text(miss: Miss) -> str:
    """The miss in words, for a legend or a sentence."""
    where = miss.where.replace("_", " ")
    match miss.what:
        case "ttft":
            return f"TTFT too long, mostly {where}"
        case "tpot" | "itl_p99":
            return f"{'TPOT' if miss.what == 'tpot' else 'ITL P99'} too long, from {where}"
        case "short":
            return "fewer tokens than asked for"
        case what:
            return f"{what}: {miss.where}"
