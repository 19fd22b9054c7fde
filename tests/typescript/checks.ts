/** What the scenarios compare with, and what they are told. */

declare const process: { env: Record<string, string | undefined> };

export function told(name: string): string {
  const value = process.env[name];
  if (value === undefined) throw new Error(`${name} is not set`);
  return value;
}

/** By the JSON of both, so that the order of names counts as well. */
export function equal(got: unknown, wanted: unknown): void {
  const [one, other] = [got, wanted].map((each) => JSON.stringify(each) ?? "undefined");
  if (one !== other) throw new Error(`${one} is not ${other}`);
}

/** The error of this kind that something throws. */
export async function thrown<Kind extends Error>(
  kind: abstract new (...given: never[]) => Kind,
  work: () => Promise<unknown>,
): Promise<Kind> {
  try {
    await work();
  } catch (problem) {
    if (problem instanceof kind) return problem;
    throw problem;
  }
  throw new Error(`no ${kind.name} was thrown`);
}

export async function all<Item>(items: AsyncIterable<Item>): Promise<Item[]> {
  const found: Item[] = [];
  for await (const each of items) found.push(each);
  return found;
}

export function textOfBytes(content: Uint8Array): string {
  return new TextDecoder().decode(content);
}
