/** Parse answers, and keep their texts for the check of their receipts. */

import { UnexpectedAnswer } from "./errors.js";

// A receipt is over the text: the number 1.0 is another text than 1, and the same value.
const texts = new WeakMap<object, () => string>();

/** Throws UnexpectedAnswer if the text is not a JSON object or lacks one of the fields. */
export function decoded<T extends object>(
  text: string,
  fields: readonly string[],
  status?: number,
): T {
  let value: unknown;
  try {
    value = JSON.parse(text);
  } catch {
    throw new UnexpectedAnswer("The answer is not JSON.", status);
  }
  return checked<T>(value, fields, () => text, status);
}

/** Check a parsed value in the same way. `text` returns its text on demand. */
export function checked<T extends object>(
  value: unknown,
  fields: readonly string[],
  text: () => string,
  status?: number,
): T {
  const found = typeof value === "object" && value !== null ? (value as T) : ({} as T);
  const missing = fields.find((field) => !(field in found));
  if (missing !== undefined || found !== value) {
    const lack = missing === undefined ? "is not an object" : `lacks ${missing}`;
    throw new UnexpectedAnswer(`The answer ${lack}.`, status);
  }
  if ("receipt" in found) texts.set(found, text);
  return found;
}

/**
 * The JSON text of an answer. Save it to check its receipt at any time. If the answer was changed,
 * this is the text of the changed answer.
 */
export function textOf(answer: object): string {
  const now = JSON.stringify(answer);
  const came = texts.get(answer)?.();
  return came !== undefined && JSON.stringify(JSON.parse(came)) === now ? came : now;
}
