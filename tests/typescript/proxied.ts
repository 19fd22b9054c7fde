/** Conversations through a proxy that loses answers, refuses and breaks streams. */

import {
  Cofferdam,
  ConnectionLost,
  CofferdamError,
  NEVER,
  Unreachable,
  contentOf,
} from "cofferdam";

import { all, equal, textOfBytes, thrown, told } from "./checks.js";

const client = new Cofferdam({ retries: { tries: 3, seconds: 20 } });
const COUNTS = "import time\nfor n in range(4): print(n, flush=True); time.sleep(0.2)";

/** Its answer is lost once. */
export async function lost(): Promise<void> {
  const agent = told("AGENT");
  const done = await client.run("print('paid')", { agent });
  equal([done.status, done.stdout], ["succeeded", "paid\n"]);
  equal((await all(client.executions({ agent }))).map((each) => each.id), [done.id]);
}

/** The answer to a command is lost once. */
export async function command(): Promise<void> {
  const session = await client.session(told("SESSION"));
  equal((await thrown(Unreachable, () => session.command("echo once >> log"))).sent, true);
  equal(textOfBytes(await session.files.read("log")), "once\n");
}

/** Refused twice, and told when to come back. */
export async function refused(): Promise<void> {
  equal((await client.run("print(1)")).stdout, "1\n");
}

/** What is refused for good: the name of the error that is thrown. */
export async function final(): Promise<void> {
  for (const name of told("ERRORS").split(",")) {
    const error = await thrown(CofferdamError, () => client.run("print(1)"));
    equal([error.name, error.constructor.name], [name, name]);
  }
}

/** Refused as often as it is tried. */
export async function bounded(): Promise<void> {
  equal((await thrown(CofferdamError, () => client.run("print(1)"))).name, "CreationFailed");
  const once = new Cofferdam({ retries: NEVER });
  equal((await thrown(CofferdamError, () => once.run("print(1)"))).name, "CreationFailed");
}

/** Its stream breaks after two lines. */
export async function broken(): Promise<void> {
  const events = client.stream(COUNTS, { detach: true });
  const said = await all(events);
  const text = said.map((event) =>
    event.type === "stdout" ? textOfBytes(contentOf(event)) : "",
  );
  equal(text.join(""), "0\n1\n2\n3\n");
  const numbers = said.map((event) => event.seq);
  equal(numbers, [...new Set(numbers)].sort((one, other) => one - other));
  equal(events.execution?.status, "succeeded");
}

/** Its stream breaks after one line, and it is not to go on without it. */
export async function attached(): Promise<void> {
  const error = await thrown(ConnectionLost, () => client.stream("print(1)").done());
  equal([error.sent, error.id !== null], [true, true]);
}

/** A page names the next one on another host. */
export async function pages(): Promise<void> {
  await all(client.executions());
}

