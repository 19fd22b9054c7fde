/** What goes wrong, by what to do about it. Code that fails is an answer and none of these. */

/** Any of the errors below. */
export class CofferdamError extends Error {
  /** Of the execution, where one is known to be recorded. */
  id: string | null = null;

  constructor(message: string, options?: { cause?: unknown }) {
    super(message, options);
    this.name = new.target.name;
  }
}

/** Nobody answered, or the answer was lost. */
export class Unreachable extends CofferdamError {
  /** The request may have reached the service. */
  readonly sent: boolean;
  /** It was reached, and has said nothing for too long. */
  readonly silent: boolean;

  constructor(message: string, given: { sent: boolean; silent?: boolean; cause?: unknown }) {
    super(message, { cause: given.cause });
    this.sent = given.sent;
    this.silent = given.silent ?? false;
  }
}

/** A stream broke off before its end. `after` is the number of the last event that came. */
export class ConnectionLost extends Unreachable {
  constructor(message: string, id: string | null, readonly after: number, cause?: unknown) {
    super(message, { sent: true, cause });
    this.id = id;
  }
}

/** The execution `id` goes on, and was not waited for any longer. */
export class StillRunning extends CofferdamError {
  constructor(id: string, seconds: number) {
    super(`The execution ${id} has not ended within ${seconds} s.`);
    this.id = id;
  }
}

/** What answered is no Cofferdam, or one of another version. `status` is HTTP's, where known. */
export class UnexpectedAnswer extends CofferdamError {
  constructor(message: string, readonly status?: number) {
    super(message);
  }
}

/** The address or the API key is missing or wrong. */
export class InvalidSettings extends CofferdamError {}

/** The admin API refused. `details` say why, by field or as a text. */
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

/** The service refused, or could not do it. */
export class ServiceError extends CofferdamError {
  /** SB001 to SB009, or a word such as `not_found`. */
  readonly code: string;
  /** What to change. */
  readonly field: string | null;
  /** Whether any code ran; null where it is not known. */
  readonly ran: boolean | null;
  readonly receipt: Record<string, unknown> | null;

  constructor(
    /** HTTP's. */
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

/** SB001: whoever runs the service has to configure a provider. */
export class ProviderNotInitialized extends ServiceError {}
/** SB002 and `bad_request`: change `field`. */
export class InvalidRequest extends ServiceError {}
/** SB003: the service cannot reach its provider. */
export class ConnectionFailed extends ServiceError {}
/** SB004: no sandbox could be made. */
export class CreationFailed extends ServiceError {}
/** SB005, where it is no answer but an error. */
export class ExecutionTimeout extends ServiceError {}
/** SB006, where it is no answer but an error. */
export class OutOfMemory extends ServiceError {}
/** SB007: the policy does not allow it. */
export class Blocked extends ServiceError {}
/** SB008: a quota is used up, which `field` names. Wait `retryAfter` seconds. */
export class RateLimited extends ServiceError {}
/** SB009: code may have run, unless `ran` is false. */
export class ProviderUnavailable extends ServiceError {}
/** The API key is missing, wrong, expired or revoked. */
export class Unauthenticated extends ServiceError {}
/** The API key may not do this. */
export class Forbidden extends ServiceError {}
/** It is not there, or not yours. */
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

/** The error that an answer stands for. */
export function errorOf(
  status: number,
  body: unknown,
  retryAfter: number | null = null,
): CofferdamError {
  const said = (body ?? {}) as { error?: unknown; details?: unknown };
  if (typeof said.error === "string") return new AdminRefused(status, said.error, said.details);
  const code = (said.error as Refusal["error"] | null | undefined)?.code;
  if (typeof code !== "string") {
    return new UnexpectedAnswer(`HTTP ${status}, and no error as Cofferdam answers it.`, status);
  }
  return new (BY_CODE.get(code) ?? ServiceError)(status, body as Refusal, retryAfter);
}
