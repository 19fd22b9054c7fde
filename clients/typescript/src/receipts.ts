/** Check receipts without the service. The rules are those of examples/receipts. */

import { textOf } from "./answers.js";
import { CofferdamError } from "./errors.js";
import { Numeral, canonical, parsed, sorted, written } from "./lossless.js";
import type { Json, Members } from "./lossless.js";
import { bytesOf, ofBase64, webCrypto } from "./platform.js";
import type { Execution, LedgerKeys } from "./shapes.js";

/** The document is not a receipt and has none. */
export class NotCheckable extends CofferdamError {}

export interface ReceiptCheck {
  isValid: boolean;
  /** The differences. */
  problems: string[];
  /** Fields of the answer that the receipt does not cover. They are no problem. */
  notBound: string[];
  /** Files that were not given for comparison. They are no problem. */
  notCompared: string[];
}

export interface Compared {
  /** The code that was sent. */
  code?: string | Uint8Array;
  /** The downloaded files by their names. */
  artifacts?: Record<string, Uint8Array>;
}

/**
 * Check that an answer, or a receipt alone, is unchanged since the service signed it. A string is
 * the JSON of one, from `textOf` or saved by another client.
 *
 * `keys` is an earlier answer of `ledgerKeys()` that you saved yourself: keys that arrive with the
 * receipt prove nothing. Throws NotCheckable.
 */
export async function checkReceipt(
  answer: Execution | Record<string, unknown> | string,
  keys: Pick<LedgerKeys, "keys">,
  compared: Compared = {},
): Promise<ReceiptCheck> {
  try {
    const document = members(parsed(typeof answer === "string" ? answer : textOf(answer)));
    const receipt = members(document.has("receipt") ? document.get("receipt") : document);
    const check = new Check(receipt);
    await check.signature(keys);
    if (document.has("receipt")) await check.answer(document);
    await check.files(compared);
    return check.found();
  } catch (problem) {
    if (problem instanceof NotCheckable) throw problem;
    throw new NotCheckable(`It cannot be checked: ${String(problem)}`, { cause: problem });
  }
}

const FORMAT = 1;
// What is signed starts with it.
const DOMAIN = "cofferdam-ledger-1\n";
// The fields whose words are others in the receipt. What is not here is compared by its own name.
const HANDLED = [
  ...["id", "receipt", "error", "result", "has_result", "outputs", "stdout", "stderr"],
  ...["artifacts", "exception", "on_behalf_of"],
];
// One hash in the receipt is over all of these together.
const DETAILS = ["created_at", "cost", "hops", "timings"];
const OF_ARTIFACTS = ["name", "mime_type", "size_bytes"];

class Check {
  private readonly problems: string[] = [];
  private readonly unbound: string[] = [];
  private readonly missing: string[] = [];

  constructor(private readonly receipt: Members) {}

  found(): ReceiptCheck {
    return {
      isValid: this.problems.length === 0,
      problems: this.problems,
      notBound: [...new Set(this.unbound)].sort(),
      notCompared: this.missing,
    };
  }

  async signature({ keys }: Pick<LedgerKeys, "keys">): Promise<void> {
    const keyId = this.receipt.get("key_id");
    // Of two keys of one name the last one counts, as where keys are kept by their names.
    const key = keys.filter((each) => each.key_id === keyId).pop();
    if (key === undefined) {
      this.problems.push(`the key ${told(keyId)} is not one of the keys that you trust`);
      return;
    }
    if (!(await isSigned(this.receipt, ofBase64(key.public_key)))) {
      this.problems.push("the signature does not match: the receipt was changed");
    }
    if (this.receipt.get("kind") !== "execution") {
      this.problems.push("it is not the receipt of an execution");
    }
  }

  async answer(answer: Members): Promise<void> {
    const found: Members = new Map([["subject", need(answer, "id")]]);
    if (answer.has("status")) await this.outcome(answer, found);
    else await this.refusal(answer, found);
    for (const [name, value] of found) {
      const bound = this.receipt.get(name);
      if (!this.receipt.has(name) || sorted(bound) !== sorted(value)) {
        this.problems.push(`${name}: the answer has ${told(value)}, the receipt ${told(bound)}`);
      }
    }
  }

  private async refusal(answer: Members, found: Members): Promise<void> {
    found.set("status", "error");
    await this.error(members(need(answer, "error")), found);
    const others = [...answer.keys()].filter((name) => !["id", "error", "receipt"].includes(name));
    this.unbound.push(...others);
  }

  private async outcome(answer: Members, found: Members): Promise<void> {
    const { receipt } = this;
    this.types(answer);
    const result = need(answer, "result");
    const hasResult = need(answer, "has_result") === true;
    const outputs = need(answer, "outputs");
    const isEmpty = Array.isArray(outputs) && outputs.length === 0;
    found.set("result_hash", hasResult ? await textHash(written(result)) : null);
    found.set("outputs_hash", isEmpty ? null : await textHash(written(outputs)));
    for (const name of ["stdout", "stderr"]) {
      found.set(`${name}_hash`, await textHash(text(need(answer, name))));
    }
    if (!hasResult && result !== null) {
      this.problems.push("result: has_result is false, but the answer has a result");
    }
    const person = answer.get("on_behalf_of");
    if (receipt.has("on_behalf_of_hash") && person !== undefined) {
      const isText = typeof person === "string";
      found.set("on_behalf_of_hash", isText ? await textHash(person) : person);
    } else if (person !== undefined && person !== null && person !== "") {
      this.unbound.push("on_behalf_of");
    }
    const exception = answer.get("exception");
    if (receipt.has("exception_hash") && exception !== undefined) {
      const isThere = exception !== null;
      found.set("exception_hash", isThere ? await textHash(written(exception)) : null);
    } else if (exception !== undefined && exception !== null) {
      this.unbound.push("exception");
    }
    const error = need(answer, "error");
    if (error === null) {
      found.set("error_code", null);
      if (receipt.has("error_hash")) found.set("error_hash", null);
    } else {
      await this.error(members(error), found);
    }
    for (const [name, value] of answer) {
      if (HANDLED.includes(name)) continue;
      if (DETAILS.includes(name) && receipt.has("details_hash")) continue;
      if (name === "policy" && receipt.has("policy_hash")) continue;
      if (receipt.has(name)) found.set(name, value === "" ? null : value);
      else this.unbound.push(name);
    }
    if (receipt.has("has_result")) found.set("has_result", need(answer, "has_result"));
    await this.hashed(answer);
    this.artifacts(need(answer, "artifacts"));
  }

  private types(answer: Members): void {
    const kinds: Array<[string, (value: Json) => boolean]> = [
      ["stdout", (value) => typeof value === "string"],
      ["stderr", (value) => typeof value === "string"],
      ["outputs", Array.isArray],
      ["artifacts", Array.isArray],
      ["has_result", (value) => typeof value === "boolean"],
    ];
    for (const [name, isOfKind] of kinds) {
      if (!isOfKind(need(answer, name))) {
        this.problems.push(`${name}: it has the wrong type`);
      }
    }
  }

  private async error(error: Members, found: Members): Promise<void> {
    const bound = ["code"];
    found.set("error_code", need(error, "code"));
    if (this.receipt.has("error_hash")) {
      bound.push("message", "field");
      found.set("error_hash", await textHash(text(need(error, "message"))));
      const field = error.get("field");
      if (field !== undefined) found.set("error_field", field);
    }
    const others = [...error.keys()].filter((name) => !bound.includes(name));
    this.unbound.push(...others.map((name) => `error.${name}`));
  }

  private async hashed(answer: Members): Promise<void> {
    const details = this.receipt.get("details_hash");
    if (details !== undefined && details !== (await detailsHash(answer))) {
      this.problems.push(`${DETAILS.join(", ")}: one of these was changed`);
    }
    const bound = this.receipt.get("policy_hash");
    if (bound !== undefined) {
      const policy = need(answer, "policy");
      if (bound !== (policy === null ? null : await textHash(canonical(policy)))) {
        this.problems.push("policy: it was changed");
      }
    }
  }

  private artifacts(listed: Json): void {
    const [ours, theirs] = [items(listed), items(need(this.receipt, "artifacts"))].map((each) =>
      written(each.map((artifact) => OF_ARTIFACTS.map((name) => need(artifact, name)))),
    );
    if (ours !== theirs) {
      this.problems.push("artifacts: the answer and the receipt list different ones");
    }
    const names = items(listed).flatMap((artifact) => [...artifact.keys()]);
    const others = names.filter((name) => !OF_ARTIFACTS.includes(name));
    this.unbound.push(...others.map((name) => `artifacts[].${name}`));
  }

  async files({ code, artifacts = {} }: Compared): Promise<void> {
    if (code === undefined) this.missing.push("the code");
    else if (this.receipt.get("code_hash") !== (await hashOf(bytesOf(code)))) {
      this.problems.push("code_hash: the given file is not the code that was run");
    }
    const bound = items(need(this.receipt, "artifacts"));
    const hashes = new Map(bound.map((each) => [need(each, "name"), need(each, "hash")]));
    for (const [name, content] of Object.entries(artifacts)) {
      if (!hashes.has(name)) {
        this.problems.push(`artifacts: there is no artifact named ${name}`);
      } else if (hashes.get(name) !== (await hashOf(content))) {
        this.problems.push(`artifacts: the given file is not the artifact ${name}`);
      }
    }
    for (const name of hashes.keys()) {
      const isGiven = Object.prototype.hasOwnProperty.call(artifacts, text(name));
      if (!isGiven) this.missing.push(`the artifact ${told(name)}`);
    }
  }
}

async function isSigned(receipt: Members, publicKey: Uint8Array): Promise<boolean> {
  const { subtle } = await webCrypto();
  const signature = receipt.get("signature");
  if (typeof signature !== "string" || !BASE64.test(signature) || publicKey.length !== 32) {
    return false;
  }
  const message = await signedMessage(receipt);
  if (message === null) return false;
  const key = await subtle.importKey("raw", publicKey as BufferSource, "Ed25519", false, [
    "verify",
  ]);
  const signed = ofBase64(signature) as BufferSource;
  return await subtle.verify("Ed25519", key, signed, message as BufferSource);
}

const BASE64 = /^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$/;

/** Null if it cannot have been signed: its format is unknown, or it has no canonical form. */
async function signedMessage(receipt: Members): Promise<Uint8Array | null> {
  const ledger = receipt.get("ledger");
  if (!(ledger instanceof Numeral) || Number(ledger.text) !== FORMAT) return null;
  const statement: Members = new Map(receipt);
  statement.delete("signature");
  let said: string;
  try {
    said = canonical(statement);
  } catch {
    return null;
  }
  if (HALF.test(said)) return null;
  const digest = (await hashOf(bytesOf(said))).slice("sha256:".length);
  return bytesOf(`${DOMAIN}${told(receipt.get("sequence"))}\n${digest}`);
}

async function detailsHash(answer: Members): Promise<string | null> {
  const cost = need(answer, "cost");
  const details: Members = new Map([
    ["created_at", utc(text(need(answer, "created_at")))],
    ["cost", cost === null ? null : plainDecimal(text(cost))],
    ["hops", need(answer, "hops")],
    ["timings", need(answer, "timings")],
  ]);
  return await textHash(canonical(details));
}

/** A time as it is hashed: in UTC, with microseconds. */
function utc(time: string): string {
  const parts = /^(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,6}))?(Z|[+-]\d\d:\d\d)$/.exec(time);
  if (parts === null) throw new RangeError(`${time} is not a time`);
  const [, seconds, fraction = "", zone] = parts;
  const whole = new Date(`${seconds}${zone}`).toISOString().slice(0, 19);
  return `${whole}.${fraction.padEnd(6, "0")}+00:00`;
}

/** A decimal number without an exponent. */
function plainDecimal(number: string): string {
  const parts = /^(-?)(\d+)(?:\.(\d+))?(?:[eE]([+-]?\d{1,3}))?$/.exec(number);
  if (parts === null) throw new RangeError(`${number} is not a number`);
  const [, sign = "", whole = "", fraction = "", exponent = "0"] = parts;
  const digits = whole + fraction;
  const point = whole.length + Number(exponent);
  const before = digits.slice(0, Math.max(0, point)).padEnd(point, "0").replace(/^0+(?=\d)/, "");
  const after = "0".repeat(Math.max(0, -point)) + digits.slice(Math.max(0, point));
  return sign + (before || "0") + (after && `.${after}`);
}

/** No text and an empty one have the same hash: none. */
async function textHash(content: string): Promise<string | null> {
  // It has no bytes, and with others in its place it would be another text.
  if (HALF.test(content)) throw new RangeError("half of a character");
  return content ? await hashOf(bytesOf(content)) : null;
}

const HALF = /\p{Surrogate}/u;

async function hashOf(content: Uint8Array): Promise<string> {
  const { subtle } = await webCrypto();
  const bytes = new Uint8Array(await subtle.digest("SHA-256", content as BufferSource));
  return `sha256:${Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}

function need(from: Members, name: string): Json {
  const value = from.get(name);
  if (value === undefined) throw new NotCheckable(`It has no ${name}.`);
  return value;
}

function members(value: Json | undefined): Members {
  if (value instanceof Map) return value;
  throw new NotCheckable("It has no receipt; a queued execution does not have one yet.");
}

function items(value: Json): Members[] {
  return Array.isArray(value) ? value.map(members) : [];
}

function text(value: Json): string {
  if (typeof value === "string") return value;
  throw new NotCheckable(`It has ${told(value)} instead of a string.`);
}

function told(value: Json | undefined): string {
  return typeof value === "string" ? value : written(value);
}
