"""Tokens in, tokens out, on one device. The rooms, from the bottom up; each imports only from those before it:

core     what is computed next, and for whom: sequences, blocks, the scheduler, the loop. It decides and imports no torch
facts    what the files of a model's folder declare, without torch: the router reads them, too
model    the model family: checkpoint, layers, attention and sampling in plain torch, and the seam (`ops`) for faster kernels
cpu      kernels that are compiled for this processor
runner   a model on a device, behind `core.protocol.Runner`
gpu      kernels, attention backends, graphs, and a runner that keeps one step in flight
choice   which operations and which runner
build    from options to an engine; `start` runs it
vllm     another engine behind `core.contract`
"""
