/** Commands of a session that run in the background. */

import type { Asked } from "./options.js";
import { bytesOf } from "./platform.js";
import type { SignalEnum } from "./requests.js";
import type { Execution, Process } from "./shapes.js";
import { RunStream, followed } from "./streams.js";
import type { Call, Transport } from "./transport.js";

/** One command. `info` is how it was when it was asked for. */
export class BackgroundProcess {
  private readonly path: string;

  constructor(
    private readonly transport: Transport,
    sessionPath: string,
    readonly info: Process,
  ) {
    this.path = `${sessionPath}/processes/${info.pid}`;
  }

  /** Its number in this sandbox of the session. The next sandbox counts from 1 again. */
  get pid(): number {
    return this.info.pid;
  }

  /** Its events behind the one of this number. Leaving them ends nothing. */
  follow(after = 0, options: Asked = {}): RunStream {
    const call = followed(`${this.path}/events`, after, options.signal);
    const following = { detached: true, id: this.info.execution, after };
    return new RunStream(this.transport, () => call, following);
  }

  /** Its record, once it has ended. */
  async wait(options: Asked = {}): Promise<Execution> {
    return await this.follow(0, options).done();
  }

  /** Its input, at most 1 MiB; with `close` the input ends after it. */
  async write(
    data: string | Uint8Array,
    options: Asked & { close?: boolean } = {},
  ): Promise<void> {
    const params = options.close ? { close: 1 } : {};
    const headers = { "Content-Type": "application/octet-stream" };
    const call = this.post("/stdin", options);
    await this.transport.bytes({ ...call, params, headers, content: bytesOf(data) });
  }

  /** Send a signal to it and its group. Whether it was there. */
  async signal(name: SignalEnum = "SIGTERM", options: Asked = {}): Promise<boolean> {
    const call = { ...this.post("/signal", options), json: { signal: name } };
    return (await this.transport.json<{ signalled: boolean }>(call, "signalled")).signalled;
  }

  /** Give its terminal another size. */
  async resize(cols: number, rows: number, options: Asked = {}): Promise<void> {
    await this.transport.bytes({ ...this.post("/resize", options), json: { cols, rows } });
  }

  private post(below: string, { signal }: Asked): Call {
    return { method: "POST", path: this.path + below, repeatable: false, signal };
  }
}
