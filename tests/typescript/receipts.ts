/** Receipts: what the client finds, to be compared with what the script for auditors finds. */

import { Cofferdam, NotCheckable, checkReceipt, textOf, type LedgerKeys } from "cofferdam";

import { equal, thrown } from "./checks.js";

declare const console: { log(text: string): void };

export async function receipts(): Promise<void> {
  const client = new Cofferdam();
  const keys = await client.ledgerKeys();
  const code = "def main(): return [1.0, 2**60, 'ünï']";
  const done = await client.run(code);
  const found = await checkReceipt(done, keys, { code });
  equal([found.isValid, found.problems, found.notCompared], [true, [], []]);
  equal((await checkReceipt(textOf(done), keys)).notCompared, ["the code"]);
  const alone = await checkReceipt(done.receipt ?? {}, keys);
  equal([alone.isValid, alone.notCompared], [true, ["the code"]]);
  const forged = await checkReceipt(textOf(done).replace('"stdout":""', '"stdout":"43"'), keys);
  equal(forged.problems.map((each) => each.split(":")[0]), ["stdout_hash"]);
  // A copy has lost the text of its numbers, which are others than they look.
  equal((await checkReceipt({ ...done }, keys)).isValid, false);
  // What was changed in place is not told to be what came.
  done.status = "failed";
  equal((await checkReceipt(done, keys)).isValid, false);
  equal((await checkReceipt(done, { keys: [] })).isValid, false);
  const other = await checkReceipt(done, keys, { code: code + " " });
  equal(other.problems.includes("code_hash: the given file is not the code that was run"), true);
  for (const nothing of [{}, { ...done, receipt: null }, { receipt: {} }, "no JSON"]) {
    await thrown(NotCheckable, () => checkReceipt(nothing, keys));
  }
  const streamed = client.stream("print(1.5)");
  equal((await checkReceipt(await streamed.done(), keys)).isValid, true);
}

interface Judged {
  keys: LedgerKeys;
  documents: string[];
}

/** One line a document: what does not fit, what is not bound, or null where it cannot be checked. */
export async function judged(given: string): Promise<void> {
  const { keys, documents } = JSON.parse(given) as Judged;
  for (const document of documents) {
    try {
      const { problems, notBound } = await checkReceipt(document, keys);
      console.log(JSON.stringify([problems.map((each) => each.split(":")[0]), notBound]));
    } catch (problem) {
      if (!(problem instanceof NotCheckable)) throw problem;
      console.log("null");
    }
  }
}
