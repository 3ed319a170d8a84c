"""The load test's report of a simulated cluster: a campaign whose title, arm and machine say that nothing of it was measured."""

from dataclasses import asdict

from baton.predict.predict import TIMEOUT_S, Offer, Prediction, predict
from baton.predict.setting import ClusterSetting
from baton.profile.file import Profile
from loadtest.campaign import Arm, Campaign, Probe, this_machine
from loadtest.plan import TRACE, Note, Plan
from loadtest.plan import Workload as Load
from loadtest.window import Window

ARM = "simulated"


def offer_of(
    load: Load, rate: float, seed: int, window: Window, timeout_s: float = TIMEOUT_S, note: Note = lambda line: None
) -> tuple[Offer, dict[str, int]]:
    """What the load test would send, and how many requests were left out, by reason. Raises WorkloadError and ValueError."""
    items, skipped = load.items(rate, seed, note)
    times = [at for at, _ in zip(load.times(rate, seed, items), items, strict=False)]
    return Offer(items, times, window, timeout_s), dict(skipped)


def simulate(
    plan: Plan, setting: ClusterSetting, profile: Profile, rate: float, draws: int, large: bool = False
) -> tuple[Campaign, Prediction]:
    """One run for each seed of the plan; the first also with other profiles, for the intervals. `large`: see `SimulatedCluster`. Raises
    WorkloadError and ValueError."""
    probes, skipped, first = [], dict[str, int](), None
    for seed in plan.seeds:
        offer, left = offer_of(plan.workload, rate, seed, plan.window, plan.timeout_s, plan.note)
        skipped |= left
        told = predict(setting, profile, offer, plan.slo, draws if first is None else 0, large=large)
        first = first or told
        probes.append(Probe(ARM, rate, seed, told.run.records, told.run.due, offer.window.duration_s, partial=told.run.partial))
    assert first is not None  # a plan has seeds
    at = "at its own times" if plan.workload.arrivals == TRACE else f"at {rate:g} requests/s"
    title = f"SIMULATED, not measured: {profile.model} on {profile.processor}, {at}, by a profile ({profile.source})"
    topology = {name: str(value) for name, value in asdict(setting.sizes).items()}
    asked = {name: getattr(plan.workload, name) for name in Load.__slots__}
    machine = {**this_machine(), "simulated": True, "profile": f"{profile.source}, commit {profile.commit or 'unknown'}, {profile.when}"}
    campaign = Campaign(
        " ".join(filter(None, (first.warning, title))), plan.slo, plan.warm_up_s, plan.cool_down_s,
        (Arm(ARM, topology, "in virtual time: every figure is simulated"),), tuple(probes), asked, {}, machine, skipped, "", {},
    )  # fmt: skip
    return campaign, first


def intervals(told: Prediction) -> list[tuple[str, str, str]]:
    """Figure, value, 90 % interval."""
    return [(name, f"{each.value:.4g}", f"{each.low:.4g} … {each.high:.4g}") for name, each in told.figures.items()]
