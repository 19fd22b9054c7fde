/** What may be said of code, commands and sessions beside themselves, in the words of the API. */

import { base64Of, uniqueKey } from "./platform.js";
import type { Cell, Command, ExecutionRequest } from "./requests.js";
import type { Call } from "./transport.js";

/** Of any request. Aborting the signal ends waiting for it; what runs goes on, but for streams. */
export interface Asked {
  signal?: AbortSignal;
}

/** Contents by their paths. */
export interface Files {
  files?: Record<string, string | Uint8Array>;
}

export interface Waiting extends Asked {
  /** How long the end is waited for. */
  wait_seconds?: number;
}

/** Of a stream: with `detach` the run goes on when its stream is left. */
export interface Streaming extends Asked {
  detach?: boolean;
}

type Words<Request extends { code: string }, Elsewhere extends keyof Request> = Omit<
  Request,
  Elsewhere | "code" | "mode" | "files"
> &
  Files;

/**
 * Of code in a sandbox of its own. `idempotency_key` names what is to be done: however often it is
 * sent, it is done once. Without one each call is a thing of its own.
 */
export type RunWords = Words<
  ExecutionRequest,
  "session" | "context" | "env" | "webhook" | "run_at" | "priority"
>;
export type RunOptions = RunWords & Waiting;
export type SubmitOptions = Words<ExecutionRequest, "session" | "context" | "env"> & Asked;

/** Of code in a session. */
export type CellWords = Words<Cell, "webhook">;
export type CellOptions = CellWords & Waiting;

/** Of a command in a session. */
export type CommandWords = Omit<Command, "command" | "shell" | "background">;
export type CommandOptions = CommandWords & Waiting;

export const NDJSON = "application/x-ndjson";

/** Code to be run, once however often it is sent. */
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

/** A command: words, or one text for the shell. */
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
