/** Streams of a run's events. */

import { checked, decoded } from "./answers.js";
import { ConnectionLost, UnexpectedAnswer, Unreachable, errorOf } from "./errors.js";
import { written, parsed, type Members } from "./lossless.js";
import { NDJSON } from "./options.js";
import { bytesOf, ofBase64, pause } from "./platform.js";
import type { Execution } from "./shapes.js";
import { joined, type Answer, type Call, type Transport } from "./transport.js";

export const EXECUTIONS = "/api/v1/executions";
/** The fields of an execution that the client needs. */
export const OF_EXECUTION = ["id", "status", "stdout", "stderr"] as const;
// How often a stream resumes without an event in between.
const MOST_RESUMED = 5;

interface Numbered {
  /** The number of the event; numbers increase. */
  seq: number;
}

export interface Started extends Numbered {
  type: "started";
  /** The id of the execution. */
  id: string;
}

export interface Written extends Numbered {
  type: "stdout" | "stderr";
  text: string;
  /** The bytes, if they are not UTF-8. */
  data_base64?: string;
}

/** A rich output of code in a session, by MIME type. */
export interface Output extends Numbered {
  type: "output";
  data: Record<string, unknown>;
}

export interface Done extends Numbered {
  type: "done";
  execution: Execution;
}

/** An event of a run. Types that this client does not know are passed on unchanged. */
export type RunEvent = Started | Written | Output | Done;

/** The bytes that the run wrote. */
export function contentOf(event: Written): Uint8Array {
  return event.data_base64 === undefined ? bytesOf(event.text) : ofBase64(event.data_base64);
}

export function isOpen(execution: Execution): boolean {
  return execution.status === "queued" || execution.status === "running";
}

export interface Following {
  /** The run continues without a reader, and after a broken connection the stream resumes. */
  detached: boolean;
  id?: string | null;
  after?: number;
}

/**
 * The events of one run, for one `for await`, which sends the request. `execution` is set by the
 * `done` event, `id` by the first event. Leaving the loop earlier cancels the run, unless the
 * stream is detached or comes from `follow`.
 */
export class RunStream implements AsyncIterable<RunEvent> {
  execution: Execution | null = null;
  id: string | null;
  after: number;
  private detached: boolean;
  private isTaken = false;

  constructor(
    private readonly transport: Transport,
    private readonly request: () => Call | Promise<Call>,
    following: Following,
  ) {
    this.detached = following.detached;
    this.id = following.id ?? null;
    this.after = following.after ?? 0;
  }

  /** Read to the end, skip the events, and return the execution. */
  async done(): Promise<Execution> {
    for await (const _ of this);
    if (this.execution === null) throw new UnexpectedAnswer("The stream had no execution.");
    return this.execution;
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<RunEvent, void, void> {
    if (this.isTaken) throw new TypeError("A stream can be read once. `follow` starts another.");
    this.isTaken = true;
    const first = streamed(await this.request(), this.detached);
    let answer = await this.transport.open(first);
    if (answer.isJson) {
      // It is queued or needs approval: its events are found under its id.
      this.id = decoded<Execution>(await answer.text(), OF_EXECUTION, answer.status).id;
      this.detached = true;
      answer = await this.transport.open(this.rest(first));
    }
    for (let resumed = 0; ; ) {
      let lost: unknown;
      try {
        for await (const line of linesOf(answer)) {
          const event = this.taken(line);
          if (event === null) continue;
          resumed = 0;
          yield event;
          if (this.execution !== null) return;
        }
      } catch (problem) {
        if (!(problem instanceof Unreachable)) throw problem;
        // Silence is no failure: a command in the background may say nothing for hours.
        if (problem.silent) resumed -= 1;
        lost = problem;
      } finally {
        answer.close();
      }
      if (!this.detached || this.id === null || resumed >= MOST_RESUMED) {
        const why = "The stream ended before the run had ended.";
        throw new ConnectionLost(why, this.id, this.after, lost);
      }
      resumed += 1;
      await pause(0.1 * 2 ** resumed, first.signal);
      answer = await this.transport.open(this.rest(first));
    }
  }

  private rest(first: Call): Call {
    return followed(`${EXECUTIONS}/${this.id}/events`, this.after, first.signal);
  }

  /** The event to return; null if the service ends the stream before the run has ended. */
  private taken(line: string): RunEvent | null {
    const event = eventOf(line);
    if (event.type === "done") {
      this.id = event.execution.id;
      if (isOpen(event.execution)) return null;
      this.execution = event.execution;
    } else if (event.type === "started") {
      this.id = event.id;
    }
    this.after = event.seq;
    return event;
  }
}

function eventOf(line: string): RunEvent {
  const said = decoded<RunEvent | { type: "error" }>(line, ["type", "seq"]);
  if (said.type === "error") throw errorOf(200, said);
  if (said.type === "done") {
    const text = (): string => written((parsed(line) as Members).get("execution"));
    checked(said.execution, OF_EXECUTION, text);
  }
  return said;
}

/** Join pieces into lines. Only a line feed ends a line. */
async function* linesOf(answer: Answer): AsyncGenerator<string, void, void> {
  const decoder = new TextDecoder();
  let begun: Uint8Array[] = [];
  for await (const piece of answer.pieces()) {
    let at = 0;
    for (let end = piece.indexOf(10); end >= 0; end = piece.indexOf(10, at)) {
      const line = decoder.decode(joined([...begun, piece.subarray(at, end)])).trim();
      if (line) yield line;
      begun = [];
      at = end + 1;
    }
    begun.push(piece.subarray(at));
  }
}

function streamed(call: Call, detach: boolean): Call {
  const params = detach && call.method === "POST" ? { ...call.params, detach: 1 } : call.params;
  return { ...call, ...(params && { params }), headers: { ...call.headers, Accept: NDJSON } };
}

/** A request for the events of a run that another request started. */
export function followed(path: string, after: number, signal?: AbortSignal): Call {
  const headers = { Accept: NDJSON };
  return { method: "GET", path, params: { after }, headers, repeatable: true, signal };
}
