"""The contract of all engines, of those that compute: the toy, our engine with the model that ships, and vLLM where it is installed
(`make test-vllm`)."""

import importlib.util
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from eager_guesses import guess_always
from engine_bench import BLOCK, CHUNK, MAX_LEN, MAX_QUEUE, VLLM_DEVICE, VLLM_INVARIANT, Bench, started
from engine_contract import *  # noqa: F403
from tokenizers import Tokenizer

from baton.engine.options import Options
from baton.models.make_small import make_toy

TALE = Path(__file__).resolve().parents[2] / "baton" / "models" / "tale"
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed here (make test-vllm)")
KINDS = ["toy", "tale", "drafting", "int8 kv", "int5 kv", pytest.param("vllm", marks=needs_vllm)]

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=KINDS)
async def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    path = TALE
    if request.param == "toy":
        path = tmp_path_factory.mktemp("toy")
        make_toy(path)
    limits: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": CHUNK, "max_queue": MAX_QUEUE}
    options = Options.of(path, block_size=BLOCK, max_model_len=MAX_LEN, kv_memory_mib=32, threads=1, **limits)
    if request.param == "vllm":
        options = options.but(kind="vllm", device=VLLM_DEVICE, vllm={"enforce_eager": True}, batch_invariant=VLLM_INVARIANT)
    if request.param == "drafting":
        options = options.but(speculation="prompt_lookup")
    if request.param in ("int8 kv", "int5 kv"):
        options = options.but(kv_dtype=request.param.removesuffix(" kv"))
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "drafting":
            guess_always(patch)
        made = await started(options)
        made.tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        made.separates_output = request.param in ("tale", "drafting", "int8 kv", "int5 kv")
        yield made
        counts = await made.close()
        assert request.param != "drafting" or counts.accepted_tokens > 0
