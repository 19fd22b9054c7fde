/** Options of code, commands and sessions, with the names of the API. */

import { base64Of, uniqueKey } from "./platform.js";
import type { Cell, Command, ExecutionRequest } from "./requests.js";
import type { Call } from "./transport.js";

/** Options of any request. Aborting the signal ends the wait. Only a stream's run is cancelled. */
export interface Asked {
  signal?: AbortSignal;
}

/** Input files: contents by their paths. */
export interface Files {
  files?: Record<string, string | Uint8Array>;
}

export interface Waiting extends Asked {
  /** Seconds to wait for the end. */
  wait_seconds?: number;
}

/** Options of a stream: with `detach` the run continues after you leave the stream. */
export interface Streaming extends Asked {
  detach?: boolean;
}

type Words<Request extends { code: string }, Elsewhere extends keyof Request> = Omit<
  Request,
  Elsewhere | "code" | "mode" | "files"
> &
  Files;

/**
 * Options of code in its own sandbox. Requests with the same `idempotency_key` run the code once.
 * Without one each call has its own unique key.
 */
export type RunWords = Words<
  ExecutionRequest,
  "session" | "context" | "webhook" | "run_at" | "priority"
>;
export type RunOptions = RunWords & Waiting;
export type SubmitOptions = Words<ExecutionRequest, "session" | "context"> & Asked;

/** Options of code in a session. */
export type CellWords = Words<Cell, "webhook">;
export type CellOptions = CellWords & Waiting;

/** Options of a command in a session. */
export type CommandWords = Omit<Command, "command" | "shell" | "background">;
export type CommandOptions = CommandWords & Waiting;

export const NDJSON = "application/x-ndjson";

/** A request to run code. However often it is sent, the code runs once. */
export async function runCall(
  path: string,
  code: string,
  options: SubmitOptions & Waiting & Streaming,
  mode?: "async",
): Promise<Call> {
  const { signal, wait_seconds: _, detach: __, files, ...said } = options;
  const sent = Object.entries(files ?? {}).map(([name, content]) => ({
    path: name,
    content_base64: base64Of(content),
  }));
  const json = {
    ...said,
    code,
    mode,
    files: sent.length > 0 ? sent : undefined,
    idempotency_key: said.idempotency_key ?? (await uniqueKey()),
  };
  return { method: "POST", path, json, repeatable: true, signal };
}

/** A request to run a command. A list is the command's words; a string goes to the shell. */
export function commandCall(
  path: string,
  command: string | string[],
  options: CommandOptions & Streaming,
  background?: true,
): Call {
  const { signal, wait_seconds: _, detach: __, ...said } = options;
  const what = typeof command === "string" ? { shell: command } : { command };
  return {
    method: "POST",
    path,
    json: { ...said, ...what, background },
    repeatable: false,
    signal,
  };
}
