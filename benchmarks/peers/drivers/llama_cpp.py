"""llama.cpp through llama-cpp-python's low-level bindings, with the loop of its own server: decodes first, then pieces of prompts."""

import ctypes
import json
import time
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
from safetensors.numpy import load_file

from peers.driver import Handler, Message, engine, serve

QUANTIZED = {
    "float32": gguf.GGMLQuantizationType.F32,
    "bfloat16": gguf.GGMLQuantizationType.BF16,
    "int8": gguf.GGMLQuantizationType.Q8_0,
    "int4": gguf.GGMLQuantizationType.Q4_0,
}
KV_TYPE = {"float32": 0, "float16": 1}  # ggml's numbers
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def convert(message: Message) -> None:
    """Writes a GGUF file without a vocabulary: token ids go in and come out."""
    source, kind = Path(message["model"]), QUANTIZED[message["precision"]]
    config = json.loads((source / "config.json").read_text())
    writer = gguf.GGUFWriter(Path(message["out"]) / "model.gguf", "llama")
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, tensor in load_file(source / "model.safetensors").items():
        theirs = rename(name)
        if count := heads.get(theirs.split(".")[-2]):
            tensor = pair_rotations(tensor, count)
        kept = gguf.GGMLQuantizationType.F32 if tensor.ndim == 1 else kind
        writer.add_tensor(theirs, gguf.quants.quantize(tensor, kept), raw_dtype=kept)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def rename(name: str) -> str:
    fixed = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}
    if name in fixed:
        return fixed[name]
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"


def pair_rotations(weight: Any, heads: int) -> Any:
    """llama.cpp rotates neighbours (2i, 2i+1) where Hugging Face rotates (i, i + D/2), so this reorders the rows within each head."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


class Context:
    """One llama context. Each sequence has its own share of the cache (`kv_unified` off), so a decode step reads only its own keys."""

    def __init__(self, model: Any, message: Message, sequences: int, tokens: int) -> None:
        params = llama_cpp.llama_context_default_params()
        params.n_seq_max, params.n_ctx = sequences, sequences * tokens
        params.n_batch, params.n_ubatch = message["max_batched_tokens"], 512
        params.n_threads = params.n_threads_batch = message["threads"]
        params.type_k = params.type_v = KV_TYPE[message["kv_dtype"]]
        params.kv_unified = False
        if not message["flash"]:  # its flash attention rounds to float16, and is slower on a float32 cache
            params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.handle = llama_cpp.llama_init_from_model(model, params)
        if not self.handle:
            raise RuntimeError("llama.cpp could not make a context")
        self.room = message["max_batched_tokens"]
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self.batch = llama_cpp.llama_batch_init(self.room, 0, 1)

    def generate(self, prompts: list[list[int]], outputs: list[int]) -> list[list[tuple[int, float]]]:
        """Serves at most as many requests as the context has sequences."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.handle), False)
        tokens, done = [list(prompt) for prompt in prompts], [0] * len(prompts)
        made: list[list[tuple[int, float]]] = [[] for _ in prompts]
        while unfinished := [i for i, row in enumerate(made) if len(row) < outputs[i]]:
            unfinished.sort(key=lambda i: len(tokens[i]) - done[i] > 1)  # stable: decodes come first
            batch, samples = self.batch, {}
            batch.n_tokens = 0
            for i in unfinished:
                piece = tokens[i][done[i] : done[i] + self.room - batch.n_tokens]
                for position, token in enumerate(piece, done[i]):
                    at = batch.n_tokens
                    batch.token[at], batch.pos[at], batch.n_seq_id[at], batch.seq_id[at][0] = token, position, 1, i
                    batch.logits[at] = position + 1 == len(tokens[i])
                    if batch.logits[at]:
                        samples[i] = at
                    batch.n_tokens += 1
                done[i] += len(piece)
            if llama_cpp.llama_decode(self.handle, batch):
                raise RuntimeError("llama_decode failed")
            best = {i: self._argmax(at) for i, at in samples.items()}
            now = time.perf_counter()
            for i, token in best.items():
                tokens[i].append(token)
                made[i].append((token, now))
        return made

    def _argmax(self, at: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self.handle, at)
        return int(np.ctypeslib.as_array(ctypes.cast(logits, ctypes.POINTER(ctypes.c_float)), (self.vocab,)).argmax())


def start(message: Message) -> tuple[str, Handler]:
    llama_cpp.llama_backend_init()
    file = Path(message["model"]) / "model.gguf"
    model = llama_cpp.llama_model_load_from_file(str(file).encode(), llama_cpp.llama_model_default_params())
    if not model:
        raise RuntimeError("llama.cpp could not read the model")
    alone = Context(model, message, 1, message["context"])
    together: list[Context] = []

    def generate(prompts: list[list[int]], outputs: list[int]) -> list[list[tuple[int, float]]]:
        if len(prompts) == 1:
            return alone.generate(prompts, outputs)
        if not together:
            together.append(Context(model, message, message["max_seqs"], message["kv_tokens"] // message["max_seqs"]))
        return together[0].generate(prompts, outputs)

    return f"{llama_cpp.__version__} (llama-cpp-python)", engine(generate)


if __name__ == "__main__":
    serve(start, convert)
