"""What a worker that starts says of itself."""

import asyncio
import logging
import os
import subprocess
import sys
import time
from typing import Any

import pytest

from baton.cluster.records import StartRecord
from baton.engine.core.progress import Step, tell, told_to
from baton.simulate.memory_registry import MemoryRegistry
from baton.worker.starting import Starting, processor_s


async def test_each_step_is_in_the_registry_and_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    registry = MemoryRegistry()
    starting = Starting("decode-0", "decode", 7, registry, 0.05)
    for step in (Step("compiling kernels", 1, 24), Step("compiling kernels", 2, 24), Step("loading weights", 3, 38, "tensors")):
        starting.tell(step)
    running = asyncio.create_task(starting.run())
    async with asyncio.timeout(20):
        while not (found := await registry.starts()):
            await asyncio.sleep(0.01)
    [record] = found
    assert (record.step, record.done, record.total, record.unit) == ("loading weights", 3, 38, "tensors") and record.cpu_s > 0
    assert isinstance(record, StartRecord) and record.pid == os.getpid()
    await starting.leave()
    assert await registry.starts() == []
    async with asyncio.timeout(20):
        await running
    assert caplog.messages == ["compiling kernels: 1 of 24", "loading weights: 3 of 38 tensors"], "few lines"


async def test_the_record_is_written_again_and_again_until_the_worker_serves() -> None:
    """It expires, and a start without a record counts as one that has no progress."""
    registry, joins = MemoryRegistry(), list[StartRecord]()
    join = registry.join

    async def counted(record: Any) -> None:
        joins.append(record)
        await join(record)

    registry.join = counted  # type: ignore[method-assign]
    starting = Starting("decode-0", "decode", 7, registry, 0.01)
    running = asyncio.create_task(starting.run())
    async with asyncio.timeout(20):
        while len(joins) < 4 and not running.done():
            await asyncio.sleep(0.005)
        assert len(joins) >= 4, "also while it is at the same step"
        starting.tell(Step("loading weights", 3, 38, "tensors"))
        while (await registry.starts())[0].done != 3 and not running.done():
            await asyncio.sleep(0.005)
        assert (await registry.starts())[0].step == "loading weights"
        await starting.leave()
        await running
    told = len(joins)
    await asyncio.sleep(0.03)
    assert len(joins) == told and await registry.starts() == []


def test_only_who_listens_is_told() -> None:
    seen: list[Step] = []
    tell(Step("unheard"))
    with told_to(seen.append):
        tell(Step("heard", 1, 2, "MiB"))
    tell(Step("unheard"))
    assert [str(step) for step in seen] == ["heard: 1 of 2 MiB"]


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_the_processor_time_of_children_counts() -> None:
    """An engine may load its model in a process of its own."""
    burn = "import time\nwhile time.process_time() < 0.5: pass\nprint('done', flush=True)\ninput()"
    before = processor_s(os.getpid()) - time.process_time()
    with subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "done\n"
        assert processor_s(os.getpid()) - time.process_time() - before > 0.4, "it still runs"
        assert processor_s(child.pid) > 0.4
        child.communicate("\n")
    assert processor_s(os.getpid()) - time.process_time() - before > 0.4, "it has ended"
