/** When a request is sent again, and after how long. */

import { ServiceError, UnexpectedAnswer, Unreachable } from "./errors.js";

/**
 * At most `tries` requests in all, with pauses of at most `seconds` together. Where the answer
 * names a longer pause than is left (`Retry-After`), its error is thrown at once.
 */
export interface Retries {
  tries: number;
  seconds: number;
}

export const RETRIES: Retries = { tries: 5, seconds: 60 };
export const NEVER: Retries = { tries: 1, seconds: 0 };

// Refused before anything was done.
const REFUSED = 429;
const LATER = [429, 502, 503];
const OF_PROXIES = [502, 503, 504];
const NOT_CONFIGURED = "SB001";

/**
 * Seconds until the request is sent again after this attempt, the first being 1; null where it is
 * not. What is not repeatable is sent again only where it was certainly not carried out.
 */
export function pauseAfter(
  error: unknown,
  retries: Retries,
  attempt: number,
  waited: number,
  repeatable: boolean,
): number | null {
  if (attempt >= retries.tries || !mayHelp(error, repeatable)) return null;
  const told = error instanceof ServiceError ? error.retryAfter : null;
  // Those who were refused together are not to come back together.
  const wait = told ?? Math.min(2 ** (attempt - 1), 8) * (0.5 + Math.random() / 2);
  return waited + wait <= retries.seconds ? wait : null;
}

function mayHelp(error: unknown, repeatable: boolean): boolean {
  if (error instanceof Unreachable) return repeatable || !error.sent;
  if (error instanceof UnexpectedAnswer) {
    return repeatable && error.status !== undefined && OF_PROXIES.includes(error.status);
  }
  if (!(error instanceof ServiceError) || error.ran || error.code === NOT_CONFIGURED) return false;
  return error.status === REFUSED || (repeatable && LATER.includes(error.status));
}
