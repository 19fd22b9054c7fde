/** JSON whose numbers keep their text, because hashes are over the text. */

/** The text of a number. */
export class Numeral {
  constructor(readonly text: string) {}
}

export type Members = Map<string, Json>;
export type Json = string | boolean | null | Numeral | Json[] | Members;

/** Throws SyntaxError if the text is not JSON. */
export function parsed(text: string): Json {
  JSON.parse(text);
  return JSON.parse(marked(text), (_, value: unknown) => {
    if (typeof value === "string") {
      return value.startsWith("n") ? new Numeral(value.slice(1)) : value.slice(1);
    }
    if (typeof value !== "object" || value === null || Array.isArray(value)) return value;
    return new Map(Object.entries(value).map(([name, each]) => [name.slice(1), each]));
  }) as Json;
}

/**
 * The text with each number as a string that begins with n. Strings begin with s, so that none can
 * pass for a number.
 */
function marked(text: string): string {
  const number = /[-+.\deE]+/y;
  const pieces: string[] = [];
  let copied = 0;
  for (let at = 0; at < text.length; ) {
    if (text[at] === '"') {
      pieces.push(text.slice(copied, at), '"s');
      copied = at + 1;
      at = endOfString(text, copied);
      continue;
    }
    number.lastIndex = at;
    const [digits = ""] = /[-\d]/.test(text[at] ?? "") ? number.exec(text) ?? [] : [];
    if (digits) pieces.push(text.slice(copied, at), `"n${digits}"`);
    at += digits.length || 1;
    if (digits) copied = at;
  }
  return pieces.join("") + text.slice(copied);
}

/** The position after its quote. A pattern would need memory for each escaped character. */
function endOfString(text: string, begin: number): number {
  for (let at = begin; ; at += 1) {
    if (text[at] === "\\") at += 1;
    else if (text[at] === '"' || at >= text.length) return at + 1;
  }
}

/** The text without spaces, in the original order. */
export function written(value: Json | undefined): string {
  if (value instanceof Numeral) return value.text;
  if (Array.isArray(value)) return `[${value.map(written).join(",")}]`;
  if (value instanceof Map) return object([...value], written);
  return JSON.stringify(value ?? null);
}

/** The canonical form of RFC 8785. Throws RangeError for a number without such a form. */
export function canonical(value: Json | undefined): string {
  if (value instanceof Numeral) return canonicalNumber(value.text);
  if (Array.isArray(value)) return `[${value.map(canonical).join(",")}]`;
  if (value instanceof Map) return object(byName([...value]), canonical);
  return JSON.stringify(value ?? null);
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
