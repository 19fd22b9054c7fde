/** Background commands of a session. */

import type { Asked } from "./options.js";
import { bytesOf } from "./platform.js";
import type { SignalEnum } from "./requests.js";
import type { Execution, Process } from "./shapes.js";
import { RunStream, followed } from "./streams.js";
import type { Call, Transport } from "./transport.js";

/** One background command. `info` is its state when it was requested. */
export class BackgroundProcess {
  private readonly path: string;

  constructor(
    private readonly transport: Transport,
    sessionPath: string,
    readonly info: Process,
  ) {
    this.path = `${sessionPath}/processes/${info.pid}`;
  }

  /** The number of the command. In a new sandbox of the session numbers start at 1 again. */
  get pid(): number {
    return this.info.pid;
  }

  /** The events after event number `after`. Leaving the loop cancels nothing. */
  follow(after = 0, options: Asked = {}): RunStream {
    const call = followed(`${this.path}/events`, after, options.signal);
    const following = { detached: true, id: this.info.execution, after };
    return new RunStream(this.transport, () => call, following);
  }

  /** Wait until the command has ended, and return its record. */
  async wait(options: Asked = {}): Promise<Execution> {
    return await this.follow(0, options).done();
  }

  /** Send at most 1 MiB to the command's input. With `close` the input ends afterwards. */
  async write(
    data: string | Uint8Array,
    options: Asked & { close?: boolean } = {},
  ): Promise<void> {
    const params = options.close ? { close: 1 } : {};
    const headers = { "Content-Type": "application/octet-stream" };
    const call = this.post("/stdin", options);
    await this.transport.bytes({ ...call, params, headers, content: bytesOf(data) });
  }

  /** Send a signal to the command and its process group. Returns false if it had ended. */
  async signal(name: SignalEnum = "SIGTERM", options: Asked = {}): Promise<boolean> {
    const call = { ...this.post("/signal", options), json: { signal: name } };
    return (await this.transport.json<{ signalled: boolean }>(call, "signalled")).signalled;
  }

  /** Change the size of the command's terminal. */
  async resize(cols: number, rows: number, options: Asked = {}): Promise<void> {
    await this.transport.bytes({ ...this.post("/resize", options), json: { cols, rows } });
  }

  private post(below: string, { signal }: Asked): Call {
    return { method: "POST", path: this.path + below, repeatable: false, signal };
  }
}
