export { SandboxAdmin } from "./admin.js";
export type {
  ConfigField,
  ConfigValues,
  Provider,
  SandboxConfig,
  SandboxConfigRequest,
} from "./admin.js";
export { textOf } from "./answers.js";
export { Cofferdam } from "./client.js";
export type { Settings } from "./client.js";
export * from "./errors.js";
export { SessionFiles } from "./files.js";
export type {
  Asked,
  CellOptions,
  CommandOptions,
  RunOptions,
  Streaming,
  SubmitOptions,
} from "./options.js";
export { BackgroundProcess } from "./processes.js";
export { NotCheckable, checkReceipt } from "./receipts.js";
export type { ReceiptCheck } from "./receipts.js";
export * from "./requests.js";
export { NEVER } from "./retries.js";
export type { Retries } from "./retries.js";
export { OpenSession } from "./sessions.js";
export * from "./shapes.js";
export { RunStream, contentOf } from "./streams.js";
export type { Done, Output, RunEvent, Started, Written } from "./streams.js";
export { runPythonCode } from "./tool.js";
