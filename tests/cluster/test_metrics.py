"""The metric table follows its own rules, a book never grows beyond the table, and other files refer to it correctly."""

import json
import math
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from each import for_each

from baton.cluster.metric_table import ALL, BY_NAME, MAX_OPEN, OPEN, OTHER, PLANNER, ROUTER, TABLE, Alias, Metric, Role
from baton.cluster.metrics import Book, Histogram, MetricFamily, Series
from router import choosing, policy

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
UNITS = {
    "1", "attempts", "blocks", "bytes", "changes", "choices", "entries", "errors", "handoffs", "hints", "leases", "ratio", "requests",
    "requests per second", "seconds", "sequences", "spans", "times", "tokens", "watts", "workers",
}  # fmt: skip
OF_A_CLIENT = {"request", "request_id", "prompt", "user", "tenant", "session", "salt", "path", "query", "address", "ip"}


def family(book: Book, name: str) -> MetricFamily:
    return next(family for family in book.families() if family.name == name)


def values(book: Book, name: str) -> dict[tuple[str, ...], float]:
    return {tuple(series.labels.values()): series.value for series in family(book, name).series}


class TestTable:
    @for_each(TABLE, lambda metric: metric.name)
    def test_a_metric_follows_the_naming_rules(self, metric: Metric) -> None:
        assert re.fullmatch(r"baton_[a-z0-9_]+[a-z0-9]", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert metric.unit in UNITS
        if metric.unit in ("seconds", "bytes", "ratio", "tokens"):
            assert metric.unit in metric.name.removesuffix("_total").rsplit("_", 1)[-1], "the unit is the last word"
        assert metric.help.endswith(".") and metric.roles and (set(metric.roles) <= set(ALL) or metric.roles == PLANNER)
        assert bool(metric.buckets) == (metric.kind == "histogram")
        assert all(low < high for low, high in pairwise(metric.buckets)) and math.inf not in metric.buckets

    @for_each(TABLE, lambda metric: metric.name)
    def test_no_label_grows_with_the_load(self, metric: Metric) -> None:
        assert not set(metric.labels) & OF_A_CLIENT
        known = math.prod(len(allowed) for allowed in metric.labels.values() if allowed is not OPEN)
        assert known * (MAX_OPEN if OPEN in metric.labels.values() else 1) <= 1024
        assert not {"worker", "role"} & set(metric.labels) or metric.roles in (ROUTER, PLANNER), (
            "a worker's metrics have these labels already"
        )
        for allowed in metric.labels.values():
            assert OTHER not in allowed and len(set(allowed)) == len(allowed)

    def test_names_and_aliases_are_unique(self) -> None:
        assert len(BY_NAME) == len(TABLE)
        for role in ALL:
            names = [alias.name for metric in TABLE if role in metric.roles for alias in metric.aliases]
            assert len(set(names)) == len(names) and not set(names) & set(BY_NAME)

    @for_each([(metric, alias) for metric in TABLE for alias in metric.aliases], lambda pair: pair[1].name)
    def test_an_alias_uses_existing_labels_and_values(self, pair: tuple[Metric, Alias]) -> None:
        metric, alias = pair
        assert set(alias.labels) | set(alias.only) == set(metric.labels), "dropping a label would merge two series"
        assert not set(alias.labels) & set(alias.only)
        assert all(value in metric.labels[label] for label, value in alias.only.items())
        assert alias.name.endswith("_total") == (metric.kind == "counter")

    @pytest.mark.parametrize("role", ALL)
    def test_every_role_has_the_metrics_that_the_inference_extension_scrapes(self, role: Role) -> None:
        found = {alias.name: (metric, alias) for metric in TABLE if role in metric.roles for alias in metric.aliases}
        for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
            assert found[name][0].kind == "gauge"
        assert set(found["vllm:cache_config_info"][1].labels.values()) == {"block_size", "num_gpu_blocks"}

    def test_the_values_of_reason_labels_occur_in_the_router(self) -> None:
        source = Path(policy.__file__).read_text() + Path(choosing.__file__).read_text()
        for name, label in (("baton_router_choices_total", "reason"), ("baton_router_bypasses_total", "reason")):
            for value in BY_NAME[name].labels[label]:
                assert f'"{value}"' in source


class TestBook:
    def test_every_counter_starts_at_zero(self) -> None:
        book = Book("router")
        retries = book.counters("baton_router_retries_total")
        assert set(values(book, "baton_router_retries_total").values()) == {0}
        retries["WORKER_LOST"].inc()
        retries["WORKER_LOST"].inc(2)
        assert values(book, "baton_router_retries_total")[("WORKER_LOST",)] == 3

    def test_a_label_value_outside_the_table_is_counted_as_other(self) -> None:
        book = Book("router")
        retries, requests = book.counters("baton_router_retries_total"), book.counters("baton_router_requests_total")
        before = len(retries)
        for i in range(1000):
            retries[f"made up {i}"].inc()
            requests["ok", f"made up {i}"].inc()
        assert values(book, "baton_router_retries_total")[(OTHER,)] == 1000 and len(retries) == before + 1
        assert values(book, "baton_router_requests_total") == {("ok", OTHER): 1000}

    def test_open_labels_are_bounded(self) -> None:
        book = Book("router")
        told = {(f"decode-{i}", "decode"): 1 for i in range(MAX_OPEN + 500)}
        book.read("baton_router_worker_credit_tokens", lambda: told)
        found = values(book, "baton_router_worker_credit_tokens")
        assert len(found) == MAX_OPEN + 1 and found[OTHER, "decode"] == 500 and found["decode-0", "decode"] == 1

    def test_the_wrong_number_of_labels_is_an_error(self) -> None:
        with pytest.raises(ValueError, match="labels"):
            Book("router").counters("baton_router_requests_total")["ok"].inc()

    @pytest.mark.parametrize(
        ("role", "kind", "name"),
        [
            ("router", "counter", "baton_nothing_total"),
            ("router", "counter", "baton_engine_preemptions_total"),
            ("router", "counter", "baton_leases_total"),
            ("router", "histogram", "baton_router_prompt_tokens_total"),
            ("router", "counter", "baton_router_requests_in_flight"),
        ],
    )
    def test_a_book_refuses_a_metric_that_does_not_fit_the_table(self, role: Role, kind: str, name: str) -> None:
        with pytest.raises(KeyError):
            getattr(Book(role), kind)(name)

    def test_a_book_refuses_to_create_a_metric_twice(self) -> None:
        book = Book("router")
        book.counter("baton_router_prompt_tokens_total")
        with pytest.raises(KeyError):
            book.counter("baton_router_prompt_tokens_total")
        with pytest.raises(KeyError):
            book.read("baton_router_prompt_tokens_total", lambda: 1)

    def test_a_reader_is_called_only_at_a_scrape(self) -> None:
        book, asked = Book("router"), []

        def inflight() -> int:
            asked.append(1)
            return len(asked)

        book.read("baton_router_requests_in_flight", inflight)
        assert not asked
        assert values(book, "baton_router_requests_in_flight") == {(): 1}
        assert values(book, "baton_router_requests_in_flight") == {(): 2}

    def test_a_reader_without_values_adds_no_series(self) -> None:
        book = Book("router")
        book.read("baton_router_slo_attainment_ratio", lambda: {})
        assert not list(book.families())

    def test_worker_metrics_have_worker_labels_and_aliases_have_those_of_vllm(self) -> None:
        book = Book("decode", "decode-3", "tale")
        book.read("baton_engine_sequences_running", lambda: 7)
        ours, theirs = book.families()
        assert ours.series == (Series({"worker": "decode-3", "role": "decode"}, 7),)
        assert theirs.name == "vllm:num_requests_running"
        assert theirs.series == (Series({"model_name": "tale", "engine": "0"}, 7),)

    def test_an_alias_shows_only_its_own_series(self) -> None:
        book = Book("router", model="tale")
        requests = book.counters("baton_router_requests_total")
        requests["ok", "stop"].inc(3)
        requests["failed", "INTERNAL"].inc(5)
        theirs = family(book, "vllm:request_success_total")
        assert theirs.series == (Series({"model_name": "tale", "engine": "0", "finished_reason": "stop"}, 3),)


class TestHistogram:
    def test_a_value_on_a_bound_falls_into_the_lower_bucket(self) -> None:
        histogram = Histogram((1.0, 2.0))
        histogram.observe_all([0.5, 1.0, 1.5, 2.0, 2.5])
        assert histogram.counts == [2, 2, 1] and histogram.sum == 7.5

    def test_histogram_buckets_are_cumulative_in_a_scrape(self) -> None:
        book = Book("router")
        ttft = book.histogram("baton_router_time_to_first_token_seconds")
        ttft.observe_all([0.0005, 0.3, 0.3, 99.0])
        told = family(book, "baton_router_time_to_first_token_seconds").series[0]
        assert told.buckets[0] == 1 and told.buckets[-1] == 4 and told.buckets[-2] == 3
        assert list(told.buckets) == sorted(told.buckets) and told.value == pytest.approx(99.6005)


# References in other files

GENERATED = ["metric_table", "dashboard", "cli_table", "benchmark_tables", "rooms_picture", "rooms_page", "api_fields"]


@pytest.mark.parametrize("script", GENERATED)
def test_generated_files_are_current(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [f"{script}.py", "--check"])
    import_module(script).main()  # exits with what is out of date


def names_in(expression: str) -> set[str]:
    """Returns the Baton and vLLM metrics in a PromQL expression, without histogram suffixes."""
    found = set(re.findall(r"\b(?:baton_|vllm:)\w+", expression))
    return {re.sub(r"_(bucket|sum|count)$", "", name) if name not in KNOWN else name for name in found}


KNOWN = set(BY_NAME) | {alias.name for metric in TABLE for alias in metric.aliases}


def expressions() -> Iterator[tuple[str, str]]:
    for panel in json.loads((DEPLOY / "grafana" / "baton.json").read_text())["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for rule in rules():
        yield rule["alert"], rule["expr"]


def rules() -> list[dict[str, str]]:
    groups = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


@for_each(expressions(), lambda each: f"{each[0]}: {each[1]}")
def test_dashboard_and_alerts_use_existing_metrics_and_labels(each: tuple[str, str]) -> None:
    _, expression = each
    names = names_in(expression)
    assert names <= KNOWN and (names or "process_" in expression or "up{" in expression)
    for name, selector in re.findall(r"(baton_\w+)\{([^}]*)\}", expression):
        metric = BY_NAME[next(iter(names_in(name)))]
        for label, value in re.findall(r'(\w+)[!=~]+"([^"]*)"', selector):
            if label in metric.labels and metric.labels[label] is not OPEN:
                assert set(value.split("|")) <= set(metric.labels[label]), f"{label}={value}"
            else:
                assert label in metric.labels or label in ("worker", "role", "job", "instance")


def test_an_unknown_metric_would_be_noticed() -> None:
    """Negative control."""
    assert names_in("rate(baton_router_request_total[5m])") - KNOWN
    assert names_in("sum(rate(baton_router_time_to_first_token_seconds_bucket[5m]))") <= KNOWN


@for_each(rules(), lambda rule: rule["alert"])
def test_every_alert_has_a_runbook_section(rule: dict[str, dict[str, str]]) -> None:
    page, _, anchor = rule["annotations"]["runbook"].partition("#")
    assert anchor == str(rule["alert"]).lower()
    assert f"\n### {rule['alert']}\n" in (ROOT / page).read_text()
    assert rule["labels"]["severity"] in ("critical", "warning", "info") and rule["annotations"]["summary"]
