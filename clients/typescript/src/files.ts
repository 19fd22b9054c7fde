/** Files of a session. Paths are relative to its workspace. */

import type { Asked } from "./options.js";
import { bytesOf } from "./platform.js";
import type { File } from "./shapes.js";
import type { Call, Params, Transport } from "./transport.js";
import { paged } from "./waiting.js";

export class SessionFiles {
  private readonly path: string;

  constructor(private readonly transport: Transport, sessionPath: string) {
    this.path = `${sessionPath}/files`;
  }

  /** List a folder, `depth` levels deep. */
  list(path = "", options: Asked & { depth?: number } = {}): AsyncGenerator<File, void, void> {
    const { signal, depth } = options;
    const call = this.call("GET", "", { path: path || null, depth }, { signal });
    return paged(this.transport, call, "entries");
  }

  async read(path: string, options: Asked = {}): Promise<Uint8Array> {
    return await this.transport.bytes(this.call("GET", "/content", { path }, options));
  }

  /** Download a file piece by piece, for files of any size. */
  async *pieces(path: string, options: Asked = {}): AsyncGenerator<Uint8Array, void, void> {
    yield* (await this.transport.open(this.call("GET", "/content", { path }, options))).pieces();
  }

  /** Write a whole file. Replaces an existing one; creates missing folders. */
  async write(path: string, content: string | Uint8Array, options: Asked = {}): Promise<File> {
    const call = this.call("PUT", "/content", { path }, options);
    return await this.transport.json<File>(
      { ...call, content: bytesOf(content), headers: BYTES },
      "path",
    );
  }

  /** Remove a file, or a folder with its contents. */
  async remove(path: string, options: Asked = {}): Promise<void> {
    await this.transport.bytes(this.call("DELETE", "", { path }, options));
  }

  async move(source: string, target: string, options: Asked = {}): Promise<File> {
    const call = this.call("POST", "/move", {}, options);
    const json = { from: source, to: target };
    return await this.transport.json<File>({ ...call, json, repeatable: false }, "path");
  }

  /** Create a folder and its parents. Returns false if it existed. */
  async mkdir(path: string, options: Asked = {}): Promise<boolean> {
    const call = { ...this.call("POST", "/mkdir", {}, options), json: { path } };
    return (await this.transport.json<{ created: boolean }>(call, "created")).created;
  }

  /** Download a folder as a tar archive. */
  async archive(path = "", options: Asked = {}): Promise<Uint8Array> {
    return await this.transport.bytes(
      this.call("GET", "/archive", { path: path || null }, options),
    );
  }

  /** Unpack a tar archive into a folder. Returns the number of its members. */
  async unpack(archive: Uint8Array, path = "", options: Asked = {}): Promise<number> {
    const call = this.call("PUT", "/archive", { path: path || null }, options);
    const sent = { ...call, content: archive, headers: TAR };
    return (await this.transport.json<{ entries: number }>(sent, "entries")).entries;
  }

  private call(method: Call["method"], below: string, params: Params, { signal }: Asked): Call {
    return { method, path: this.path + below, params, repeatable: true, signal };
  }
}

const BYTES = { "Content-Type": "application/octet-stream" };
const TAR = { "Content-Type": "application/x-tar" };
