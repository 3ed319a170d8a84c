"""One named child process: it is started, watched, restarted and drained. The local and the Ray launcher use this class.

    event →      start     end       retry     ask        gone
    idle         running
    running                backoff             stopping
    backoff                          running   stopping
    stopping                                              exited

`end`: the process ended by itself, or could not be started; `retry`: the wait is over; `ask`: `stop` was called; `gone`: nothing is left of
the process. Exits are polled: that needs no SIGCHLD, no thread per child and no particular event loop, and a poll takes a few microseconds.
"""

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Literal

from baton.clock import loop_time
from baton.cluster import log_file, pulse
from baton.launch.launcher import ProcessState, RestartRule, Restarts, State, Template, Watchdog
from baton.moves import Moves

POLL_S = 0.1
WITNESS_S = 1.5  # from SIGUSR2 to SIGKILL, for a process that hangs
HURRIED_S = 3.0  # from a second SIGTERM to SIGKILL
KILLED_S = 5.0  # how long we wait for a process to disappear after SIGKILL (it may hang in a driver)
LEASH = Path(__file__).with_name("leash.py")

Life = Literal["idle", State]
MOVES: Moves[Life] = Moves(
    {
        ("idle", "start"): "running",
        ("running", "end"): "backoff",
        ("running", "ask"): "stopping",
        ("backoff", "retry"): "running",
        ("backoff", "ask"): "stopping",
        ("stopping", "gone"): "exited",
    }
)

logger = logging.getLogger(__name__)


def move(state: Life, event: str) -> Life:
    return MOVES.after(state, event, "the child")


def leashed(*command: str, cores: str = "") -> list[str]:
    """The command line of a process that cannot outlive this one; `cores` and the bounds of that: see `leash.py`."""
    return [sys.executable, "-I", "-S", str(LEASH), str(os.getpid()), cores, *command]


class Child:
    """The process leads its own session and process group: a Ctrl-C in the terminal does not reach it, and its descendants can be killed
    with it."""

    def __init__(
        self,
        name: str,
        template: Template,
        rule: RestartRule,
        env: Mapping[str, str],
        node: str,
        log_dir: Path | None = None,
        cwd: str | None = None,
    ) -> None:
        """`env`: the environment that the process inherits; the template's is added to it. With `log_dir`, the process writes to NAME.log
        there, otherwise to our own output."""
        self._name = name
        self._template = template
        self._restarts = Restarts(rule)
        self._node = node
        self._log = log_dir and log_dir.absolute() / f"{name}.log"
        self._env = {**env, **template.env_of(name), **({log_file.VARIABLE: str(self._log)} if self._log else {})}
        self._cwd = cwd
        self._process: subprocess.Popen[bytes] | None = None
        self._pulses: int | None = None  # read end of the pipe that the process writes its pulses into
        self._hang_s = rule.hang_s
        self._last_exit: int | None = None
        self._state: Life = "idle"
        self._asked = asyncio.Event()
        self._hurried = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Must be called on the event loop's thread; when that thread ends, the child is killed."""
        self._move("start")
        self._spawn()
        self._task = asyncio.create_task(self._supervise(), name=f"supervise {self._name}")

    async def state(self) -> ProcessState:
        pid = self._process.pid if self._process else None
        state: State = "exited" if self._state == "idle" else self._state
        return ProcessState(self._name, self._template.role, pid, state, self._restarts.count, self._last_exit, self._node)

    async def stop(self) -> ProcessState:
        """`ProcessKeeper.stop`. May be called again, and may be cancelled: the draining goes on."""
        if not self._asked.is_set() and self._state != "idle":
            self._move("ask")
        self._asked.set()
        if self._task is not None:
            await asyncio.shield(self._task)
        return await self.state()

    async def hurry(self) -> None:
        """`ProcessKeeper.hurry`."""
        self._hurried.set()

    async def _supervise(self) -> None:
        try:
            while True:
                await self._run_ended()
                if not self._asked.is_set():
                    self._move("end")
                    await _either(self._asked, self._restarts.exited(loop_time()))
                if self._asked.is_set():
                    self._move("gone")
                    return
                self._move("retry")
                self._spawn()
        finally:
            self._kill()  # the event loop is ending, and the supervision with it

    def _move(self, event: str) -> None:
        self._state = move(self._state, event)

    def _spawn(self) -> None:
        self._restarts.started(loop_time())
        cores = ",".join(map(str, self._template.cores_of(self._name)))
        command = leashed(*self._template.argv, cores=cores)
        try:
            self._pulses, ours = os.pipe()
            os.set_blocking(self._pulses, False)
            os.set_blocking(ours, False)
            try:
                with open(self._log, "ab") if self._log else nullcontext() as log:
                    self._process = subprocess.Popen(
                        command,
                        env={**self._env, pulse.VARIABLE: str(ours)},
                        cwd=self._cwd,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                        pass_fds=(ours,),
                    )
            finally:
                os.close(ours)
        except OSError as error:  # no memory, too many processes, no log: treated like an immediate exit
            logger.error("%s: cannot be started: %s", self._name, error)
            self._process = None
            self._close_pulses()

    async def _run_ended(self) -> None:
        """Returns when the process is gone, by itself or because `stop` was called."""
        process = self._process
        if process is None:
            return
        hangs = await self._hangs(process)
        if hangs:
            await _testified(process)
        if process.poll() is None and not hangs:
            process.terminate()
            if not await gone(process, self._template.grace_s, self._hurried) and self._hurried.is_set():
                process.terminate()  # a second SIGTERM: our processes then end immediately, but in order
                await gone(process, HURRIED_S)
        self._kill()
        if await gone(process, KILLED_S):
            self._last_exit = process.returncode
        else:
            logger.error("%s: pid %d is still there %.0f s after SIGKILL", self._name, process.pid, KILLED_S)
        self._process = None
        self._close_pulses()
        log = logger.info if self._asked.is_set() else logger.warning
        log("%s: pid %d ended with status %s", self._name, process.pid, self._last_exit)

    async def _hangs(self, process: "subprocess.Popen[bytes]") -> bool:
        """Returns False when the process has ended or has to end, True when it hangs."""
        watchdog = Watchdog(self._hang_s, loop_time())
        while process.poll() is None and not self._asked.is_set():
            await _either(self._asked, POLL_S)
            said = pulse.read(self._pulses) if self._pulses is not None else None
            if why := watchdog.look(loop_time(), said):
                logger.error("%s: pid %d is killed: %s", self._name, process.pid, why)
                return True
        return False

    def _close_pulses(self) -> None:
        if self._pulses is not None:
            os.close(self._pulses)
            self._pulses = None

    def _kill(self) -> None:
        """Kills the process and what it started: the group outlives its leader."""
        if self._process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)


async def _testified(process: "subprocess.Popen[bytes]") -> None:
    """Lets a process that hangs write down what it did (`baton.cluster.witness`), as far as it can."""
    if hasattr(signal, "SIGUSR2"):
        process.send_signal(signal.SIGUSR2)
        await gone(process, WITNESS_S)


async def _either(event: asyncio.Event, seconds: float) -> None:
    """Returns when the event is set or the time is over."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


async def gone(process: subprocess.Popen[bytes], timeout_s: float, unless: asyncio.Event | None = None) -> bool:
    """Whether the process ended in time, and before `unless` was set."""
    unless = unless or asyncio.Event()
    deadline = loop_time() + timeout_s
    while process.poll() is None:
        if loop_time() >= deadline or unless.is_set():
            return False
        await _either(unless, min(POLL_S, max(deadline - loop_time(), 0)))
    return True
