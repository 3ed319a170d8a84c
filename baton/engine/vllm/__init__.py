"""vLLM as the engine of a worker.

    our process                    `engine` (the contract, over vLLM's AsyncLLM), `desk` (who waits, who runs, whose a staged block is)
    EngineCore, a child of vLLM    `connector`, scheduler side: `ledger` (what to copy when), `block_events` (its prefix cache in our keys)
    each rank                      `connector`, worker side: copies; `sampler` (our sampler decides the token)

vLLM's KV tensors belong to its child processes. Peers read and write a *staging pool* instead: one piece of shared memory with our block
layout, owned by our process. A rank copies the blocks of a prompt there in the step that fills them, and the blocks of an adopted sequence
from there in the step that starts it. So leases, digests, transports and quarantine are those of any worker, vLLM never holds a block for
a reader, and it sees only KV that was read to the end and verified. A staged block holds all layers and heads, wherever they are computed:
ranks of any number write and read their part of it.
"""
