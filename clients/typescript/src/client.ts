/** The client: runs, their records, and sessions. */

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
  /** Default: COFFERDAM_URL, or the service on this machine. */
  url?: string;
  /** Default: COFFERDAM_API_KEY. */
  apiKey?: string;
  fetch?: typeof fetch;
  retries?: Partial<Retries>;
  /** Seconds to wait for the next bytes. A run can take 300, and wait in the queue before. */
  timeout?: number;
}

/** A client of one service. Throws InvalidSettings; each method throws CofferdamError. */
export class Cofferdam {
  /** The admin API, for keys with the scope `admin`. */
  readonly admin: SandboxAdmin;
  private readonly transport: Transport;

  constructor(settings: Settings = {}) {
    const url = settings.url || variable("COFFERDAM_URL") || "http://127.0.0.1:8000";
    this.transport = new Transport({
      url: url.replace(/\/+$/, ""),
      apiKey: (settings.apiKey ?? variable("COFFERDAM_API_KEY") ?? "").trim(),
      // A browser's `fetch` does not work as a method of another object.
      fetch: settings.fetch ?? ((input, init) => fetch(input, init)),
      retries: { ...RETRIES, ...settings.retries },
      timeout: settings.timeout ?? 330,
    });
    this.admin = new SandboxAdmin(this.transport);
  }

  /**
   * Run code and return the result. Check its `status`: code that fails throws no error. Retries
   * never run the code twice. If the run is queued or needs approval, this waits at most
   * `wait_seconds` for its end. Throws ServiceError if the service could not run the code, and
   * StillRunning if the time to wait is over.
   */
  async run(code: string, options: RunOptions = {}): Promise<Execution> {
    const call = await runCall(EXECUTIONS, code, options);
    return await ended(this.transport, call, options.wait_seconds);
  }

  /** Queue code and return its record at once. `wait` waits for the end of the run. */
  async submit(code: string, options: SubmitOptions = {}): Promise<Execution> {
    const call = await runCall(EXECUTIONS, code, options, "async");
    return await this.transport.json<Execution>(call, ...OF_EXECUTION);
  }

  /** Wait until an execution has ended, and return its record. Throws StillRunning. */
  async wait(id: string, options: Asked & { seconds?: number } = {}): Promise<Execution> {
    return await waitFor(this.transport, id, options.seconds, options.signal);
  }

  /**
   * Run code and read its events one by one. Leaving the loop cancels the run. With `detach` the
   * run continues, and after a broken connection the stream resumes.
   */
  stream(code: string, options: RunWords & Streaming = {}): RunStream {
    const request = (): Promise<Call> => runCall(EXECUTIONS, code, options);
    return new RunStream(this.transport, request, { detached: options.detach ?? false });
  }

  /** The events of an execution after number `after`. Leaving the loop cancels nothing. */
  follow(id: string, after = 0, options: Asked = {}): RunStream {
    const call = followed(`${EXECUTIONS}/${part(id)}/events`, after, options.signal);
    return new RunStream(this.transport, () => call, { detached: true, id, after });
  }

  async execution(id: string, options: Asked = {}): Promise<Execution> {
    const call = get(`${EXECUTIONS}/${part(id)}`, options);
    return await this.transport.json<Execution>(call, ...OF_EXECUTION);
  }

  /** The tenant's executions, newest first, fetched page by page. */
  executions(
    filters: ExecutionFilters & Asked = {},
  ): AsyncGenerator<ExecutionSummary, void, void> {
    return paged(this.transport, get(EXECUTIONS, filters));
  }

  /** Cancel an execution and return its record. Throws Conflict if it has ended. */
  async cancel(id: string, options: Asked = {}): Promise<Execution> {
    const call = get(`${EXECUTIONS}/${part(id)}/cancel`, options);
    return await this.transport.json<Execution>(
      { ...call, method: "POST", json: {}, repeatable: false },
      ...OF_EXECUTION,
    );
  }

  /** Download an artifact. Treat it as untrusted: the code that ran wrote it and chose its name. */
  async artifact(id: string, name: string, options: Asked = {}): Promise<Uint8Array> {
    const path = `${EXECUTIONS}/${part(id)}/artifacts/${name.split("/").map(part).join("/")}`;
    return await this.transport.bytes(get(path, options));
  }

  /**
   * Open a session. The request is retried only if it certainly did not arrive, because a second
   * request would open a second session.
   */
  async openSession(wanted: SessionRequest = {}, options: Asked = {}): Promise<OpenSession> {
    const call: Call = { ...get(SESSIONS, options), method: "POST", json: wanted };
    const info = await this.transport.json<Session>({ ...call, repeatable: false }, ...OF_SESSION);
    return new OpenSession(this.transport, info);
  }

  /** Open a session, work in it, and close it afterwards, even after an error. */
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

  /** Get a session that exists already. */
  async session(id: string, options: Asked = {}): Promise<OpenSession> {
    const call = get(`${SESSIONS}/${part(id)}`, options);
    const info = await this.transport.json<Session>(call, ...OF_SESSION);
    return new OpenSession(this.transport, info);
  }

  /** The tenant's sessions, fetched page by page. */
  async *sessions(filters: SessionFilters & Asked = {}): AsyncGenerator<OpenSession, void, void> {
    for await (const info of paged<Session>(this.transport, get(SESSIONS, filters))) {
      yield new OpenSession(this.transport, info);
    }
  }

  /** The languages that can run now. */
  async languages(options: Asked = {}): Promise<string[]> {
    const call = get("/api/v1/languages", options);
    return (await this.transport.json<Languages>(call, "languages")).languages;
  }

  /** The versions of the packages that Python code can import, by name. */
  async packages(options: Asked = {}): Promise<Record<string, string>> {
    const call = get("/api/v1/languages", options);
    const { packages } = await this.transport.json<Languages>(call, "languages");
    const known = Object.values(packages) as { versions: Record<string, string> }[];
    return Object.assign({}, ...known.map((each) => each.versions));
  }

  /** The tenant's quotas and their usage. */
  async usage(options: Asked = {}): Promise<Usage> {
    return await this.transport.json<Usage>(get("/api/v1/usage", options), "tenant", "quotas");
  }

  /** The public keys of receipts. Save them: check receipts with keys saved before. */
  async ledgerKeys(options: Asked = {}): Promise<LedgerKeys> {
    return await this.transport.json<LedgerKeys>(get("/api/v1/ledger/keys", options), "keys");
  }
}

function get(path: string, { signal, ...params }: Asked): Call {
  return { method: "GET", path, params: params as Params, repeatable: true, signal };
}
