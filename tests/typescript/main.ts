/** Runs scenarios by their names, one after another. */

import * as admin from "./admin.js";
import * as direct from "./direct.js";
import * as proxied from "./proxied.js";
import * as receipts from "./receipts.js";

declare const process: {
  argv: string[];
  stdin: AsyncIterable<Uint8Array>;
};

const { judged, ...checked } = receipts;
const scenarios: Record<string, () => Promise<void>> = {
  ...admin,
  ...direct,
  ...proxied,
  ...checked,
  judged: async () => {
    let given = "";
    const decoder = new TextDecoder();
    for await (const piece of process.stdin) given += decoder.decode(piece, { stream: true });
    await judged(given);
  },
};

for (const name of process.argv.slice(2)) {
  const scenario = scenarios[name];
  if (scenario === undefined) throw new Error(`there is no scenario ${name}`);
  await scenario();
}
