"""The Grafana dashboard: `python scripts/dashboard.py` writes deploy/grafana/baton.json, `--check` only compares."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OUTPUT = Path(__file__).resolve().parent.parent / "deploy" / "grafana" / "baton.json"
COLUMNS, WIDTH, HEIGHT = 3, 8, 8
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
RATE = "$__rate_interval"


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    unit: str  # Grafana's name
    queries: tuple[tuple[str, str], ...]  # expression, legend
    kind: str = "timeseries"
    top: float | None = None  # of the axis
    stacked: bool = False


def quantiles(metric: str, *shares: float, by: str = "", where: str = "") -> tuple[tuple[str, str], ...]:
    """Quantiles of a histogram over all processes. `by` is a label to group by, `where` a selector without braces."""
    kept = ", ".join(filter(None, ["le", by]))
    legend = f"{{{{{by}}}}} " if by else ""
    return tuple(
        (f"histogram_quantile({share}, sum by ({kept}) (rate({metric}_bucket{{{where}}}[{RATE}])))", f"{legend}p{share * 100:g}")
        for share in shares
    )


def rate(metric: str, by: str, where: str = "") -> tuple[tuple[str, str], ...]:
    return ((f"sum by ({by}) (rate({metric}{{{where}}}[{RATE}]))", " ".join(f"{{{{{label.strip()}}}}}" for label in by.split(","))),)


ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Service",
        (
            Panel("Requests", "reqps", rate("baton_router_requests_total", "outcome"), stacked=True),
            Panel("Objectives met", "percentunit", (("baton_router_slo_attainment_ratio", "last requests"),), "gauge", 1.0),
            Panel("Objectives missed, by cause", "reqps", rate("baton_router_slo_missed_total", "cause"), stacked=True),
            Panel("Time to the first token", "s", quantiles("baton_router_time_to_first_token_seconds", 0.5, 0.9, 0.99)),
            Panel("Inter-token latency", "s", quantiles("baton_router_inter_token_latency_seconds", 0.5, 0.9, 0.99)),
            Panel("Duration", "s", quantiles("baton_router_request_duration_seconds", 0.5, 0.9, 0.99)),
            Panel("Stages, p90", "s", quantiles("baton_router_stage_duration_seconds", 0.9, by="stage")),
            Panel(
                "In flight and queued",
                "short",
                (("sum(baton_router_requests_in_flight)", "in flight"), ("sum(baton_router_requests_queued)", "queued")),
            ),
            Panel(
                "Tokens",
                "short",
                (
                    (f"sum(rate(baton_router_prompt_tokens_total[{RATE}]))", "prompt/s"),
                    (f"sum(rate(baton_router_cached_tokens_total[{RATE}]))", "prompt, cached/s"),
                    (f"sum(rate(baton_router_output_tokens_total[{RATE}]))", "output/s"),
                ),
            ),
        ),
    ),
    (
        "Prefill and decode",
        (
            Panel("Usable workers", "short", (("sum by (role) (baton_router_worker_usable)", "{{role}}"),)),
            Panel("Uncached tokens waiting", "short", (("baton_router_worker_waiting_tokens", "{{worker}}"),)),
            Panel("Credit", "short", (('baton_router_worker_credit_tokens{role="decode"}', "{{worker}}"),)),
            Panel("Choices", "ops", rate("baton_router_choices_total", "role, reason"), stacked=True),
            Panel("Bypasses", "ops", rate("baton_router_bypasses_total", "reason"), stacked=True),
            Panel(
                "Running and waiting",
                "short",
                (
                    ("sum by (role) (baton_engine_sequences_running)", "{{role}} running"),
                    ("sum by (role) (baton_engine_sequences_waiting)", "{{role}} waiting"),
                ),
            ),
            Panel("Step, p90", "s", quantiles("baton_engine_step_duration_seconds", 0.9, by="role")),
            Panel("Tokens per step, median", "short", quantiles("baton_engine_step_tokens", 0.5, by="role")),
            Panel("Computed tokens", "short", rate("baton_engine_computed_tokens_total", "role")),
        ),
    ),
    (
        "KV, leases, handoffs",
        (
            Panel("KV pool in use", "percentunit", (('baton_kv_usage_ratio{worker!=""}', "{{worker}}"),), top=1.0),
            Panel(
                "Prefix cache hit rate",
                "percentunit",
                (
                    (
                        f"sum by (role) (rate(baton_engine_prefix_hit_tokens_total[{RATE}]))"
                        f" / sum by (role) (rate(baton_engine_prefix_queried_tokens_total[{RATE}]))",
                        "{{role}}",
                    ),
                ),
                top=1.0,
            ),
            Panel("Blocks", "short", (("sum by (role, state) (baton_kv_blocks)", "{{role}} {{state}}"),), stacked=True),
            Panel("Tiers: seconds saved less spent, in ten minutes", "s", (("sum by (medium) (baton_tier_gain_seconds)", "{{medium}}"),)),
            Panel("Handoffs", "ops", rate("baton_handoffs_total", "transport, outcome"), stacked=True),
            Panel("Bytes moved", "Bps", rate("baton_handoff_read_bytes_sum", "transport")),
            Panel("Read, p90", "s", quantiles("baton_handoff_read_duration_seconds", 0.9, by="transport")),
            Panel("Leases", "ops", rate("baton_leases_total", "event")),
            Panel(
                "Leases held, blocks in quarantine",
                "short",
                (("baton_leases_held", "{{worker}} leases"), ("baton_kv_quarantined_blocks", "{{worker}} blocks")),
            ),
            Panel("Links from GPU to GPU, as probed", "Bps", (("baton_kv_link_rate_bytes", "{{worker}} {{transport}}"),)),
            Panel("Failed digests", "short", rate("baton_digests_failed_total", "worker")),
        ),
    ),
    (
        "GPUs",
        (
            Panel("Memory in use", "bytes", (('baton_gpu_memory_bytes{state="used"}', "{{worker}} GPU {{gpu}}"),)),
            Panel("Busy", "percentunit", (("baton_gpu_busy_ratio", "{{worker}} GPU {{gpu}}"),), top=1.0),
            Panel("Power", "watt", (("baton_gpu_power_watts", "{{worker}} GPU {{gpu}}"),)),
            Panel("Memory errors", "short", rate("baton_gpu_ecc_errors_total", "worker, gpu, kind")),
            Panel("Age of these numbers", "s", (("baton_gpu_sample_age_seconds", "{{worker}}"),)),
        ),
    ),
    (
        "Resilience",
        (
            Panel("Retries", "ops", rate("baton_router_retries_total", "reason"), stacked=True),
            Panel("Workers put aside", "short", (("max by (worker) (baton_router_worker_ejected)", "{{worker}}"),), top=1.0),
            Panel("Resumed streams", "ops", rate("baton_router_resumed_total", "instance")),
            Panel("Not answered", "reqps", rate("baton_router_requests_total", "reason", 'outcome=~"refused|failed"'), stacked=True),
            Panel("Preemptions", "ops", rate("baton_engine_preemptions_total", "worker")),
            Panel("Registry reachable", "short", (("baton_registry_reachable", "{{instance}}"),), top=1.0),
            Panel("CPU", "percentunit", ((f'rate(process_cpu_seconds_total{{job="baton"}}[{RATE}])', "{{instance}}"),)),
            Panel("Memory", "bytes", (('process_resident_memory_bytes{job="baton"}', "{{instance}}"),)),
        ),
    ),
)


def dashboard() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    y = 0
    for title, members in ROWS:
        panels.append({"type": "row", "title": title, "id": len(panels) + 1, "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}, "panels": []})
        y += 1
        for i, panel in enumerate(members):
            at = {"x": i % COLUMNS * WIDTH, "y": y + i // COLUMNS * HEIGHT, "w": WIDTH, "h": HEIGHT}
            panels.append({"id": len(panels) + 1, "gridPos": at, **_panel(panel)})
        y += -(-len(members) // COLUMNS) * HEIGHT
    source = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}
    return {
        "title": "Baton",
        "uid": "baton",
        "tags": ["baton"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [source]},
        "panels": panels,
    }


def _panel(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.top is not None:
        defaults["max"] = panel.top
    if panel.kind == "timeseries":
        stacking = {"mode": "normal" if panel.stacked else "none"}
        defaults["custom"] = {"fillOpacity": 20 if panel.stacked else 0, "showPoints": "never", "stacking": stacking}
    targets = [
        {"refId": chr(ord("A") + i), "datasource": SOURCE, "expr": expression, "legendFormat": legend}
        for i, (expression, legend) in enumerate(panel.queries)
    ]
    return {
        "type": panel.kind,
        "title": panel.title,
        "datasource": SOURCE,
        "targets": targets,
        "fieldConfig": {"defaults": defaults, "overrides": []},
    }


def main() -> None:
    text = json.dumps(dashboard(), indent=1) + "\n"
    if "--check" not in sys.argv[1:]:
        OUTPUT.write_text(text)
    elif OUTPUT.read_text() != text:
        sys.exit(f"{OUTPUT.name} is out of date; run `python scripts/dashboard.py`")


if __name__ == "__main__":
    main()
