"""`helm test`: one real request, and proof of the way that its KV took. Arguments: address, the name in the certificates,
and `colocated`, `handoff` or `rdma`."""

import random
import sys
from pathlib import Path

import grpc

from baton.client import Client

address, server_name, expected = sys.argv[1:]
tls = Path("/etc/baton/tls")
credentials = None
if tls.exists():
    files = (tls / "ca.crt", tls / "tls.key", tls / "tls.crt")
    credentials = grpc.ssl_channel_credentials(*(file.read_bytes() for file in files))
keys = Path("/etc/baton/keys")
if keys.exists() and not (keys / "test-key").exists():
    sys.exit("the Secret security.apiKeysSecret has no `test-key`: put one of the API keys there")
key = (keys / "test-key").read_text().strip() if keys.exists() else None
# Words in an order that nobody has asked for: nothing of the prompt is cached.
words = "once upon a time there was a fox who lived near the river and wanted to see the sea with his friend the owl"
prompt = " ".join(random.sample(words.split(" "), 20) * 4)
name = server_name if credentials else None
asked = {"max_tokens": 20, "temperature": 0.0, "ignore_eos": True, "timeout_s": 60}
with (
    Client(address, credentials, api_key=key, server_name=name) as client,
    client.generate(prompt, **asked) as stream,
):
    text = "".join(stream.texts())
tokens, workers, moved = stream.result.usage.completion_tokens, stream.result.workers, stream.result.handoff
print(f"prefill {workers['prefill'] or '-'}, decode {workers['decode']}: {tokens} tokens: {text!r}")
print(f"KV by {moved['transport'] or '-'}: {moved['blocks']} blocks, {moved['bytes']} bytes, {moved['digests_checked']} digests checked")
if tokens != asked["max_tokens"]:
    sys.exit("fewer tokens than were asked for")
if expected != "colocated" and (moved["failure"] or not moved["blocks"] or moved["digests_checked"] != moved["blocks"]):
    sys.exit(f"no verified handoff: {moved['failure'] or 'the decode worker computed the prompt itself'}")
if expected == "rdma" and moved["transport"] != "nixl":
    sys.exit(f"RDMA was asked for, but KV went by {moved['transport']}: see docs/kubernetes.md, RDMA, and `baton doctor` in a worker's pod")
