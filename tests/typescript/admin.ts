/** What the page of an administration does. */

import { AdminRefused, Cofferdam, Forbidden, type ConfigField } from "cofferdam";

import { equal, thrown, told } from "./checks.js";

// Every name that a field may have: the compiler says which one is missing here.
const NAMES: Record<keyof ConfigField, true> = {
  type: true,
  required: true,
  label: true,
  secret: true,
  placeholder: true,
  description: true,
  default: true,
  options: true,
  multiline: true,
  min: true,
  max: true,
};
const SECRET = "tok-0123456789-wxyz";

export async function administration(): Promise<void> {
  const { admin } = new Cofferdam({ apiKey: told("ADMIN_KEY") });
  const { data: providers } = await admin.listSandboxProviders();
  const local = providers.find((each) => each.id === "local");
  equal(local?.supported_languages.includes("python"), true);
  for (const provider of providers) {
    for (const [field, declared] of Object.entries(provider.config_schema)) {
      const unknown = Object.keys(declared).filter((name) => !(name in NAMES));
      equal([provider.id, field, unknown], [provider.id, field, []]);
    }
  }
  equal((await admin.getSandboxConfig()).data.active, "local");

  const saved = await admin.setSandboxConfig({
    provider_type: "e2b",
    config: { api_key: SECRET },
    set_active: false,
    reason: "a try",
  });
  equal(saved, { message: "Configuration saved" });
  const config = (await admin.getSandboxConfig()).data;
  equal(JSON.stringify(config).includes(SECRET), false);
  equal([config.active, typeof config.e2b], ["local", "object"]);

  const trial = await admin.testSandboxConnection("local");
  equal([trial.success, trial.runtime, trial.code], [true, "bubblewrap", null]);
  const wrong = await admin.testSandboxConnection("local", { pool_size: "many" });
  equal([wrong.success, Object.keys(wrong.errors)], [false, ["pool_size"]]);
  const unknown = await thrown(AdminRefused, () => admin.setActiveSandboxProvider("nobody"));
  equal([unknown.status, unknown.message], [400, "Unknown provider"]);
  const chosen = await admin.setActiveSandboxProvider("local", { reason: "it is" });
  equal(chosen, { message: "Active provider updated" });
  await thrown(Forbidden, () => new Cofferdam().admin.listSandboxProviders());
}
