/** A tool for agents: one function that runs code and returns its result as a short text. */

import { Cofferdam } from "./client.js";
import type { Execution } from "./shapes.js";

/** The longest result; a model reads all of it. */
export const MOST_CHARACTERS = 10_000;
const WAITED_BEYOND = 60;
// Where the code did not end by itself.
const NO_EXIT = -1;

/**
 * Execute Python code using the configured sandbox.
 *
 * Note: Output is compact and self-contained: the printed text, or, if the code did not succeed,
 * "Error (exit_code=...): " and the reason. `timeout` is seconds. The service and the key come
 * from COFFERDAM_URL and COFFERDAM_API_KEY. Throws nothing.
 */
export async function runPythonCode(code: string, timeout = 20): Promise<string> {
  let execution: Execution;
  try {
    execution = await new Cofferdam().run(code, { timeout, wait_seconds: timeout + WAITED_BEYOND });
  } catch (error) {
    const said = error instanceof Error ? error.message : String(error);
    return `Error (exit_code=${NO_EXIT}): ${short(said)}`;
  }
  if (execution.status === "succeeded") return short(execution.stdout);
  return `Error (exit_code=${execution.exit_code ?? NO_EXIT}): ${short(why(execution))}`;
}

function why(execution: Execution): string {
  if (execution.status === "timed_out") {
    return `${execution.stderr.trimEnd()}\nExecution timed out`.replace(/^\n+/, "");
  }
  return execution.stderr || (execution.error?.message ?? execution.status);
}

/** The beginning and the end of a long text. */
function short(text: string): string {
  if (text.length <= MOST_CHARACTERS) return text;
  const half = MOST_CHARACTERS / 2;
  const leftOut = text.length - MOST_CHARACTERS;
  return `${text.slice(0, half)}\n... ${leftOut} characters left out ...\n${text.slice(-half)}`;
}
