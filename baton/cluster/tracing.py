"""Makes the tracer for a configuration: one that records nothing, or one of the OpenTelemetry SDK."""

from baton.cluster import semconv
from baton.cluster.config import ConfigError, TelemetryConfig
from baton.cluster.telemetry import Tracer


def make_tracer(config: TelemetryConfig, cluster: str, role: str, process: str) -> Tracer:
    """Raises ConfigError if an endpoint is set and OpenTelemetry is not installed."""
    if config.otlp_endpoint is None:
        return Tracer()
    try:
        from baton.cluster.otel import OtelTracer, otlp
    except ImportError as error:
        raise ConfigError(f"telemetry.otlp_endpoint: traces need OpenTelemetry, pip install 'baton-llm[otel]' ({error})") from None
    resource = {
        semconv.SERVICE_NAME: f"baton-{role}",
        semconv.SERVICE_NAMESPACE: cluster,
        semconv.SERVICE_INSTANCE: process,
    }
    return OtelTracer(otlp(config.otlp_endpoint), resource, config.trace_sample_ratio)
