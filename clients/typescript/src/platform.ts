/** Functions that Node, Deno, Bun and browsers have under different names. */

interface Surroundings {
  process?: { env?: Record<string, string | undefined> };
  crypto?: Crypto;
}

const here = globalThis as unknown as Surroundings;

/** An environment variable, if the platform has them. */
export function variable(name: string): string | undefined {
  return here.process?.env?.[name];
}

export async function webCrypto(): Promise<Crypto> {
  if (here.crypto !== undefined) return here.crypto;
  // Node 18. The name is a variable, so that bundlers for browsers do not resolve it.
  const name = "node:crypto";
  return ((await import(name)) as { webcrypto: Crypto }).webcrypto;
}

/** A unique key. */
export async function uniqueKey(): Promise<string> {
  const bytes = (await webCrypto()).getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function bytesOf(content: string | Uint8Array): Uint8Array {
  return typeof content === "string" ? new TextEncoder().encode(content) : content;
}

export function base64Of(content: string | Uint8Array): string {
  const pieces: string[] = [];
  const bytes = bytesOf(content);
  for (let at = 0; at < bytes.length; at += 0x2000) {
    pieces.push(String.fromCharCode(...bytes.subarray(at, at + 0x2000)));
  }
  return btoa(pieces.join(""));
}

/** Throws if the text is not base64. */
export function ofBase64(text: string): Uint8Array {
  return Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
}

/** Throws the signal's reason once it is aborted. */
export function pause(seconds: number, signal?: AbortSignal): Promise<void> {
  return new Promise((resolve, reject) => {
    const stop = (): void => {
      clearTimeout(timer);
      reject(signal?.reason);
    };
    const timer = setTimeout(() => {
      signal?.removeEventListener("abort", stop);
      resolve();
    }, seconds * 1000);
    if (signal?.aborted) stop();
    else signal?.addEventListener("abort", stop, { once: true });
  });
}
