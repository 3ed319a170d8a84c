"""The `baton` command as a script sees it: results on stdout, everything else on stderr, no colour in a pipe, and an exit status that says
whether the command failed (1) or was invalid (2)."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import yaml
from grpc_status import rpc_status
from rich.console import Console
from typer.testing import CliRunner

from baton.access.access import Endpoint, find
from baton.access.options import ClientIdentity, ClusterOptions
from baton.cli import doctor, view
from baton.cli.doctor import Finding
from baton.cli.main import CHAT_TEMPERATURE, app
from baton.cluster.config import Config
from baton.cluster.config_layers import MASK, keys, load
from baton.cluster.errors import BatonError, Reason, Violation
from baton.cluster.records import TierRecord
from baton.cluster.rpc import to_status
from baton.engine.core.sampling import NUMBERS
from baton.launch.state import ClusterState, born
from baton.models.make_small import make_toy
from baton.v1 import generation_pb2 as pb
from baton.v1 import generation_pb2_grpc, worker_pb2, worker_pb2_grpc

TEXT = ("Once ", "upon\n", "", "[bold]a[/] tïme", "\x1b[2J")  # text that a model may produce
HELD_BACK = " 🙂"
ADDRESSES: list[tuple[Endpoint, str]] = [("grpc", "localhost"), ("admin", "http://localhost/"), ("http", "https://localhost")]
FREE_PORTS = ("--router.port", "0", "--router.admin-port", "0", "--router.http-port", "0", "--router.page-port", "0")
STATUS: dict[str, Any] = {
    "endpoints": {"grpc": "127.0.0.1:1", "admin": "127.0.0.1:2"},
    "model": "[red]small",
    "router": {"pid": 1, "inflight": 2, "queued": 3, "registry": "away", "alarm": ""},
    "workers": [],
    "routers": [],
    "starts": [],
    "planner": None,
}


class Answers(generation_pb2_grpc.GenerationServicer, worker_pb2_grpc.AdminServicer):
    """A fake router: it gives the same answer to every prompt, except to prompts that request a failure."""

    def __init__(self) -> None:
        self.asked: list[pb.GenerateRequest] = []
        self.cancelled = threading.Event()
        self.left = threading.Event()  # by a reader of a log

    def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        self.asked.append(request)
        if request.text == "refuse":
            error = BatonError(Reason.INVALID_FIELD, "max_tokens: must be at least 1", (Violation("max_tokens", "must be at least 1"),))
            context.abort_with_status(rpc_status.to_status(to_status(error)))
        if request.text == "hang":  # before the first token: once a client has read one it may cancel, and then no more code runs here
            context.add_callback(self.cancelled.set)
        yield pb.GenerateResponse(accepted=pb.Accepted(request_id="r"))
        for i, text in enumerate(TEXT):
            yield pb.GenerateResponse(tokens=pb.Tokens(tokens=[pb.Token(index=i, id=i + 5, text=text)]))
            if request.text == "break" and i == 1:
                context.abort_with_status(rpc_status.to_status(to_status(BatonError(Reason.RETRIES_SPENT, "no worker came back"))))
        if request.text == "hang":
            self.cancelled.wait(30)
        yield pb.GenerateResponse(
            finished=pb.Finished(
                reason=pb.FINISH_REASON_LENGTH,
                text=HELD_BACK,
                request_id="r",
                usage=pb.Usage(prompt_tokens=7, completion_tokens=len(TEXT)),
                stages=pb.StageTimes(queue_ms=1, prefill_ms=20, transfer_ms=3, decode_ms=40),
                workers=pb.Workers(prefill="prefill-0", decode="decode-0"),
                handoff=pb.Handoff(transport="nixl", blocks=3, bytes=4096, digests_checked=3),
            )
        )

    def Logs(self, request: worker_pb2.AdminLogsRequest, context: grpc.ServicerContext) -> Iterator[worker_pb2.LogsResponse]:
        assert (request.name, request.lines) == ("decode-0", 7)
        if request.follow:
            context.add_callback(self.left.set)
        yield worker_pb2.LogsResponse(text="zwei drÃ".encode("latin-1"))
        yield worker_pb2.LogsResponse(text=b"\xa9i\n")
        if request.follow:
            self.left.wait(30)

    def Status(self, request: worker_pb2.StatusRequest, context: grpc.ServicerContext) -> worker_pb2.StatusResponse:
        return worker_pb2.StatusResponse(**STATUS)


@pytest.fixture(scope="module")
def router() -> Iterator[tuple[str, Answers]]:
    answers, server = Answers(), grpc.server(ThreadPoolExecutor(8))
    generation_pb2_grpc.add_GenerationServicer_to_server(answers, server)
    worker_pb2_grpc.add_AdminServicer_to_server(answers, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}", answers
    server.stop(None)


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
    return {**clean, "BATON_STATE_DIR": str(tmp_path / "state")}


def start(env: dict[str, str], *arguments: str, **kwargs: Any) -> subprocess.Popen[str]:
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **kwargs}
    return subprocess.Popen([sys.executable, "-m", "baton", *arguments], env=env, text=True, encoding="utf-8", **pipes)


def baton(env: dict[str, str], *arguments: str, text: str | None = None, within_s: float = 60) -> tuple[int, str, str]:
    """Returns exit status, stdout and stderr, and checks that they contain no colour and no traceback."""
    process = start(env, *arguments, stdin=subprocess.PIPE)
    try:
        out, err = process.communicate(text or "", timeout=within_s)
    finally:
        process.kill()
    assert "\x1b" not in out.replace(TEXT[-1], "") + err and "Traceback" not in err
    return process.returncode, out, err


def invoke(env: dict[str, str], *arguments: str, text: str | None = None) -> tuple[int, str, str]:
    """The same without a separate process, which takes a second: one of each kind is enough."""
    variables: dict[str, str | None] = {name: None for name in os.environ if name.startswith("BATON_")}
    told = CliRunner(env={**variables, **env}).invoke(app, arguments, input=text)
    assert told.exception is None or isinstance(told.exception, SystemExit), told.exception
    assert "\x1b" not in told.stdout.replace(TEXT[-1], "") + told.stderr
    return told.exit_code, told.stdout, told.stderr


# --- generate and status -------------------------------------------------------------------------------------------------------------


def test_generate_prints_only_the_text_to_stdout(env: dict[str, str], router: tuple[str, Answers]) -> None:
    rc, out, err = baton(env, "generate", "tell me", "--address", router[0])
    assert (rc, out, err) == (0, "".join(TEXT) + HELD_BACK + "\n", "")


def test_generate_prints_the_trace_to_stderr(env: dict[str, str], router: tuple[str, Answers]) -> None:
    rc, out, err = invoke(env, "generate", "tell me", "--trace", "--address", router[0])
    assert (rc, out) == (0, "".join(TEXT) + HELD_BACK + "\n")
    assert all(word in err for word in ("queue", "prefill-0", "nixl: 3 blocks, 4.0 KiB", "decode-0", "64.0 ms"))


def test_generate_json_is_one_object_on_one_line(env: dict[str, str], router: tuple[str, Answers]) -> None:
    rc, out, err = invoke(env, "generate", "-", "--json", "--seed", "5", "--stop", "x", "--address", router[0], text="from a pipe")
    assert (rc, err, out.count("\n")) == (0, "", 1)
    told = json.loads(out)
    assert told["text"] == "".join(TEXT) + HELD_BACK and told["token_ids"] == [5, 6, 7, 8, 9]
    asked = router[1].asked[-1]
    assert asked.text == "from a pipe" and asked.sampling.seed == 5 and list(asked.sampling.stop) == ["x"]
    assert not asked.sampling.HasField("temperature"), "parameters that were not set are left to the router"


@pytest.mark.parametrize("verb", ["generate", "chat"])
def test_every_number_of_the_sampler_has_a_flag(env: dict[str, str], router: tuple[str, Answers], verb: str) -> None:
    """Name, help text and range of the flag come from the declaration in `baton.engine.core.sampling`."""
    values = {name: number.range.high for name, number in NUMBERS.items()}
    flags = [text for name, value in values.items() for text in (f"--{name.replace('_', '-')}", f"{value:.10g}")]
    prompt = ("tell me",) if verb == "generate" else ()
    assert invoke(env, verb, *prompt, *flags, "--address", router[0], text="tell me\n")[0] == 0
    sampling = router[1].asked[-1].sampling
    assert {name: getattr(sampling, name) for name in values} == pytest.approx(values)
    shown = " ".join(invoke(env, verb, "--help")[1].replace("│", " ").split())
    assert all(f"--{name.replace('_', '-')}" in shown for name in values)
    assert "0 is greedy. At least 0 and at most 100." in shown


def test_chat_has_its_own_default_temperature(env: dict[str, str], router: tuple[str, Answers]) -> None:
    assert baton(env, "chat", "--address", router[0], text="tell me\n")[0] == 0
    sampling = router[1].asked[-1].sampling
    assert sampling.temperature == CHAT_TEMPERATURE and not sampling.HasField("top_p")


def test_the_chat_flag_sends_the_prompt_as_a_message(env: dict[str, str], router: tuple[str, Answers]) -> None:
    assert invoke(env, "generate", "hello", "--chat", "--address", router[0])[0] == 0
    assert [(m.role, m.content) for m in router[1].asked[-1].chat.messages] == [("user", "hello")]


def test_a_refusal_is_one_line_on_stderr(env: dict[str, str], router: tuple[str, Answers]) -> None:
    rc, out, err = invoke(env, "generate", "refuse", "--json", "--address", router[0])
    assert (rc, out, err) == (1, "", "baton: INVALID_FIELD: max_tokens: must be at least 1\n")


def test_a_broken_stream_fails_after_its_text_was_printed(env: dict[str, str], router: tuple[str, Answers]) -> None:
    rc, out, err = invoke(env, "generate", "break", "--address", router[0])
    assert (rc, out, err) == (1, "Once upon\n", "baton: RETRIES_SPENT: no worker came back\n")


def test_an_unreachable_router_is_a_failure(env: dict[str, str]) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        for verb in (("generate", "x"), ("status",)):
            rc, out, err = invoke(env, *verb, "--address", address)
            assert (rc, out) == (1, "") and err.startswith("baton: UNAVAILABLE: ") and err.count("\n") == 1


def test_ctrl_c_cancels_the_request(env: dict[str, str], router: tuple[str, Answers]) -> None:
    process = start(env, "generate", "hang", "--address", router[0], start_new_session=True)
    assert process.stdout is not None and process.stdout.readline() == "Once upon\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130 and "Traceback" not in err
    assert router[1].cancelled.wait(10), "the router saw no cancellation"


def test_ctrl_c_ends_the_reading_of_a_log(env: dict[str, str], router: tuple[str, Answers]) -> None:
    arguments = ("logs", "decode-0", "--lines", "7", "--address", router[0])
    assert baton(env, *arguments) == (0, "zwei dréi\n", ""), "a piece may end within a character"
    process = start(env, *arguments, "--follow", start_new_session=True)
    assert process.stdout is not None and process.stdout.readline() == "zwei dréi\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "")
    assert router[1].left.wait(10), "the router saw no cancellation"


def test_a_closed_stdout_causes_no_message(env: dict[str, str], router: tuple[str, Answers]) -> None:
    read, write = os.pipe()
    os.close(read)
    process = start(env, "generate", "tell me", "--address", router[0], stdout=write)
    os.close(write)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (1, "")


@pytest.mark.parametrize("flags", [("--seed", "-1"), ("--max-tokens", "99999999999")])
def test_a_number_out_of_range_is_refused(env: dict[str, str], flags: tuple[str, ...]) -> None:
    rc, out, err = invoke(env, "generate", "x", *flags, "--address", "127.0.0.1:1")
    assert (rc, out) == (2, "") and "out of range" in err


def test_status_accepts_the_admin_address(env: dict[str, str], router: tuple[str, Answers]) -> None:
    rc, out, err = baton(env, "status", "--json", "--address", router[0])
    assert (rc, err) == (0, "") and json.loads(out) == STATUS and list(json.loads(out)["endpoints"]) == ["admin", "grpc"]
    rc, out, err = invoke(env, "status", "--address", router[0])
    assert (rc, err) == (0, "") and "[red]small" in out and "registry away" in out and "2 in flight" in out


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("127.0.0.1:99999", "'99999' is not a port"),
        ("127.0.0.1:x", "'x' is not a port"),
        (":1", "names no host"),
        ("ftp://a:1", "without ftp://"),
    ],
)
def test_an_address_that_cannot_be_one_is_refused(env: dict[str, str], address: str, said: str) -> None:
    for command in (("status",), ("generate", "x")):
        rc, out, err = invoke(env, *command, "--address", address)
        assert (rc, out) == (2, "") and said in err


def test_the_small_questions_have_answers(env: dict[str, str]) -> None:
    rc, out, err = invoke(env, "--version")
    assert (rc, err) == (0, "") and re.fullmatch(r"baton \d+\.\d+\.\d+\S*\n", out)
    rc, out, err = invoke(env, "config", "keys")
    assert (rc, err) == (0, "") and all(f"--{key.flag}" in out if key.flag else key.env in out for key in keys())
    rc, out, err = invoke(env, "up", "--help")
    assert rc == 0 and "config keys" in out
    rc, out, err = invoke(env, "status")
    assert rc == 1 and env["BATON_STATE_DIR"] in err and "(BATON_STATE_DIR) knows none" in err


def test_an_address_without_a_port_gets_that_of_the_door(env: dict[str, str]) -> None:
    place = {endpoint: find(endpoint, ClusterOptions(address=address), ClientIdentity(), env).address for endpoint, address in ADDRESSES}
    assert place == {"grpc": "localhost:8470", "admin": "localhost:8471", "http": "localhost:8000"}


@pytest.mark.parametrize("command", [("status",), ("status", "--json"), ("generate", "x"), ("generate", "x", "--trace"), ("top", "--once")])
def test_a_terminal_that_is_not_utf_8_gets_no_traceback(env: dict[str, str], router: tuple[str, Answers], command: tuple[str, ...]) -> None:
    rc, out, err = baton({**env, "PYTHONIOENCODING": "ascii"}, *command, "--address", router[0])
    assert out.isascii() and err.isascii() and rc == (1 if command[0] == "top" else 0)  # this router has no `Live`
    assert "UnicodeEncodeError" not in err


# --- invalid command lines -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("up", "--engine.blok-size", "8"), "engine.blok-size: no such key; did you mean engine.block_size?"),
        (("up", "--engin.blok-size", "8"), "engin.blok-size: no such key; did you mean engine.block_size?"),
        (("up", "--engine.nope", "8"), "engine.nope: no such key\n"),
        (("doctor", "--block-size=8"), "did you mean"),
        (("config", "print", "--router.prot", "1"), "did you mean router.port?"),
        (("config", "print", "--engine.block-size"), "a value is missing"),
        (("config", "print", "--engine.block-size", "zero"), "engine.block_size = 'zero' (flag --engine.block-size)"),
        (("up", "8470"), "argument '8470': expected"),
        (("up", "--cluster.key", "0123456789abcdef"), "use BATON_CLUSTER_KEY or a file"),
        (("up", "--config", "nowhere.yaml"), "nowhere.yaml: cannot be read"),
        (("up", "--launcher", "pigeon"), "launcher.kind = 'pigeon'"),
        (("up", "--launcher", "kubernetes"), "`baton up` starts nothing there: `helm install"),
        (("up", "--join", "127.0.0.1:1", "--launcher.kind", "kubernetes"), "`helm install"),
        (("up", "--name", "a/b"), "cluster.name = 'a/b'"),
        (("down", "--kubernetes", "models/r"), "`helm -n models uninstall r` ends it"),
        (("status", "--kubernetes", "r"), "NAMESPACE/RELEASE"),
        (("status", "--kubernetes", "models/r", "--address", "127.0.0.1:1"), "--address"),
        (("logs", "x", "--kubernetes", "models/r", "--name", "baton"), "--name"),
        (("trace", "--last", "--context", "home"), "--kubernetes"),
        (("trace", "req-1", "--sort", "total"), "name one request, or --last, or options of the list"),
        (("trace", "--last", "req-1"), "name one request, or --last"),
        (("trace", "--limit", "0"), "--limit"),
        (("generate",), "Missing argument"),
        (("generate", "x", "--max-tokes", "3"), "--max-tokens"),
        (("scale", "--decode", "0"), "--decode"),
        (("serve",), "No such command"),
    ],
)
def test_an_invalid_command_line_exits_with_status_2(env: dict[str, str], arguments: tuple[str, ...], said: str) -> None:
    rc, out, err = invoke(env, *arguments)
    assert (rc, out) == (2, "") and said in err


@pytest.mark.parametrize("arguments", [("status",), ("generate", "x"), ("scale", "--decode", "2"), ("logs", "r-baton-decode-1")])
def test_without_a_kubeconfig_the_error_says_so(env: dict[str, str], tmp_path: Path, arguments: tuple[str, ...]) -> None:
    rc, out, err = invoke({**env, "KUBECONFIG": str(tmp_path / "none")}, *arguments, "--kubernetes", "models/r")
    assert (rc, out) == (2, "") and "kubeconfig: there is none" in err


def test_an_api_server_that_does_not_answer_is_named_at_once(env: dict[str, str], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    cluster = {"name": "c", "cluster": {"server": f"https://127.0.0.1:{port}"}}
    context = {"name": "here", "context": {"cluster": "c", "user": "u"}}
    user = {"name": "u", "user": {"token": "x"}}
    file = tmp_path / "kubeconfig"
    file.write_text(yaml.safe_dump({"current-context": "here", "clusters": [cluster], "contexts": [context], "users": [user]}))
    began = time.monotonic()
    rc, out, err = invoke({**env, "KUBECONFIG": str(file)}, "status", "--kubernetes", "models/r")
    assert (rc, out) == (1, "") and f"UNREACHABLE: the API server https://127.0.0.1:{port} does not answer" in err
    assert time.monotonic() - began < 30
    rc, out, err = invoke({**env, "KUBECONFIG": str(file)}, "status", "--kubernetes", "models/r", "--context", "there")
    assert (rc, out) == (2, "") and "kubeconfig" in err and "there" in err


def test_a_refusal_in_a_pipe_has_no_colour(env: dict[str, str]) -> None:
    for arguments in (("up", "--engine.blok-size", "8"), ("generate", "x", "--max-tokes", "3")):
        rc, out, err = baton(env, *arguments)
        assert (rc, out) == (2, "") and err


def test_an_unknown_variable_is_refused(env: dict[str, str]) -> None:
    rc, out, err = invoke({**env, "BATON_ENGINE_BLOK_SIZE": "8"}, "config", "print")
    assert (rc, out) == (2, "") and "BATON_ENGINE_BLOK_SIZE" in err and "BATON_ENGINE_BLOCK_SIZE?" in err


def test_a_long_message_stays_on_one_line(env: dict[str, str]) -> None:
    rc, _, err = invoke(env, "config", "print", "--config", f"/{'folder/' * 40}nowhere.yaml")
    assert rc == 2 and err.count("\n") == 1 and len(err) > 280


@pytest.mark.parametrize("arguments", [("down",), ("scale", "--prefill", "2"), ("status",), ("generate", "x")])
def test_without_a_cluster_the_error_suggests_baton_up(env: dict[str, str], arguments: tuple[str, ...]) -> None:
    rc, out, err = invoke(env, *arguments)
    assert (rc, out) == (1, "") and "`baton up`" in err


# --- config --------------------------------------------------------------------------------------------------------------------------


def test_config_print_shows_the_tree_with_its_sources(env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("router: {admin_port: 9000}\nprefill: {cores: [0, 1]}\n")
    extra = {"BATON_ENGINE_MAX_NUM_SEQS": "7", "BATON_CLUSTER_KEY": "0123456789abcdef", "BATON_REDIS_URL": "redis://:secret@host:1/0"}
    rc, out, err = baton({**env, **extra}, "config", "print", "--config", str(tmp_path / "a.yaml"), "--engine.block-size", "8")
    assert (rc, err) == (0, "")
    lines = {line.split(":")[0].strip(): line for line in out.splitlines() if line.startswith("  ")}
    assert re.search(r"8 +# flag --engine.block-size$", lines["block_size"])
    assert re.search(r"7 +# env BATON_ENGINE_MAX_NUM_SEQS$", lines["max_num_seqs"])
    assert re.search(rf"9000 +# file {tmp_path}/a.yaml$", lines["admin_port"])
    assert re.search(r"null +# auto: 0.25, of a CPU's free memory$", lines["kv_memory_fraction"])
    assert re.search(r"null +# auto: 512, on a CPU$", lines["max_num_batched_tokens"])
    assert re.search(r"auto +# auto: float32, on a CPU$", lines["dtype"])
    assert re.search(r"continuous +# default$", lines["batching"])
    assert "secret" not in out and "0123456789abcdef" not in out and out.count(MASK) == 2
    tree = yaml.safe_load(out)
    assert tree["router"]["admin_port"] == 9000 and tree["prefill"]["cores"] == [0, 1]


def test_config_print_says_what_a_gpu_would_get(env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"torch_dtype": "float16"}')
    asked = ("--engine.device", "cuda", "--model.path", str(tmp_path), "--model.dtype", "auto", "--engine.attention-backend", "flash_attn")
    _, out, _ = invoke(env, "config", "print", *asked)
    lines = {line.split(":")[0].strip(): line.partition(" # ")[2] for line in out.splitlines() if line.startswith("  ")}
    assert lines["dtype"] == "flag --model.dtype; auto: float16, as the checkpoint"
    assert lines["block_size"] == "auto: 256, flash_attn needs it"
    assert lines["max_num_batched_tokens"] == "auto: 2048, on a GPU; 8192 from 64 GiB on"
    _, out, _ = invoke(env, "config", "print", *asked[:2], "--engine.kind", "vllm")
    assert re.search(r"block_size: null +# auto: vLLM decides$", out, re.MULTILINE)


def test_the_output_of_config_print_loads_as_the_same_configuration(env: dict[str, str], tmp_path: Path) -> None:
    rc, out, _ = invoke(env, "config", "print", "--kv.transport", "tcp")
    assert rc == 0
    (tmp_path / "again.yaml").write_text(out)
    assert load([tmp_path / "again.yaml"], {}).config == load(env={}, flags={"kv.transport": "tcp"}).config != Config()


def test_config_json_masks_the_same_secrets_as_the_text(env: dict[str, str]) -> None:
    secrets = {"BATON_CLUSTER_KEY": "0123456789abcdef", "BATON_REDIS_URL": "redis://:secret@host:1/0"}
    rc, out, err = invoke({**env, **secrets}, "config", "print", "--json", "--engine.block-size", "8")
    assert (rc, err, out.count("\n")) == (0, "", 1)
    assert json.loads(out)["engine"]["block_size"] == 8 and json.loads(out)["redis"]["url"] == f"redis://:{MASK}@host:1/0"
    assert "secret" not in out and "0123456789abcdef" not in out


def test_config_schema_describes_every_key(env: dict[str, str]) -> None:
    rc, out, err = invoke(env, "config", "schema")
    assert (rc, err) == (0, "")
    schema = json.loads(out)
    for key in keys():
        section, leaf = key.name.split(".")
        fields = schema["$defs"][schema["properties"][section]["$ref"].rpartition("/")[2]]["properties"]
        assert fields[leaf]["description"] == key.description


# --- up ------------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.mark.parametrize("detach", [(), ("--detach",)])
def test_the_error_for_a_taken_port_names_the_flag(env: dict[str, str], tmp_path: Path, taken: int, detach: tuple[str, ...]) -> None:
    rc, out, err = baton(env, "up", *detach, "--model", str(tmp_path), "--router.port", str(taken))
    assert (rc, out) == (1, "") and f"127.0.0.1:{taken}" in err and "--router.port" in err


def test_a_cluster_that_cannot_start_says_why_and_leaves_no_state(env: dict[str, str], tmp_path: Path) -> None:
    make_toy(tmp_path / "toy")
    (tmp_path / "toy" / "config.json").write_text("{")
    began = time.monotonic()
    rc, out, err = baton(env, "up", "--model", str(tmp_path / "toy"), *FREE_PORTS)
    unreadable = re.compile(r"config\.json:? cannot be read")  # the router reads it, too, and may be the first to end
    assert (rc, out) == (1, "") and "does not start" in err and unreadable.search(err)
    assert time.monotonic() - began < 45 and not list((tmp_path / "state").glob("*.json"))
    said = [len(unreadable.findall(path.read_text())) for path in (tmp_path / "state").glob("*-logs/*.log")]
    assert max(said) == 1, "it was not tried again"


@pytest.mark.parametrize("detach", [(), ("--detach",)])
def test_a_missing_model_starts_no_process(env: dict[str, str], tmp_path: Path, detach: tuple[str, ...]) -> None:
    rc, out, err = invoke(env, "up", *detach, "--model", str(tmp_path / "nowhere"), *FREE_PORTS)
    assert (rc, out, err) == (1, "", f"baton: model.path: there is no folder {tmp_path / 'nowhere'}\n")
    assert not list((tmp_path / "state").glob("*log*")), "no process was started"


def test_the_error_for_an_unreachable_redis_is_one_line(env: dict[str, str], tmp_path: Path) -> None:
    make_toy(tmp_path / "toy")
    rc, out, err = baton(env, "up", "--model", str(tmp_path / "toy"), *FREE_PORTS, "--redis.url", "redis://127.0.0.1:1/0")
    assert (rc, out) == (1, "") and err.splitlines()[-1].startswith("baton: down: Redis: ")


def running(env: dict[str, str], name: str) -> str:
    """Records this process as the supervisor of a cluster."""
    folder = Path(env["BATON_STATE_DIR"])
    folder.mkdir(exist_ok=True)
    known = ClusterState(name, os.getpid(), {"grpc": "127.0.0.1:1"}, "redis://127.0.0.1:1/0", "", born(os.getpid()))
    (folder / f"{name}.json").write_text(json.dumps(asdict(known)))
    return name


def test_errors_name_the_running_cluster(env: dict[str, str]) -> None:
    running(env, "other")
    rc, _, err = invoke(env, "status")
    assert rc == 1 and "no cluster 'baton' is running here; running: other" in err
    rc, _, err = invoke(env, "up", "--name", "other", *FREE_PORTS)
    assert rc == 1 and "`baton down --name other` stops it" in err


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopping_a_cluster_before_it_is_ready_is_a_failure(
    env: dict[str, str], tmp_path: Path, number: signal.Signals, status: int
) -> None:
    make_toy(tmp_path / "toy")
    process = start(env, "up", "--model", str(tmp_path / "toy"), *FREE_PORTS)
    assert process.stderr is not None and "0 of 2 workers ready" in process.stderr.readline()
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (status, "") and "Traceback" not in err


# --- doctor --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="nixl has no wheel elsewhere")
def test_doctor_checks_everything_and_measures_the_transports(env: dict[str, str]) -> None:
    rc, out, err = baton(env, "doctor", "--json", *FREE_PORTS, within_s=170)
    assert (rc, err, out.count("\n")) == (0, "", 1)
    findings = {finding["subject"]: finding for finding in json.loads(out)}
    assert set(findings) == {"python", "memory", "nixl", "tcp", "rdma", "redis", "ray", "ports", "gpus", "torch", "products"}
    for kind in ("nixl", "tcp"):
        assert findings[kind]["verdict"] == "ok"
        rate = re.match(r"([\d.]+) GB/s between two processes, \d+% of a plain copy; ", findings[kind]["detail"])
        assert rate and float(rate[1]) > 0
    assert "UCX" in findings["nixl"]["detail"] and findings["nixl"]["detail"].endswith("(in use)")


def test_doctor_compares_the_bytes_that_a_transport_delivers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a transport that delivers other bytes is a failure and has no rate."""
    wrong = doctor.CONTENT.copy()
    wrong[17, 5] ^= 1
    assert not np.array_equal(wrong, doctor.CONTENT)
    monkeypatch.setattr(doctor, "CONTENT", wrong)
    with pytest.raises(RuntimeError, match="not the bytes that were sent"):
        doctor._measure("tcp", Config())


def test_doctor_measures_a_matrix_multiplication() -> None:
    found = doctor._tried("torch", doctor.TORCH, 60.0, "1")
    assert found.verdict == "ok" and re.search(r" at \d+ GFLOP/s with 1 threads$", found.detail)


def products(**keys: str) -> list[Finding]:
    return list(doctor._products(load([], {}, {f"engine.{key}": value for key, value in keys.items()}).config))


def test_doctor_says_what_multiplies_weights_here(monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = products(threads="1")
    assert found.verdict == "ok" and re.match(r"with 1 threads, .*float32 by \w+.*; bfloat16 by \w+.*; int8 by \w+", found.detail)
    (fixed,) = products(products="torch")
    assert fixed.verdict == "ok" and fixed.detail.startswith("by torch")
    assert not products(compiled="false") and not products(device="cuda") and not products(kind="vllm")
    monkeypatch.setattr(doctor, "PRODUCTS", "import sys; sys.exit('no compiler')")
    (failed,) = products()
    assert failed.verdict == "warn" and failed.detail == "by plain torch: no compiler"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import time; time.sleep(60)", "no answer within 1 s"),
        ("1 / 0", "ZeroDivisionError"),
        ("import os; os.abort()", "ended with status -6"),
    ],
)
def test_doctor_reports_how_a_trial_failed(code: str, said: str) -> None:
    """Negative control: a trial that hangs, fails or crashes is a failure."""
    found = doctor._tried("torch", code, 1.0)
    assert found.verdict == "fail" and said in found.detail


def test_doctor_exits_with_1_if_a_check_fails(env: dict[str, str], monkeypatch: pytest.MonkeyPatch, taken: int) -> None:
    monkeypatch.setattr(doctor, "_transports", lambda config: [Finding("warn", "tcp", "[slow] " + "x" * 200)])
    monkeypatch.setattr(doctor, "TORCH", "print('quick')")
    monkeypatch.setattr(doctor, "_products", lambda config: [])
    rc, out, err = invoke(env, "doctor", "--router.port", str(taken))
    assert (rc, err) == (1, "")
    lines = out.splitlines()
    assert sum(line.startswith("fail ports") and "--router.port" in line for line in lines) == 1
    assert f"warn tcp        [slow] {'x' * 200}" in lines


# --- a narrow terminal ---------------------------------------------------------------------------------------------------------------


def shown(width: int, **status: Any) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(view.status({**STATUS, **status}))
    return capture.get()


@pytest.mark.parametrize("width", [40, 80, 120, 180])
def test_status_is_readable_at_any_terminal_width(width: int) -> None:
    load = {"running": 3, "waiting": 0, "free_blocks": 12345, "cached_blocks": 678, "leases": 2}
    worker = {
        "name": "decode-0", "pool": "decode", "roles": ["prefill", "decode"], "state": "ready", "address": "127.0.0.1:34567",
        "pid": 1234567, "incarnation": 1763790000123456, "kv_blocks": 23456, "transport": "auto", "speculation": ["none"], "load": load,
        "tiers": [
            asdict(TierRecord("host", "on", "", 90, 100, 8, 7, 1.25, 0.5)), asdict(TierRecord("disk", "failed", "it is full", 0, 500)),
            asdict(TierRecord("remote", "watching", "none of 600 blocks that left the pool has come back", 500, 500)),
        ],
    }  # fmt: skip
    start = {"name": "decode-1", "step": "compiling kernels", "done": 5, "total": 24, "unit": "", "pid": 42, "host": "b"}
    told = shown(width, workers=[worker], starts=[start])
    assert "…" not in told and max(map(len, told.splitlines())) <= width
    for part in ("decode-0", "127.0.0.1:34567", "1234567", "prefill+decode", "12345/23456", "678", "decode-1  starting  compiling kernels"):
        assert part in told, part
    whole = " ".join(told.split())
    assert "decode-0 host: 90/100 blocks, 7 of 8 came back · saved 1.2 s and cost 0.5 s in ten minutes" in whole
    assert "decode-0 disk: 0/500 blocks, 0 of 0 came back · failed: it is full" in whole
    assert "0 of 0 came back · only watches: none of 600 blocks that left the pool has come back" in whole
    assert told.splitlines()[2].startswith("worker ") == (width >= 120), "a table only where it fits"


def test_status_shows_what_a_worker_serves_not_what_it_was_started_for() -> None:
    load = {"running": 0, "waiting": 0, "free_blocks": 1, "cached_blocks": 0, "leases": 0}
    worker = {"name": "w", "pool": "prefill", "state": "ready", "address": "a", "pid": 1, "kv_blocks": 1, "transport": "tcp", "load": load}
    worker |= {"speculation": ["prompt_lookup", "prediction"], "tiers": []}
    for roles, told in (([], "prefill"), (["decode"], "decode")):
        lines = shown(180, workers=[{**worker, "roles": roles}]).splitlines()
        assert lines[-1].split()[:2] == ["w", told] and ("guesses: prompt_lookup" in lines[0]) == (told == "decode")


def test_status_shows_what_became_of_quantised_matrices() -> None:
    load = {"running": 0, "waiting": 0, "free_blocks": 1, "cached_blocks": 0, "leases": 0}
    worker = {"name": "w", "pool": "decode", "roles": [], "state": "ready", "address": "a", "pid": 1, "kv_blocks": 1, "transport": "tcp"}
    worker |= {"load": load, "speculation": [], "tiers": []}
    forms = "3 computed as stored, 1 dequantised"
    assert f"matrices: {forms}" in shown(180, workers=[worker, {**worker, "matrices": forms}])
    assert "matrices" not in shown(180, workers=[worker, {**worker, "matrices": ""}])


def test_status_says_what_the_planner_decided_last() -> None:
    planner = {"leader": "planner-0", "dry_run": False, "at": 0.0, "action": "", "why": ""}
    assert "planner" not in shown(180) and "planner" not in shown(180, planner=None)
    assert "planner planner-0 leads · no decision yet" in shown(180, planner=planner)
    decided = {"at": time.time(), "why": "too few decode"}
    told = shown(180, planner=planner | decided)
    assert re.search(r"planner-0 leads · \d\d:\d\d:\d\d no change: too few decode", told)
    dry = {"leader": "", "dry_run": True, "action": "decode pool 1 → 2"}
    told = shown(180, planner=planner | decided | dry)
    assert re.search(r"a planner explains \(dry run\) · \d\d:\d\d:\d\d would do decode pool 1 → 2: too few decode", told)


@pytest.mark.parametrize("width", [60, 180])
def test_status_lists_the_routers_if_there_are_several(width: int) -> None:
    doors = {"grpc": "127.0.0.1:8470", "http": "127.0.0.1:8000", "admin": "127.0.0.1:8471", "page": "127.0.0.1:8472"}
    routers = [{"name": f"router-{i}", "pid": 4000 + i, "inflight": i, "queued": 0, "endpoints": doors} for i in range(3)]
    console = Console(width=width)
    with console.capture() as capture:
        console.print(view.status({**STATUS, "routers": routers}))
    told = capture.get()
    assert all(part in told for part in ("router-2", "4001", *doors.values())) and max(map(len, told.splitlines())) <= width


def test_top_in_a_pipe_exits_if_the_router_is_unreachable(env: dict[str, str]) -> None:
    rc, out, err = invoke(env, "top", "--address", "127.0.0.1:1")
    assert (rc, out) == (1, "") and err.startswith("baton: UNAVAILABLE") and err.count("\n") == 1
