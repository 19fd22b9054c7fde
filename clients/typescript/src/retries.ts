/** When a request is sent again, and after which pause. */

import { ServiceError, UnexpectedAnswer, Unreachable } from "./errors.js";

/**
 * At most `tries` requests, with pauses of at most `seconds` in total. If the answer's
 * `Retry-After` is longer than the time left, its error is thrown at once.
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
 * Seconds until the request is sent again after this attempt (from 1); null for no retry. A
 * request that is not repeatable is sent again only if it certainly had no effect.
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
