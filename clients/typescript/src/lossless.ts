/** JSON whose numbers stay the text that they were, as hashes are over the text. */

/** A number as it was written. */
export class Numeral {
  constructor(readonly text: string) {}
}

export type Members = Map<string, Json>;
export type Json = string | boolean | null | Numeral | Json[] | Members;

// A string, or a number.
const TOKEN = /"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?/g;

/** Throws SyntaxError for what is no JSON. */
export function parsed(text: string): Json {
  JSON.parse(text);
  // Strings are marked as well, so that none can pass for a number.
  const marked = text.replace(TOKEN, (token) =>
    token.startsWith('"') ? `"s${token.slice(1)}` : `"n${token}"`,
  );
  return JSON.parse(marked, (_, value: unknown) => {
    if (typeof value === "string") {
      return value.startsWith("n") ? new Numeral(value.slice(1)) : value.slice(1);
    }
    if (typeof value !== "object" || value === null || Array.isArray(value)) return value;
    return new Map(Object.entries(value).map(([name, each]) => [name.slice(1), each]));
  }) as Json;
}

/** The text without spaces, in the order in which it came. */
export function written(value: Json | undefined): string {
  if (value instanceof Numeral) return value.text;
  if (Array.isArray(value)) return `[${value.map(written).join(",")}]`;
  if (value instanceof Map) return object([...value], written);
  return JSON.stringify(value ?? null);
}

/** As RFC 8785 has it. Throws RangeError for a number that has no such form. */
export function canonical(value: Json | undefined): string {
  if (value instanceof Numeral) return canonicalNumber(value.text);
  if (Array.isArray(value)) return `[${value.map(canonical).join(",")}]`;
  if (value instanceof Map) return object(byName([...value]), canonical);
  return JSON.stringify(value ?? null);
}

/** As the first format of the ledger has it: ASCII, names sorted. */
export function ascii(value: Json | undefined): string {
  const text = sorted(value);
  return text.replace(/[\x7f-\uffff]/g, (unit) => {
    const code = unit.charCodeAt(0).toString(16);
    return unit === "\x7f" ? unit : `\\u${code.padStart(4, "0")}`;
  });
}

/** The text without spaces, names sorted. */
export function sorted(value: Json | undefined): string {
  if (Array.isArray(value)) return `[${value.map(sorted).join(",")}]`;
  if (value instanceof Map) return object(byName([...value]), sorted);
  return written(value);
}

function object(members: Array<[string, Json]>, each: (value: Json) => string): string {
  return `{${members.map(([name, value]) => `${JSON.stringify(name)}:${each(value)}`).join(",")}}`;
}

function byName(members: Array<[string, Json]>): Array<[string, Json]> {
  return members.sort(([one], [other]) => (one < other ? -1 : 1));
}

function canonicalNumber(text: string): string {
  const double = Number(text);
  const isExact = /[.eE]/.test(text) || BigInt(text) === BigInt(double);
  if (!Number.isFinite(double) || !isExact) throw new RangeError("a number that no double is");
  return JSON.stringify(double);
}
