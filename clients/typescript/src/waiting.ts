/** Wait for the end of an execution, and read lists page by page. */

import { StillRunning, UnexpectedAnswer, errorOf } from "./errors.js";
import { pause } from "./platform.js";
import type { Execution } from "./shapes.js";
import { EXECUTIONS, OF_EXECUTION, isOpen } from "./streams.js";
import { nextOf, part, type Call, type Transport } from "./transport.js";

export const WAIT_SECONDS = 600;
const SHORTEST = 0.1;
const LONGEST = 5;

/** Wait until an execution has ended, and return its record. Throws StillRunning. */
export async function waitFor(
  transport: Transport,
  id: string,
  seconds: number = WAIT_SECONDS,
  signal?: AbortSignal,
): Promise<Execution> {
  const call: Call = {
    method: "GET",
    path: `${EXECUTIONS}/${part(id)}`,
    repeatable: true,
    signal,
  };
  const deadline = Date.now() + seconds * 1000;
  for (let wait = SHORTEST; ; wait = Math.min(2 * wait, LONGEST)) {
    const execution = await transport.json<Execution>(call, ...OF_EXECUTION);
    if (!isOpen(execution)) return execution;
    if (Date.now() + wait * 1000 > deadline) throw new StillRunning(id, seconds);
    await pause(wait, signal);
  }
}

/** Send a run and wait for its result. Throws ServiceError if the service could not run it. */
export async function ended(
  transport: Transport,
  call: Call,
  seconds?: number,
): Promise<Execution> {
  const execution = await transport.json<Execution>(call, ...OF_EXECUTION);
  if (!isOpen(execution)) return execution;
  const done = await waitFor(transport, execution.id, seconds, call.signal);
  if (done.status === "error" && done.error !== null) {
    throw errorOf(200, { error: done.error, id: done.id });
  }
  return done;
}

/** All of a list, fetched page by page. */
export async function* paged<Item extends object>(
  transport: Transport,
  first: Call,
  field: "results" | "entries" = "results",
): AsyncGenerator<Item, void, void> {
  for (let call: Call | null = first; call !== null; ) {
    const page: Record<string, unknown> = await transport.json(call, field, "next");
    const items = page[field];
    if (!Array.isArray(items)) throw new UnexpectedAnswer(`The answer's ${field} are not a list.`);
    for (const each of items) yield each as Item;
    call = nextOf(first, page.next);
  }
}
