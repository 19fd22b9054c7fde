/** Send requests, with retries, and throw the client's errors. */

import { decoded } from "./answers.js";
import { InvalidSettings, Unreachable, errorOf } from "./errors.js";
import { pause } from "./platform.js";
import { pauseAfter, type Retries } from "./retries.js";

export type Params = Record<string, string | number | null | undefined>;

/** A request, before it is sent. */
export interface Call {
  method: "GET" | "POST" | "PUT" | "PATCH" | "DELETE";
  path: string;
  params?: Params;
  json?: unknown;
  content?: Uint8Array;
  headers?: Record<string, string>;
  /** Sending it twice has the same effect as sending it once. */
  repeatable: boolean;
  signal?: AbortSignal | undefined;
}

export interface Service {
  url: string;
  apiKey: string;
  fetch: typeof fetch;
  retries: Retries;
  /** Seconds to wait for the next bytes. */
  timeout: number;
}

// Of Node, Deno and Bun, where it is certain that nothing was sent. Browsers do not tell.
const UNSENT = [
  "ECONNREFUSED",
  "ENOTFOUND",
  "EAI_AGAIN",
  "EHOSTUNREACH",
  "ENETUNREACH",
  "UND_ERR_CONNECT_TIMEOUT",
  "ConnectionRefused",
];
// The patience of Node's own fetch has ended: 300 seconds, whatever is asked for here.
const SILENT = ["UND_ERR_HEADERS_TIMEOUT", "UND_ERR_BODY_TIMEOUT"];
// A longer time than timers know would end at once.
const MOST_MILLISECONDS = 2 ** 31 - 1;

/** One service with one API key. */
export class Transport {
  // Private, so that a printed client does not show the key.
  readonly #service: Service;

  constructor(service: Service) {
    if (!isAddress(service.url)) {
      throw new InvalidSettings("url: Must be a URL such as https://runs.example.");
    }
    if (!/^[\x21-\x7e]+$/.test(service.apiKey)) {
      throw new InvalidSettings("apiKey: Must be a Cofferdam API key, such as cfd_...");
    }
    this.#service = service;
  }

  /** Send a request and return the answer's JSON, which has at least these fields. */
  async json<T extends object>(call: Call, ...fields: Array<keyof T & string>): Promise<T> {
    const answer = await this.open(call);
    return decoded<T>(await answer.text(), fields, answer.status);
  }

  async bytes(call: Call): Promise<Uint8Array> {
    return await (await this.open(call)).bytes();
  }

  /** Send a request and return a successful answer without its body. */
  async open(call: Call): Promise<Answer> {
    let waited = 0;
    for (let attempt = 1; ; attempt += 1) {
      try {
        return await this.once(call);
      } catch (error) {
        const wait = pauseAfter(error, this.#service.retries, attempt, waited, call.repeatable);
        if (wait === null) throw error;
        await pause(wait, call.signal);
        waited += wait;
      }
    }
  }

  private async once(call: Call): Promise<Answer> {
    const { url, timeout, apiKey } = this.#service;
    const patience = new Patience(url, timeout, call.signal);
    const headers: Record<string, string> = { "X-API-Key": apiKey, ...call.headers };
    if (call.json !== undefined) headers["Content-Type"] = "application/json";
    const request = {
      method: call.method,
      headers,
      body: call.json === undefined ? call.content : JSON.stringify(call.json),
      // The key is for this service alone.
      redirect: "manual",
      signal: patience.signal,
    } as RequestInit;
    const address = url + call.path + query(call.params);
    let response: Response;
    try {
      response = await this.#service.fetch(address, request);
    } catch (problem) {
      throw patience.ended(problem);
    }
    const answer = new Answer(response, patience);
    if (response.ok) return answer;
    const text = await answer.text();
    const told = response.headers.get("Retry-After") ?? "";
    throw errorOf(answer.status, jsonOrNull(text), /^\d+$/.test(told) ? Number(told) : null);
  }
}

/** An answer, to be read once. */
export class Answer {
  readonly status: number;

  constructor(private readonly response: Response, private readonly patience: Patience) {
    this.status = response.status;
  }

  get isJson(): boolean {
    return (this.response.headers.get("Content-Type") ?? "").startsWith("application/json");
  }

  async *pieces(): AsyncGenerator<Uint8Array, void, void> {
    const reader = this.response.body?.getReader();
    try {
      while (reader !== undefined) {
        this.patience.renew();
        const { done, value } = await reader.read();
        // The time that its reader takes for it is no silence of the service.
        this.patience.rest();
        if (done) return;
        yield value;
      }
    } catch (problem) {
      throw this.patience.ended(problem);
    } finally {
      this.close();
    }
  }

  async bytes(): Promise<Uint8Array> {
    const pieces: Uint8Array[] = [];
    for await (const piece of this.pieces()) pieces.push(piece);
    return joined(pieces);
  }

  async text(): Promise<string> {
    return new TextDecoder().decode(await this.bytes());
  }

  /** Release the connection, even if the answer was not read. */
  close(): void {
    this.patience.leave();
  }
}

/** The timeout of one request: it starts again with each piece, and ends if the caller aborts. */
class Patience {
  private readonly controller = new AbortController();
  private readonly leaving = (): void => this.controller.abort();
  private timer: ReturnType<typeof setTimeout> | undefined;
  private isOver = false;

  constructor(
    private readonly url: string,
    private readonly timeout: number,
    private readonly wanted?: AbortSignal,
  ) {
    if (wanted?.aborted) throw wanted.reason;
    wanted?.addEventListener("abort", this.leaving);
    this.renew();
  }

  get signal(): AbortSignal {
    return this.controller.signal;
  }

  rest(): void {
    clearTimeout(this.timer);
  }

  renew(): void {
    this.rest();
    const milliseconds = this.timeout * 1000;
    if (milliseconds > MOST_MILLISECONDS) return;
    this.timer = setTimeout(() => {
      this.isOver = true;
      this.controller.abort();
    }, milliseconds);
  }

  leave(): void {
    this.rest();
    this.wanted?.removeEventListener("abort", this.leaving);
    this.controller.abort();
  }

  /** The error for a failure of the request. */
  ended(problem: unknown): unknown {
    this.leave();
    if (this.wanted?.aborted) return this.wanted.reason;
    const { url, timeout } = this;
    const why = reasons(problem);
    const codes = why.map((each) => String(each.code));
    if (this.isOver || codes.some((each) => SILENT.includes(each))) {
      const message = this.isOver ? `for ${timeout} s` : "for too long";
      const given = { sent: true, silent: true, cause: problem };
      return new Unreachable(`${url} sent nothing ${message}.`, given);
    }
    const sent = !codes.some((each) => UNSENT.includes(each));
    const message = why.map((each) => each.message).join(": ");
    return new Unreachable(`${url} did not answer: ${message}`, { sent, cause: problem });
  }
}

/** An error and what caused it. */
function reasons(problem: unknown): Array<{ code?: unknown; message?: unknown }> {
  const found = [];
  for (let each = problem; each instanceof Error && found.length < 5; each = each.cause) {
    found.push(each);
  }
  return found;
}

export function joined(pieces: Uint8Array[]): Uint8Array {
  const whole = new Uint8Array(pieces.reduce((sum, each) => sum + each.length, 0));
  let at = 0;
  for (const each of pieces) {
    whole.set(each, at);
    at += each.length;
  }
  return whole;
}

function query(params: Params = {}): string {
  const said = Object.entries(params).filter(([, value]) => value !== undefined && value !== null);
  const text = new URLSearchParams(said.map(([name, value]) => [name, String(value)])).toString();
  return text && `?${text}`;
}

function isAddress(url: string): boolean {
  try {
    const { protocol, username, password, search, hash } = new URL(url);
    return /^https?:$/.test(protocol) && !(username || password || search || hash);
  } catch {
    return false;
  }
}

function jsonOrNull(text: string): unknown {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

/** The next page. Only the query of its URL is used, so the key goes to this service alone. */
export function nextOf(call: Call, url: unknown): Call | null {
  if (typeof url !== "string") return null;
  const params = Object.fromEntries(new URL(url, "http://service").searchParams);
  return { ...call, params };
}

/** Encode a name as one part of a path. Throws TypeError for an invalid name. */
export function part(name: string): string {
  if (["", ".", ".."].includes(name)) throw new TypeError(`${JSON.stringify(name)} is not a name`);
  return encodeURIComponent(name);
}
