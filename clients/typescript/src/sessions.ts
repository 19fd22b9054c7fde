/** Sessions: sandboxes that keep variables and files between runs. */

import { SessionFiles } from "./files.js";
import {
  commandCall,
  runCall,
  type Asked,
  type CellOptions,
  type CellWords,
  type CommandOptions,
  type CommandWords,
  type Streaming,
} from "./options.js";
import { BackgroundProcess } from "./processes.js";
import type { ContextRequest, PatchedSessionChanges } from "./requests.js";
import type { Context, Execution, Process, Session, Snapshot } from "./shapes.js";
import { OF_EXECUTION, RunStream } from "./streams.js";
import { part, type Call, type Transport } from "./transport.js";
import { ended } from "./waiting.js";

export const SESSIONS = "/api/v1/sessions";
export const OF_SESSION = ["id", "state"] as const;

/** One session. `info` is its last known state. */
export class OpenSession {
  readonly files: SessionFiles;
  private readonly path: string;

  constructor(private readonly transport: Transport, public info: Session) {
    this.path = `${SESSIONS}/${part(info.id)}`;
    this.files = new SessionFiles(transport, this.path);
  }

  get id(): string {
    return this.info.id;
  }

  /** Cancel its runs and delete its saved files. Closing it twice is no error. */
  async close(options: Asked = {}): Promise<void> {
    await this.transport.bytes(this.call("DELETE", "", options));
  }

  async refresh(options: Asked = {}): Promise<Session> {
    return await this.told(this.call("GET", "", options));
  }

  async change(changes: PatchedSessionChanges, options: Asked = {}): Promise<Session> {
    return await this.told({ ...this.call("PATCH", "", options), json: changes });
  }

  /** Run code and return the result, like `run` of the client. */
  async run(code: string, options: CellOptions = {}): Promise<Execution> {
    const call = await runCall(`${this.path}/executions`, code, options);
    return await ended(this.transport, call, options.wait_seconds);
  }

  /** Queue code and return its record at once. */
  async submit(code: string, options: CellWords & Asked = {}): Promise<Execution> {
    const call = await runCall(`${this.path}/executions`, code, options, "async");
    return await this.transport.json<Execution>(call, ...OF_EXECUTION);
  }

  /** Run code and read its events, like `stream` of the client. */
  stream(code: string, options: CellWords & Streaming = {}): RunStream {
    const request = (): Promise<Call> => runCall(`${this.path}/executions`, code, options);
    return new RunStream(this.transport, request, { detached: options.detach ?? false });
  }

  /** Run a command and return the result. A list is the command's words; a string goes to the
   * shell. The request is retried only if it certainly did not arrive. */
  async command(command: string | string[], options: CommandOptions = {}): Promise<Execution> {
    const call = commandCall(`${this.path}/processes`, command, options);
    return await ended(this.transport, call, options.wait_seconds);
  }

  streamCommand(command: string | string[], options: CommandWords & Streaming = {}): RunStream {
    const call = commandCall(`${this.path}/processes`, command, options);
    return new RunStream(this.transport, () => call, { detached: options.detach ?? false });
  }

  /** Start a background command, which ends with the session at the latest. */
  async start(
    command: string | string[],
    options: Omit<CommandWords, "timeout"> & Asked = {},
  ): Promise<BackgroundProcess> {
    const call = commandCall(`${this.path}/processes`, command, options, true);
    const found = await this.transport.json<Process>(call, "pid", "execution");
    return new BackgroundProcess(this.transport, this.path, found);
  }

  /** The background commands that run, and those that ended recently. */
  async processes(options: Asked = {}): Promise<BackgroundProcess[]> {
    const found = await this.listed<Process>("/processes", options);
    return found.map((each) => new BackgroundProcess(this.transport, this.path, each));
  }

  async contexts(options: Asked = {}): Promise<Context[]> {
    return await this.listed<Context>("/contexts", options);
  }

  /** Start another interpreter. Run code in it with the option `context`. */
  async createContext(
    language: string,
    options: Omit<ContextRequest, "language"> & Asked = {},
  ): Promise<Context> {
    const { signal, ...said } = options;
    const call = { ...this.call("POST", "/contexts", { signal }), json: { language, ...said } };
    return await this.transport.json<Context>(call, "id");
  }

  async restartContext(id: string, options: Asked = {}): Promise<Context> {
    const call = this.call("POST", `/contexts/${part(id)}/restart`, options);
    return await this.transport.json<Context>({ ...call, json: {} }, "id");
  }

  async endContext(id: string, options: Asked = {}): Promise<void> {
    await this.transport.bytes(this.call("DELETE", `/contexts/${part(id)}`, options));
  }

  /** Interrupt the run in a context. Returns false if nothing ran. */
  async interrupt(context?: string, options: Asked = {}): Promise<boolean> {
    const call = { ...this.call("POST", "/interrupt", options), json: { context } };
    return (await this.transport.json<{ interrupted: boolean }>(call, "interrupted")).interrupted;
  }

  /** End all contexts and commands. Files are kept. */
  async reset(options: Asked = {}): Promise<Session> {
    return await this.told({ ...this.call("POST", "/reset", options), json: {} });
  }

  /** Save the current files. New sessions can start with them. */
  async snapshot(name?: string, options: Asked = {}): Promise<Snapshot> {
    const call = { ...this.call("POST", "/snapshot", options), json: { name } };
    return await this.transport.json<Snapshot>(call, "id");
  }

  private call(method: Call["method"], below: string, { signal }: Asked): Call {
    return { method, path: this.path + below, repeatable: method !== "POST", signal };
  }

  private async told(call: Call): Promise<Session> {
    this.info = await this.transport.json<Session>(call, ...OF_SESSION);
    return this.info;
  }

  private async listed<Item>(below: string, options: Asked): Promise<Item[]> {
    const call = this.call("GET", below, options);
    return (await this.transport.json<{ results: Item[] }>(call, "results")).results;
  }
}
