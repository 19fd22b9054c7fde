/** From the text of an answer to its value, and back to that text for its receipt. */

import { UnexpectedAnswer } from "./errors.js";

// A receipt is over the text: the number 1.0 is another text than 1, and the same value.
const texts = new WeakMap<object, () => string>();

/** Throws UnexpectedAnswer for what is no JSON object, or lacks one of the fields. */
export function decoded<T extends object>(
  text: string,
  fields: readonly string[],
  status?: number,
): T {
  let value: unknown;
  try {
    value = JSON.parse(text);
  } catch {
    throw new UnexpectedAnswer("The answer is no JSON.", status);
  }
  return checked<T>(value, fields, () => text, status);
}

/** The same of a value that was read already, whose text `text` finds when it is wanted. */
export function checked<T extends object>(
  value: unknown,
  fields: readonly string[],
  text: () => string,
  status?: number,
): T {
  const found = typeof value === "object" && value !== null ? (value as T) : ({} as T);
  const missing = fields.find((field) => !(field in found));
  if (missing !== undefined || found !== value) {
    throw new UnexpectedAnswer(`The answer has no ${missing ?? "object"}.`, status);
  }
  if ("receipt" in found) texts.set(found, text);
  return found;
}

/**
 * The JSON text of an answer: keep this, and its receipt can be checked at any time. Of an answer
 * that was changed, it is the text of what it says now.
 */
export function textOf(answer: object): string {
  const now = JSON.stringify(answer);
  const came = texts.get(answer)?.();
  return came !== undefined && JSON.stringify(JSON.parse(came)) === now ? came : now;
}
