"""What is kept beside the requests is what a walk over them finds, and is forgotten with them."""

import random

from fake_workers import record

from router.ledger import Ledger, Task


def test_the_sums_are_those_of_the_requests() -> None:
    draws, ledger, there = random.Random(3), Ledger(), dict[str, tuple[str, Task]]()
    for step in range(3000):
        request = f"r{draws.randrange(40)}"
        if draws.random() < 0.6:
            task = Task(draws.randrange(1, 3), draws.randrange(1, 500), step // 100)
            worker = draws.choice(["d0", "d1"])
            ledger.start(request, worker, task)
            there[request] = worker, task
        else:
            ledger.end(request)
            there.pop(request, None)
        for name in ("d0", "d1", "gone"):
            for process in (1, 2):
                on = [task for worker, task in there.values() if worker == name and task.incarnation == process]
                told = record(name, incarnation=process)
                assert ledger.count(told) == len(on)
                for since in (0, step // 100, step // 100 - 3):
                    assert ledger.tokens(told, since) == sum(task.tokens for task in on if task.since >= since)
    for request in list(there):
        ledger.end(request)
    assert not (ledger._sums or ledger._tasks or ledger._places)


def test_a_choice_looks_at_no_request() -> None:
    """A thousand requests that began in the same epoch are one sum."""
    ledger = Ledger()
    for number in range(1000):
        ledger.start(str(number), "d0", Task(1, 10, 7))
    assert len(ledger._sums["d0"]) == 1 and ledger.tokens(record("d0")) == 10_000 and ledger.count(record("d0")) == 1000
