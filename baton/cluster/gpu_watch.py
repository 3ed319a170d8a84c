"""What a worker's GPUs do, for its metrics and its record: memory, use, power, errors, every few seconds.

A driver can hang for minutes, so only a thread of its own asks it. A scrape takes what was last told; `age` says how old that is.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from baton.cluster.gpus import Device, NoNvml, find, known, session, visible
from baton.cluster.records import GpuRecord

PERIOD_S = 5.0
STALE_S = 30.0  # after so long without an answer of the driver, a record says nothing
ECC = ("corrected", "uncorrected")  # in the order of NVML's nvmlMemoryErrorType_t
SINCE_THE_DRIVER_LOADED = 0  # NVML_VOLATILE_ECC
OPEN: tuple[str, ...] = ()  # see `baton.cluster.metrics`
log = logging.getLogger(__name__)

Values = dict[str | tuple[str, ...], int | float]


@dataclass(frozen=True, slots=True)
class GpuFact:
    """A metric of a worker that has GPUs; one that a GPU or the driver does not tell is not there."""

    name: str
    kind: Literal["counter", "gauge"]
    unit: str
    help: str
    labels: Mapping[str, tuple[str, ...]]
    of: Callable[["Sample"], Mapping[tuple[str, ...], int | float | None]]  # by the values of the labels after `gpu`


@dataclass(frozen=True, slots=True)
class Sample:
    """None: it is not told."""

    gpu: str
    name: str = ""
    memory: Mapping[tuple[str, ...], int] = field(default_factory=dict)  # state → bytes
    busy: float | None = None
    watts: float | None = None
    errors: Mapping[tuple[str, ...], int | None] = field(default_factory=dict)  # kind → count


FACTS = (
    GpuFact(
        "baton_gpu_memory_bytes", "gauge", "bytes", "Memory of a GPU that the worker uses, by all processes on it.",
        {"gpu": OPEN, "state": ("used", "free")}, lambda sample: sample.memory,
    ),
    GpuFact(
        "baton_gpu_busy_ratio", "gauge", "ratio", "Share of the last moments in which some kernel ran on the GPU.",
        {"gpu": OPEN}, lambda sample: {(): sample.busy},
    ),
    GpuFact("baton_gpu_power_watts", "gauge", "watts", "What the GPU draws.", {"gpu": OPEN}, lambda sample: {(): sample.watts}),
    GpuFact(
        "baton_gpu_ecc_errors_total", "counter", "errors", "Errors of the GPU's memory since its driver was loaded.",
        {"gpu": OPEN, "kind": ECC}, lambda sample: sample.errors,
    ),
)  # fmt: skip
AGE = "baton_gpu_sample_age_seconds"


class GpuWatch:
    def __init__(self, env: Mapping[str, str] = os.environ, nvml: Any = None, period_s: float = PERIOD_S) -> None:
        """`env`: which GPUs (CUDA_VISIBLE_DEVICES); `nvml`: a module like `pynvml`, if not that one."""
        self._env, self._nvml, self._period_s = env, nvml, period_s
        self._told: tuple[float, Sequence[Sample]] | None = None  # replaced, never changed
        self._stop = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, name="gpu watch", daemon=True).start()

    def stop(self) -> None:
        """Returns at once: nobody can interrupt a driver that hangs."""
        self._stop.set()

    def read(self, fact: GpuFact) -> Values:
        """Values by label values; empty before the first sample, and where there is no GPU."""
        samples = self._told[1] if self._told else ()
        return {(sample.gpu, *key): value for sample in samples for key, value in fact.of(sample).items() if value is not None}

    def records(self) -> tuple[GpuRecord, ...]:
        """Empty before the first sample, where there is no GPU, and while the driver does not answer."""
        told = self._told
        if told is None or time.monotonic() - told[0] > STALE_S:
            return ()
        return tuple(map(recorded, told[1]))

    def age(self) -> Values:
        """Seconds since the driver last answered."""
        return {(): time.monotonic() - self._told[0]} if self._told else {}

    def _run(self) -> None:
        try:
            devices = visible(find(self._nvml), self._env)
        except ValueError as error:  # the worker itself says so, and ends
            log.debug("no GPU metrics: %s", error)
            return
        while devices and not self._stop.is_set():
            try:
                with session(self._nvml) as nvml:
                    while not self._stop.is_set():
                        self._told = time.monotonic(), [sample(nvml, device) for device in devices]
                        self._stop.wait(self._period_s)
            except NoNvml as error:
                log.warning("no news of the GPUs: %s", error)
                self._stop.wait(self._period_s * 12)


def sample(nvml: Any, device: Device) -> Sample:
    """Raises an error of NVML if the device cannot be asked at all."""
    handle = nvml.nvmlDeviceGetHandleByUUID(device.token)
    memory = known(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    use = known(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
    draws = known(nvml, nvml.nvmlDeviceGetPowerUsage, handle)
    return Sample(
        device.token if device.part else str(device.gpu),
        device.kind,
        {("used",): memory.used, ("free",): memory.total - memory.used} if memory else {},
        use and use.gpu / 100,
        draws and draws / 1000,
        {
            (kind,): known(nvml, nvml.nvmlDeviceGetTotalEccErrors, handle, number, SINCE_THE_DRIVER_LOADED)
            for number, kind in enumerate(ECC)
        },
    )


def recorded(sample: Sample) -> GpuRecord:
    used, free = (sample.memory.get((state,), 0) for state in ("used", "free"))
    corrected, uncorrected = (sample.errors.get((kind,)) for kind in ECC)
    return GpuRecord(sample.gpu, sample.name, used, used + free, sample.busy, sample.watts, corrected, uncorrected)
