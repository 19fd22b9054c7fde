/** The client: runs, their records, and the way to sessions. */

import { SandboxAdmin } from "./admin.js";
import {
  runCall,
  type Asked,
  type RunOptions,
  type RunWords,
  type Streaming,
  type SubmitOptions,
} from "./options.js";
import { variable } from "./platform.js";
import { RETRIES, type Retries } from "./retries.js";
import { OF_SESSION, OpenSession, SESSIONS } from "./sessions.js";
import type { ExecutionFilters, SessionFilters, SessionRequest } from "./requests.js";
import type {
  Execution,
  ExecutionSummary,
  Languages,
  LedgerKeys,
  Session,
  Usage,
} from "./shapes.js";
import { EXECUTIONS, OF_EXECUTION, RunStream, followed } from "./streams.js";
import { Transport, part, type Call, type Params } from "./transport.js";
import { ended, paged, waitFor } from "./waiting.js";

export interface Settings {
  /** COFFERDAM_URL where it is not given, or else the service of this machine. */
  url?: string;
  /** COFFERDAM_API_KEY where it is not given. */
  apiKey?: string;
  fetch?: typeof fetch;
  retries?: Partial<Retries>;
  /** Seconds that the service may be silent. A run may take 300, and wait for its turn before. */
  timeout?: number;
}

/** One service and one API key. Throws InvalidSettings; each method throws CofferdamError. */
export class Cofferdam {
  /** For keys of the scope `admin`. */
  readonly admin: SandboxAdmin;
  private readonly transport: Transport;

  constructor(settings: Settings = {}) {
    const url = settings.url || variable("COFFERDAM_URL") || "http://127.0.0.1:8000";
    this.transport = new Transport({
      url: url.replace(/\/+$/, ""),
      apiKey: (settings.apiKey ?? variable("COFFERDAM_API_KEY") ?? "").trim(),
      // A browser's does not work as the method of something else.
      fetch: settings.fetch ?? ((input, init) => fetch(input, init)),
      retries: { ...RETRIES, ...settings.retries },
      timeout: settings.timeout ?? 330,
    });
    this.admin = new SandboxAdmin(this.transport);
  }

  /**
   * What came of code, whatever that is: look at `status`. However often it is sent, it runs once.
   * Where it is queued, or waits for a person, its end is waited for `wait_seconds`. Throws
   * ServiceError where it could not be run, StillRunning.
   */
  async run(code: string, options: RunOptions = {}): Promise<Execution> {
    const call = await runCall(EXECUTIONS, code, options);
    return await ended(this.transport, call, options.wait_seconds);
  }

  /** Have code run later, and be told at once that it is queued. `wait` has its end. */
  async submit(code: string, options: SubmitOptions = {}): Promise<Execution> {
    const call = await runCall(EXECUTIONS, code, options, "async");
    return await this.transport.json<Execution>(call, ...OF_EXECUTION);
  }

  /** The record of an execution, once it has ended. Throws StillRunning. */
  async wait(id: string, options: Asked & { seconds?: number } = {}): Promise<Execution> {
    return await waitFor(this.transport, id, options.seconds, options.signal);
  }

  /**
   * Code told event by event. Leaving the loop over it cancels the run; with `detach` it goes on,
   * and a connection that breaks is taken up again.
   */
  stream(code: string, options: RunWords & Streaming = {}): RunStream {
    const request = (): Promise<Call> => runCall(EXECUTIONS, code, options);
    return new RunStream(this.transport, request, { detached: options.detach ?? false });
  }

  /** The events of an execution behind the one of this number. Leaving them ends nothing. */
  follow(id: string, after = 0, options: Asked = {}): RunStream {
    const call = followed(`${EXECUTIONS}/${part(id)}/events`, after, options.signal);
    return new RunStream(this.transport, () => call, { detached: true, id, after });
  }

  async execution(id: string, options: Asked = {}): Promise<Execution> {
    const call = get(`${EXECUTIONS}/${part(id)}`, options);
    return await this.transport.json<Execution>(call, ...OF_EXECUTION);
  }

  /** Those of the tenant, newest first; fetched page by page. */
  executions(
    filters: ExecutionFilters & Asked = {},
  ): AsyncGenerator<ExecutionSummary, void, void> {
    return paged(this.transport, get(EXECUTIONS, filters));
  }

  /** Throws Conflict where it has ended. */
  async cancel(id: string, options: Asked = {}): Promise<Execution> {
    const call = get(`${EXECUTIONS}/${part(id)}/cancel`, options);
    return await this.transport.json<Execution>(
      { ...call, method: "POST", json: {}, repeatable: false },
      ...OF_EXECUTION,
    );
  }

  /** It is hostile until you have looked at it: untrusted code wrote it, and chose its name. */
  async artifact(id: string, name: string, options: Asked = {}): Promise<Uint8Array> {
    const path = `${EXECUTIONS}/${part(id)}/artifacts/${name.split("/").map(part).join("/")}`;
    return await this.transport.bytes(get(path, options));
  }

  /**
   * A sandbox that stays. Sent twice it would be two, so it is not sent again by itself where it
   * may have arrived.
   */
  async openSession(wanted: SessionRequest = {}, options: Asked = {}): Promise<OpenSession> {
    const call: Call = { ...get(SESSIONS, options), method: "POST", json: wanted };
    const info = await this.transport.json<Session>({ ...call, repeatable: false }, ...OF_SESSION);
    return new OpenSession(this.transport, info);
  }

  /** Work in a session that is closed afterwards, whatever happens. */
  async inSession<Result>(
    wanted: SessionRequest,
    work: (session: OpenSession) => Promise<Result>,
    options: Asked = {},
  ): Promise<Result> {
    const session = await this.openSession(wanted, options);
    try {
      return await work(session);
    } finally {
      await session.close();
    }
  }

  /** One that was opened before. */
  async session(id: string, options: Asked = {}): Promise<OpenSession> {
    const call = get(`${SESSIONS}/${part(id)}`, options);
    const info = await this.transport.json<Session>(call, ...OF_SESSION);
    return new OpenSession(this.transport, info);
  }

  /** Those of the tenant; fetched page by page. */
  async *sessions(filters: SessionFilters & Asked = {}): AsyncGenerator<OpenSession, void, void> {
    for await (const info of paged<Session>(this.transport, get(SESSIONS, filters))) {
      yield new OpenSession(this.transport, info);
    }
  }

  /** What can be run now. */
  async languages(options: Asked = {}): Promise<string[]> {
    const call = get("/api/v1/languages", options);
    return (await this.transport.json<Languages>(call, "languages")).languages;
  }

  /** The tenant's quotas, and what is used of them. */
  async usage(options: Asked = {}): Promise<Usage> {
    return await this.transport.json<Usage>(get("/api/v1/usage", options), "tenant", "quotas");
  }

  /** The public keys of receipts. Keep them: a receipt is checked with those kept before. */
  async ledgerKeys(options: Asked = {}): Promise<LedgerKeys> {
    return await this.transport.json<LedgerKeys>(get("/api/v1/ledger/keys", options), "keys");
  }
}

function get(path: string, { signal, ...params }: Asked): Call {
  return { method: "GET", path, params: params as Params, repeatable: true, signal };
}
