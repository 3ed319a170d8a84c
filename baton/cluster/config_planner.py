"""The section of the configuration that says what the planner may do."""

from typing import Self

from pydantic import Field, model_validator

from baton.section import Section


class PlannerConfig(Section):
    enabled: bool = Field(default=False, description="Let `baton up` run a planner, which sizes the pools and changes what workers serve.")
    dry_run: bool = Field(default=False, description="Decide and explain, and change nothing.")
    profile: str | None = Field(
        default=None, min_length=1, description="File of the profile (`baton profile`) by which the planner judges; it needs one."
    )
    interval_s: int = Field(
        default=15, ge=5, le=600, multiple_of=5, description="Time between two looks, and of load counted together, seconds."
    )
    period_s: float = Field(
        default=86400.0, ge=0, le=31536000, description="Time in which load repeats, for the forecast, seconds; 0: none."
    )
    least_prefill: int = Field(
        default=1,
        ge=0,
        le=1024,
        description="Workers that always serve prefill. 0: where that takes fewer, decode workers compute all prompts.",
    )
    most_prefill: int = Field(default=8, ge=0, le=1024, description="Most workers that serve prefill.")
    least_decode: int = Field(default=1, ge=1, le=1024, description="Workers that always serve decode.")
    most_decode: int = Field(default=8, ge=1, le=1024, description="Most workers that serve decode.")
    budget: int = Field(default=8, ge=1, le=2048, description="Workers of both pools at one time, with those that start or drain.")
    spares: int = Field(
        default=0, ge=0, le=1024, description="Workers of each role kept beyond what load needs, while the budget has room for both roles'."
    )
    target: float = Field(default=0.95, gt=0.5, lt=1, description="Share of requests that should meet each objective of the slo section.")
    flips: bool = Field(default=True, description="Let running workers change their role. false where the pools have unlike devices.")
    margin: float = Field(
        default=0.15,
        ge=0,
        le=2,
        description="A pool shrinks only if it could then serve so much more than was forecast half of hold_s, as a share.",
    )
    cooldown_s: float = Field(default=30.0, ge=0, le=3600, description="Shortest time from the end of one change to the next, seconds.")
    hold_s: float = Field(
        default=300.0,
        ge=0,
        le=86400,
        description="How long a worker must not have been needed before it goes (up to four times that if the last ones were missed), and "
        "how long a flip is not taken back, seconds.",
    )
    start_timeout_s: float = Field(
        default=600.0,
        ge=1,
        le=86400,
        description="How long asked-for workers may take to join; after that, the wish is taken back, seconds.",
    )
    flip_timeout_s: float = Field(default=60.0, ge=1, le=3600, description="The same for a worker that changes its role, seconds.")
    cold_s: float = Field(
        default=15.0, ge=0, le=3600, description="How long a new worker is cold: nothing is learned from that time, seconds."
    )
    stale_s: float = Field(default=40.0, ge=1, le=3600, description="With figures older than this nothing is changed, seconds.")
    lease_s: float = Field(
        default=15.0, ge=2, le=600, description="How long a planner that has died still leads; others wait for that, seconds."
    )
    release: str | None = Field(
        default=None,
        pattern=r"^[a-z0-9-]+/[a-z0-9.-]+$",
        description="NAMESPACE/RELEASE of the chart whose Deployments are the pools. Not set: `baton up` keeps their sizes.",
    )
    keep: int = Field(default=200, ge=1, le=10_000, description="How many decisions and outcomes Redis keeps for `baton planner --why`.")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        for role in ("prefill", "decode"):
            least, most = getattr(self, f"least_{role}"), getattr(self, f"most_{role}")
            if least > most:
                raise ValueError(f"least_{role} ({least}) must not exceed most_{role} ({most})")
        if self.least_prefill + self.least_decode > self.budget:
            raise ValueError(f"budget ({self.budget}) must have room for least_prefill and least_decode")
        if self.stale_s < self.interval_s + 10:
            raise ValueError(f"stale_s ({self.stale_s:g}) must be at least interval_s and 10 s")
        return self
