// Streams an answer, and resumes it if its router dies. In the folder of a checkout:
//
//     npm install @grpc/grpc-js @grpc/proto-loader
//     node docs/examples/resume.mjs 127.0.0.1:8470 '{"text": "Once upon a time", "sampling": {"maxTokens": 60}}'
//
// The first argument may name several routers, separated by commas. The text goes to stdout; then stderr gets the ids and the usage.
import path from "node:path";
import { setTimeout as sleep } from "node:timers/promises";
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const proto = path.join(process.env.BATON_PROTO ?? "proto", "baton/v1/generation.proto");
const { Generation } = grpc.loadPackageDefinition(protoLoader.loadSync(proto, { longs: String, defaults: true })).baton.v1;
const OPTIONS = { "grpc.initial_reconnect_backoff_ms": 100, "grpc.max_reconnect_backoff_ms": 1000 };

async function* generate(routers, request, deadline) {
  const ids = [];
  let accepted = null;
  for (let tries = 0, refused = 0; ; tries++) {
    const rest = accepted ? { ...request, sampling: accepted.sampling, resume: accepted.resume, outputSoFar: { ids } } : request;
    try {
      for await (const event of routers[tries % routers.length].Generate(rest, { deadline })) {
        if (event.accepted) [accepted, refused] = [event.accepted, 0];
        ids.push(...(event.tokens?.tokens ?? []).map((token) => token.id));
        yield { ...event, ids, tries };
      }
      return;
    } catch (error) {
      if (error.code !== grpc.status.UNAVAILABLE) throw error; // final: the request is wrong, or its time is over
      await sleep(Math.random() * Math.min(2000, 100 * 2 ** refused++));
    }
  }
}

const routers = process.argv[2].split(",").map((address) => new Generation(address, grpc.credentials.createInsecure(), OPTIONS));
const deadline = Date.now() + 120_000;
for await (const event of generate(routers, JSON.parse(process.argv[3]), deadline)) {
  for (const token of event.tokens?.tokens ?? []) process.stdout.write(token.text);
  if (!event.finished) continue;
  process.stdout.write(event.finished.text + "\n");
  process.stderr.write(JSON.stringify({ ids: event.ids, tries: event.tries, usage: event.finished.usage }) + "\n");
}
process.exit(0);
