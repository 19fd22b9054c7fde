/** Conversations with a running service. */

import {
  Cofferdam,
  Conflict,
  InvalidRequest,
  InvalidSettings,
  NEVER,
  NotFound,
  StillRunning,
  Unauthenticated,
  Unreachable,
  contentOf,
  runPythonCode,
  type RunEvent,
} from "cofferdam";

import { all, equal, textOfBytes, thrown, told } from "./checks.js";

const client = new Cofferdam();
const SLOW = "import time; print(1, flush=True); time.sleep(25)";

export async function runs(): Promise<void> {
  const done = await client.run(
    "import pathlib\n" +
      "def main(name):\n" +
      "    pathlib.Path('artifacts').mkdir(exist_ok=True)\n" +
      "    pathlib.Path('artifacts/a b.txt').write_text(pathlib.Path('in/x').read_text())\n" +
      "    return {'hello': name}",
    { arguments: { name: "ada" }, files: { "in/x": "ünï" }, conversation: "talk" },
  );
  equal([done.status, done.result, done.exit_code], ["succeeded", { hello: "ada" }, 0]);
  equal([done.conversation, done.artifacts.map((each) => each.name)], ["talk", ["a b.txt"]]);
  equal(textOfBytes(await client.artifact(done.id, "a b.txt")), "ünï");
  const failed = await client.run("1 / 0");
  equal([failed.status, failed.exit_code], ["failed", 1]);
  const slow = await client.run("while True: pass", { timeout: 1 });
  equal([slow.status, slow.exit_code, slow.error?.code], ["timed_out", null, "SB005"]);
  equal((await client.languages()).includes("python"), true);
  equal((await client.usage()).tenant, "wonderland");
  equal((await client.execution(done.id)).receipt, done.receipt);
}

export async function refusals(): Promise<void> {
  const refused = await thrown(InvalidRequest, () => client.run("print(1)", { timeout: 400 }));
  equal([refused.name, refused.code, refused.field], ["InvalidRequest", "SB002", "timeout"]);
  equal([refused.status, refused instanceof Error], [400, true]);
  const mine = await client.run("print(1)");
  equal(JSON.stringify(client).includes(told("COFFERDAM_API_KEY")), false);
  const stranger = new Cofferdam({ apiKey: told("STRANGER_KEY") });
  await thrown(NotFound, () => stranger.execution(mine.id));
  await thrown(TypeError, () => client.artifact(mine.id, "../../sessions"));
  await thrown(TypeError, () => stranger.session(".."));
  equal((await thrown(Conflict, () => client.cancel(mine.id))).status, 409);
  await thrown(Unauthenticated, () => new Cofferdam({ apiKey: "cfd_wrong" }).languages());
  const nowhere = new Cofferdam({ url: told("NOWHERE"), retries: NEVER });
  equal((await thrown(Unreachable, () => nowhere.run("print(1)"))).sent, false);
  for (const settings of [
    { url: "ftp://runs.example" },
    { url: "runs.example" },
    { url: "https://user:password@runs.example" },
    { url: "https://runs.example/?key=1" },
    { apiKey: "" },
    { apiKey: "two\nlines" },
  ]) {
    await thrown(InvalidSettings, async () => new Cofferdam(settings));
  }
}

export async function keys(): Promise<void> {
  const idempotency_key = `once-${Date.now()}`;
  const first = await client.run("print(1)", { idempotency_key });
  equal((await client.run("print(1)", { idempotency_key })).id, first.id);
  const other = await thrown(InvalidRequest, () => client.run("print(2)", { idempotency_key }));
  equal(other.field, "idempotency_key");
  equal((await client.run("print(1)")).id === first.id, false);
}

export async function later(): Promise<void> {
  const agent = `pages-${Date.now()}`;
  const sent: string[] = [];
  for (let count = 0; count < 5; count += 1) {
    sent.unshift((await client.submit(`print(${count})`, { agent })).id);
  }
  const listed = await all(client.executions({ agent, limit: 2 }));
  equal(listed.map((each) => each.id), sent);
  const ended = await Promise.all(sent.map((id) => client.wait(id)));
  equal(ended.map((each) => each.stdout), ["4\n", "3\n", "2\n", "1\n", "0\n"]);
  const queued = await client.submit(SLOW);
  const still = await thrown(StillRunning, () => client.wait(queued.id, { seconds: 0.2 }));
  equal(still.id, queued.id);
  equal((await client.cancel(queued.id)).status, "cancelled");
}

export async function streams(): Promise<void> {
  // The second line has characters that end lines, elsewhere than in JSON.
  const code =
    "import sys; print('one', flush=True); print('\\u2028\\x85two', flush=True)\n" +
    "sys.stdout.buffer.write(b'\\xff')";
  const events = client.stream(code);
  const said = await all(events);
  equal([...new Set(said.map((event) => event.type))], ["started", "stdout", "done"]);
  const pieces = said.flatMap((event) =>
    event.type === "stdout" ? [...contentOf(event)] : [],
  );
  equal(pieces, [...new TextEncoder().encode("one\n\u2028\x85two\n"), 0xff]);
  equal([events.execution?.status, events.execution?.id], ["succeeded", events.id]);
  await thrown(TypeError, () => events.done());
  const refused = client.stream("print(1)", { timeout: 400 });
  equal((await thrown(InvalidRequest, () => refused.done())).field, "timeout");
  const silent = new Cofferdam({ timeout: 0.5, retries: NEVER });
  const lost = await thrown(Unreachable, () => silent.stream("import time; time.sleep(9)").done());
  equal(lost.sent, true);
}

/** Who reads takes longer for each event than the service may be silent. */
export async function dawdling(): Promise<void> {
  const seconds = 7777;
  const { setTimeout: set, clearTimeout: clear } = globalThis;
  const due = new Map<unknown, () => void>();
  globalThis.setTimeout = ((call: () => void, milliseconds: number) => {
    const timer = set(call, milliseconds);
    if (milliseconds === seconds * 1000) due.set(timer, call);
    return timer;
  }) as typeof set;
  globalThis.clearTimeout = ((timer: Parameters<typeof clear>[0]) => {
    due.delete(timer);
    clear(timer);
  }) as typeof clear;
  try {
    const events = new Cofferdam({ timeout: seconds }).stream("print(1, flush=True)");
    const types: string[] = [];
    for await (const event of events) {
      types.push(event.type);
      for (const call of due.values()) call();
    }
    equal([[...new Set(types)], events.execution?.status], [["started", "stdout", "done"], "succeeded"]);
  } finally {
    Object.assign(globalThis, { setTimeout: set, clearTimeout: clear });
  }
}

export async function leaving(): Promise<void> {
  const left = client.stream(SLOW);
  for await (const event of left) if (event.type === "stdout") break;
  const stop = new AbortController();
  const aborted = client.stream(SLOW, { signal: stop.signal });
  const seen: RunEvent[] = [];
  const reason = await thrown(Error, async () => {
    for await (const event of aborted) if (seen.push(event) === 2) stop.abort();
  });
  equal(reason.name, "AbortError");
  for (const { id } of [left, aborted]) {
    equal((await client.wait(id ?? "")).status, "cancelled");
  }
  const detached = client.stream("import time; print(1, flush=True); time.sleep(1)", {
    detach: true,
  });
  for await (const event of detached) if (event.type === "stdout") break;
  const rest = client.follow(detached.id ?? "", detached.after);
  equal((await all(rest)).map((event) => event.type), ["done"]);
  equal(rest.execution?.status, "succeeded");
  const waiting = new AbortController();
  const run = client.run("import time; time.sleep(2)", { signal: waiting.signal });
  waiting.abort();
  equal((await thrown(Error, () => run)).name, "AbortError");
}

export async function sessions(): Promise<void> {
  let snapshot = "";
  const session = await client.inSession({ metadata: { of: "test" } }, async (session) => {
    equal((await session.run("x = 41")).context_kept, true);
    equal((await session.run("x + 1")).outputs, [{ "text/plain": "42" }]);
    equal((await session.stream("print(x)").done()).stdout, "41\n");

    const { files } = session;
    const bytes = Uint8Array.from({ length: 256 }, (_, index) => index);
    equal((await files.write("in/a.bin", bytes)).size_bytes, 256);
    equal([...(await files.read("in/a.bin"))], [...bytes]);
    equal((await all(files.pieces("in/a.bin"))).flatMap((piece) => [...piece]), [...bytes]);
    const paths = (await all(files.list("", { depth: 2 }))).map((each) => each.path);
    equal([paths.includes("in"), paths.includes("in/a.bin")], [true, true]);
    equal(await files.unpack(await files.archive("in"), "copy"), 1);
    equal((await files.move("copy/a.bin", "moved")).path, "moved");
    equal([await files.mkdir("empty"), await files.mkdir("empty")], [true, false]);
    await files.remove("in");
    await thrown(NotFound, () => files.read("in/a.bin"));

    equal((await session.command("echo $((6 * 7))")).stdout, "42\n");
    equal((await session.command(["echo", "a  b"])).stdout, "a  b\n");
    const shown = session.streamCommand("echo $HOME; exit 4");
    equal((await shown.done()).exit_code, 4);
    const cat = await session.start("cat", { stdin: true });
    await cat.write("hello\n", { close: true });
    equal([(await cat.wait()).stdout, cat.info.pid], ["hello\n", cat.pid]);
    const sleeper = await session.start(["sleep", "60"]);
    equal(await sleeper.signal("SIGKILL"), true);
    equal((await sleeper.wait()).exit_code, 137);
    equal((await session.processes()).length > 0, true);
    const terminal = await session.start("cat", { pty: { cols: 80, rows: 24 } });
    await terminal.resize(100, 30);

    await session.createContext("bash", { id: "sh" });
    equal((await session.run("echo $0", { context: "sh" })).stdout, "bash\n");
    equal((await session.restartContext("sh")).language, "bash");
    await session.endContext("sh");
    equal((await session.contexts()).map((each) => each.id), ["default"]);
    equal(await session.interrupt(), false);
    snapshot = (await session.snapshot()).id;
    equal((await session.reset()).metadata, { of: "test" });
    equal((await session.change({ metadata: { of: "me" } })).metadata, { of: "me" });
    equal((await client.session(session.id)).info.metadata, { of: "me" });
    const open = await all(client.sessions({ state: "open" }));
    equal(open.some((each) => each.id === session.id), true);
    const queued = await session.submit("print('later')");
    equal((await client.wait(queued.id)).stdout, "later\n");
    return session;
  });
  await thrown(Conflict, () => session.run("x"));
  equal((await session.refresh()).state, "closed");
  await client.inSession({ from: snapshot }, async (again) => {
    equal((await again.files.read("moved")).length, 256);
  });
}

export async function tool(): Promise<void> {
  equal(await runPythonCode("print('hi')"), "hi\n");
  equal(await runPythonCode("import sys; sys.exit('no')"), "Error (exit_code=1): no\n");
  const slow = await runPythonCode("while True: pass", 1);
  equal(slow, "Error (exit_code=-1): Execution timed out");
  const refused = await runPythonCode("1", 400);
  equal(refused.startsWith("Error (exit_code=-1): SB002: timeout"), true);
  const long = await runPythonCode("print('a' * 50_000 + 'end')");
  equal([long.length < 10_100, long.endsWith("end\n")], [true, true]);
}
