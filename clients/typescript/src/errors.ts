/** The errors of the client. Code that fails is a result, not an error. */

/** Any of the errors below. */
export class CofferdamError extends Error {
  /** The id of the execution, or null if none is known. */
  id: string | null = null;

  constructor(message: string, options?: { cause?: unknown }) {
    super(message, options);
    this.name = new.target.name;
  }
}

/** The service did not answer, or its answer was lost. */
export class Unreachable extends CofferdamError {
  /** The request may have reached the service. */
  readonly sent: boolean;
  /** The service was reached, but sent nothing for too long. */
  readonly silent: boolean;

  constructor(message: string, given: { sent: boolean; silent?: boolean; cause?: unknown }) {
    super(message, { cause: given.cause });
    this.sent = given.sent;
    this.silent = given.silent ?? false;
  }
}

/** A stream ended too early. `after` is the number of the last event that was received. */
export class ConnectionLost extends Unreachable {
  constructor(message: string, id: string | null, readonly after: number, cause?: unknown) {
    super(message, { sent: true, cause });
    this.id = id;
  }
}

/** The execution `id` still runs; the time to wait for it is over. */
export class StillRunning extends CofferdamError {
  constructor(id: string, seconds: number) {
    super(`The execution ${id} has not ended within ${seconds} s.`);
    this.id = id;
  }
}

/** The answer is not one of Cofferdam's. `status` is the HTTP status, if known. */
export class UnexpectedAnswer extends CofferdamError {
  constructor(message: string, readonly status?: number) {
    super(message);
  }
}

/** The URL or the API key is missing or wrong. */
export class InvalidSettings extends CofferdamError {}

/** The admin API refused the request. `details` are the reasons, by field or as a text. */
export class AdminRefused extends CofferdamError {
  constructor(readonly status: number, message: string, readonly details: unknown) {
    super(message);
  }
}

interface Refusal {
  error: { code: string; message?: string; field?: string | null; ran?: boolean | null };
  id?: string | null;
  receipt?: Record<string, unknown> | null;
}

/** The service refused the request, or failed. */
export class ServiceError extends CofferdamError {
  /** SB001 to SB009, or a word such as `not_found`. */
  readonly code: string;
  /** The name of the field to change. */
  readonly field: string | null;
  /** Whether any code ran; null if unknown. */
  readonly ran: boolean | null;
  readonly receipt: Record<string, unknown> | null;

  constructor(
    /** The HTTP status. */
    readonly status: number,
    readonly body: Refusal,
    /** Seconds. */
    readonly retryAfter: number | null = null,
  ) {
    super(`${body.error.code}: ${body.error.message ?? ""}`);
    this.code = body.error.code;
    this.field = body.error.field ?? null;
    this.ran = body.error.ran ?? null;
    this.id = body.id ?? null;
    this.receipt = body.receipt ?? null;
  }
}

/** SB001: the operator has to configure a provider. */
export class ProviderNotInitialized extends ServiceError {}
/** SB002 and `bad_request`: correct the field that `field` names. */
export class InvalidRequest extends ServiceError {}
/** SB003: the service cannot reach its provider. */
export class ConnectionFailed extends ServiceError {}
/** SB004: the provider could not create a sandbox. */
export class CreationFailed extends ServiceError {}
/** SB005, where the service reports it as an error and not as a result. */
export class ExecutionTimeout extends ServiceError {}
/** SB006, where the service reports it as an error and not as a result. */
export class OutOfMemory extends ServiceError {}
/** SB007: the policy does not allow the code. */
export class Blocked extends ServiceError {}
/** SB008: the quota that `field` names is used up. Wait `retryAfter` seconds. */
export class RateLimited extends ServiceError {}
/** SB009: the provider is unavailable. Code may have run, unless `ran` is false. */
export class ProviderUnavailable extends ServiceError {}
/** The API key is missing, wrong, expired or revoked. */
export class Unauthenticated extends ServiceError {}
/** The API key lacks the permission for this request. */
export class Forbidden extends ServiceError {}
/** The object does not exist, or belongs to another tenant. */
export class NotFound extends ServiceError {}
/** The session or execution has ended, or is busy. */
export class Conflict extends ServiceError {}

const BY_CODE: ReadonlyMap<string, typeof ServiceError> = new Map([
  ["SB001", ProviderNotInitialized],
  ["SB002", InvalidRequest],
  ["SB003", ConnectionFailed],
  ["SB004", CreationFailed],
  ["SB005", ExecutionTimeout],
  ["SB006", OutOfMemory],
  ["SB007", Blocked],
  ["SB008", RateLimited],
  ["SB009", ProviderUnavailable],
  ["bad_request", InvalidRequest],
  ["unauthenticated", Unauthenticated],
  ["forbidden", Forbidden],
  ["not_found", NotFound],
  ["conflict", Conflict],
]);

/** The error for an answer of the service. */
export function errorOf(
  status: number,
  body: unknown,
  retryAfter: number | null = null,
): CofferdamError {
  const said = (body ?? {}) as { error?: unknown; details?: unknown };
  if (typeof said.error === "string") return new AdminRefused(status, said.error, said.details);
  const code = (said.error as Refusal["error"] | null | undefined)?.code;
  if (typeof code !== "string") {
    return new UnexpectedAnswer(`HTTP ${status}, and not an error of Cofferdam's.`, status);
  }
  return new (BY_CODE.get(code) ?? ServiceError)(status, body as Refusal, retryAfter);
}
