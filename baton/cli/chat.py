"""`baton chat`: a conversation in a terminal. Answers go to stdout, everything else to stderr, so that both can be piped.

Every turn sends the whole conversation. The part that the cluster still caches is not computed again, and the line under each answer says
how much that was. A turn that fails or is interrupted leaves the conversation unchanged.
"""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.text import Text

from baton.cli import view
from baton.cli.chat_tools import Toolbox
from baton.cli.interrupt import interruptible
from baton.client import Client, GenerateError, Result, Stream

COMMANDS = {
    "/new": "forget the conversation",
    "/trace": "draw the stages of the last answer",
    "/help": "show this list",
    "/quit": "quit (or Ctrl-D)",
}
PROMPT = "\nyou   "
MAX_ROUNDS = 8  # of calls, before the model must answer


@dataclass(slots=True)
class Conversation:
    """The turns so far. `ask` streams an answer and keeps the turn only if the answer is complete."""

    client: Client
    system: str | None = None
    sampling: dict[str, Any] = field(default_factory=dict)  # and timeout_s
    turns: list[dict[str, Any]] = field(default_factory=list)
    last: Result | None = None
    first_token_s: float = 0.0
    tools: Toolbox | None = None
    told: Callable[[str], None] = lambda call: None  # of each call and its result

    def ask(self, text: str) -> Iterator[str]:
        """Yields pieces of the answer. The calls that the model makes are run, until it makes no more. Raises GenerateError,
        KeyboardInterrupt, and ValueError for text that no message can hold."""
        new: list[dict[str, Any]] = [{"role": "user", "content": text}]
        asked = time.monotonic()
        first = None
        for left in range(MAX_ROUNDS, -1, -1):
            with self._generate(new, may_call=left > 0) as stream, interruptible(stream):
                for piece in stream.texts():
                    first = first or time.monotonic()
                    yield piece
                result = stream.result
            new.append({"role": "assistant", "content": result.text})
            if self.tools is None or not result.tool_calls:
                break
            calls = [{"id": call.id, "name": call.name, "arguments": call.arguments} for call in result.tool_calls]
            new[-1]["tool_calls"] = calls
            for call in calls:
                outcome = self.tools.run(call["name"], call["arguments"])
                self.told(f"{call['name']}({call['arguments']}) → {outcome}")
                new.append({"role": "tool", "tool_call_id": call["id"], "content": outcome})
        self.last, self.first_token_s = result, (first or time.monotonic()) - asked
        self.turns += new

    def _generate(self, new: list[dict[str, Any]], may_call: bool) -> Stream:
        begin = [{"role": "system", "content": self.system}] if self.system else []
        tools: dict[str, Any] = {}
        if self.tools is not None:
            tools = {"tools": self.tools.definitions, "tool_choice": "auto" if may_call else "none"}
        return self.client.generate(messages=[*begin, *self.turns, *new], **tools, **self.sampling)

    def forget(self) -> None:
        self.turns.clear()
        self.last = None


def talk(conversation: Conversation, out: Console, err: Console) -> None:
    """Runs until the end of stdin, or /quit."""
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401 - adds editing and history to `input`

        err.print("[dim]/help lists the commands, Ctrl-C interrupts an answer, Ctrl-D quits[/]")
    while (line := _read(interactive)) is not None:
        text = line.strip()
        if text == "/quit":
            return
        if text.startswith("/"):
            _command(text, conversation, err)
        elif text:
            _answer(text, conversation, out, err, interactive)


def _read(interactive: bool) -> str | None:
    """One line; None at the end."""
    try:
        return input(PROMPT if interactive else "")
    except (EOFError, KeyboardInterrupt):
        if interactive:
            print(file=sys.stderr)
        return None


def _answer(text: str, conversation: Conversation, out: Console, err: Console, interactive: bool) -> None:
    try:
        if interactive:
            err.print("[bold]model[/] ", end="")
        for piece in conversation.ask(text):
            out.file.write(piece)
            out.file.flush()
        out.file.write("\n")
        assert conversation.last is not None
        err.print(told(conversation.last, conversation.first_token_s), soft_wrap=True)
    except KeyboardInterrupt:
        err.print("\n[yellow]interrupted; the conversation is unchanged[/]")
    except (GenerateError, ValueError) as error:
        out.file.write("\n")
        if not interactive:
            raise
        hint = " (/new begins a new conversation)" if getattr(error, "reason", "") == "CONTEXT_LENGTH" else ""
        err.print(Text(f"{error}{hint}", style="red"), soft_wrap=True)


def _command(text: str, conversation: Conversation, err: Console) -> None:
    if text == "/new":
        conversation.forget()
        err.print("[dim]the conversation is forgotten[/]")
    elif text == "/trace" and conversation.last:
        err.print(view.trace(conversation.last))
    elif text == "/trace":
        err.print("[dim]there is no answer yet[/]")
    else:
        if text != "/help":
            err.print(Text(f"{text} is not a command", style="red"))
        for name, what in COMMANDS.items():
            err.print(f"{name:<8}[dim]{what}[/]")


def told(result: Result, first_token_s: float) -> Text:
    """What a turn cost, in one line."""
    usage = result.usage
    way = result.workers["decode"]
    if prefill := result.workers["prefill"]:
        moved = view.size(result.handoff["bytes"]) if result.handoff["bytes"] else "nothing to move"
        way = f"{prefill} → {moved} → {way}"
    share = usage.cached_tokens / max(1, usage.prompt_tokens)
    return Text(
        f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens cached ({share:.0%}) · {usage.completion_tokens} out"
        f" · first after {1000 * first_token_s:.0f} ms · {way}",
        style="dim",
    )
