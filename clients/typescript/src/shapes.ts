/** What the service answers. Made by make_shapes.py: do not edit. */

export interface AdminMessage {
  message: string;
}

export interface AdminPending {
  message: string;
  /** Id of the change that waits for approval. */
  pending: number;
}

export interface AdminTrial {
  success: boolean;
  message: string;
  latency_ms: number | null;
  runtime: string | null;
  isolation: string | null;
  language: string | null;
  /** The error code, SB001 to SB009; null on success. */
  code: string | null;
  field: string | null;
  /** The refused fields, with the reason for each. */
  errors: Record<string, unknown>;
}

export interface Artifact {
  name: string;
  mime_type: string;
  size_bytes: number;
  url: string;
}

export interface Context {
  id: string;
  language: string;
  /** The working folder, relative to the workspace. */
  cwd: string;
}

/** The execution, with its session and its caller. */
export interface Execution {
  id: string;
  status: StatusEnum;
  /** The session that it ran in; null for a run outside of sessions. */
  session: string | null;
  context: string | null;
  /** Whether the context still has its state, such as variables. If false, it was restarted. */
  context_kept: boolean | null;
  /** The process id of a command in a session. */
  pid: number | null;
  /** The agent, as claimed by the caller. */
  agent: string | null;
  model: string | null;
  conversation: string | null;
  /** The person, as claimed by the caller. Null also after it was erased with the code. */
  on_behalf_of: string | null;
  traceparent: string | null;
  language: string;
  provider: string;
  /** The tool that isolated the sandbox. */
  runtime: string;
  /** The isolation level: microvm, gvisor, namespaces or none; empty if nothing ran. */
  isolation: string;
  /** Who shared the sandbox: execution, only this run; tenant, also its other runs. */
  sharing: string;
  /** The return value of `main`. */
  result: unknown;
  /** Whether there is a result: it distinguishes the result null from no result. */
  has_result: boolean;
  stdout: string;
  stderr: string;
  stdout_truncated: boolean;
  stderr_truncated: boolean;
  exit_code: number | null;
  /** Rich outputs. Each is an object with the data for each MIME type. */
  outputs: Array<Record<string, unknown>>;
  artifacts: Artifact[];
  /** Files in `artifacts/` that were not kept, with the reason. */
  artifacts_skipped: Omission[];
  /** Rich outputs and ends of streams that were not kept, with the reason. */
  outputs_skipped: Omission[];
  error: Verdict | null;
  /** The exception that ended the program; null if it did not fail or reported none. */
  exception: ProgramException | null;
  /** The providers that were tried or skipped, in order, each with the outcome and the reason. */
  hops: Array<Record<string, unknown>>;
  /** The estimated cost; null if the provider has no price. */
  cost: string | null;
  timings: Timings;
  created_at: string;
  /** The execution does not start before this time. */
  run_at: string | null;
  schedule: string | null;
  /** The signed entry of the ledger, after the end. See examples/receipts. */
  receipt: Record<string, unknown> | null;
  /** A result that arrived after the execution was recorded as lost. It changes no other field. */
  late_result: LateResult | null;
  /**
   * Whether the files of its session were saved to storage as they were after the run; null
   * outside of sessions.
   */
  files_saved: boolean | null;
  /**
   * Whether it is the first run after its session was resumed from storage. Files were
   * restored, variables were lost.
   */
  restored: boolean;
  /** The policy that applied, with its findings. */
  policy: Policy | null;
  /** Security events that were seen during the run. */
  observations: Observation[];
}

/** The execution, with its session and its caller. */
export interface ExecutionSummary {
  id: string;
  status: StatusEnum;
  /** The session that it ran in; null for a run outside of sessions. */
  session: string | null;
  context: string | null;
  /** Whether the context still has its state, such as variables. If false, it was restarted. */
  context_kept: boolean | null;
  /** The process id of a command in a session. */
  pid: number | null;
  /** The agent, as claimed by the caller. */
  agent: string | null;
  model: string | null;
  conversation: string | null;
  /** The person, as claimed by the caller. Null also after it was erased with the code. */
  on_behalf_of: string | null;
  traceparent: string | null;
  mode: "sync" | "async";
  priority: "low" | "normal" | "high";
  language: string;
  provider: string;
  runtime: string;
  isolation: string;
  sharing: string;
  exit_code: number | null;
  error: Verdict | null;
  timings: Timings;
  created_at: string;
  /** The execution does not start before this time. */
  run_at: string | null;
  schedule: string | null;
}

export interface File {
  path: string;
  type: "file" | "directory" | "symlink" | "other";
  size_bytes: number;
  mode: number;
  modified_at: string | null;
  /** The target of a symbolic link. */
  target?: string;
}

export interface Languages {
  languages: string[];
  /**
   * The packages that Python code can import, by provider id. Providers that do not know
   * theirs are missing.
   */
  packages: Record<string, unknown>;
}

/** The result of a run that ended after its record was closed. */
export interface LateResult {
  status: StatusEnum;
  result: unknown;
  has_result: boolean;
  stdout: string;
  stderr: string;
  stdout_truncated: boolean;
  stderr_truncated: boolean;
  exit_code: number | null;
  outputs: Array<Record<string, unknown>>;
  /** Names and hashes only; the bytes were not kept. */
  artifacts: Array<Record<string, unknown>>;
  error: Verdict | null;
  finished_at: string;
}

export interface LedgerKey {
  key_id: string;
  algorithm: string;
  /** The key: 32 bytes in base64. */
  public_key: string;
}

export interface LedgerKeys {
  /** The signed text starts with this domain and a line feed. */
  domain: string;
  keys: LedgerKey[];
}

export interface Observation {
  /**
   * sigsys: processes ended by SIGSYS, with which the filter of system calls ends them;
   * process_limit: processes refused, or there at its end, as many as it may have;
   * process_burst: processes and threads started, or tried where a container may have no more
   */
  kind: "sigsys" | "process_limit" | "process_burst";
  /** Who saw it: the host, outside the sandbox, or the supervisor, inside it. */
  seen_by: "host" | "supervisor";
  count: number;
}

/** A file or an output that the answer does not contain. The last one may give their number. */
export interface Omission {
  /**
   * For a file, its path below `artifacts/`; for an output, its number and type, or the name
   * of the stream. A byte that is not text is written as `\xNN`.
   */
  name: string;
  reason: string;
}

export interface Policy {
  id: number | null;
  /** The version in the policy's history. */
  version: number | null;
  warnings: PolicyRemark[];
  /** The approval: which code, by whom, and when. */
  approved: Record<string, unknown> | null;
}

export interface PolicyRemark {
  /** The line of the code, from 1; 0 for all of the code. */
  line: number;
  /** `import`, `call`, `code`, `remark` or `note`. */
  kind: string;
  name: string;
}

export interface Process {
  pid: number;
  execution: string | null;
  state: "running" | "exited";
  exit_code: number | null;
}

/** The exception that ended the program, as the program reported it. */
export interface ProgramException {
  /** For example ValueError; Error in a language without exception types. */
  type: string;
  message: string;
  /** With notes, causes and the members of exception groups; empty if there is none. */
  traceback: string;
}

export interface Quota {
  /** Null if no budget is set. */
  limit: number | null;
  /** Includes the amounts that are reserved for work that has not ended. */
  used: number;
  /** Null if the use decreases by itself, for example when executions end. */
  resets_at: string | null;
}

export interface Quotas {
  running: Quota;
  queued: Quota;
  requests_per_minute: Quota;
  executions_per_day: Quota;
  seconds_per_day: Quota;
  stored_bytes_per_day: Quota;
  sessions: Quota;
  schedules: Quota;
  tenant_storage_bytes: Quota;
  tenant_storage_files: Quota;
  budget_per_day: Quota;
  budget_per_month: Quota;
}

/** The files of a session in storage. */
export interface SavedFiles {
  /** The number of files, folders and links. */
  count: number;
  bytes: number;
  saved_at: string | null;
  /** Since when changes are unsaved; null if everything is saved. */
  unsaved_since: string | null;
  /** Why the changes are not saved. */
  problem: string | null;
}

export interface Session {
  id: string;
  name: string | null;
  state: "open" | "asleep" | "closed" | "lost";
  provider: string;
  runtime: string;
  isolation: string;
  sharing: string;
  language: string;
  template: string | null;
  metadata: Record<string, unknown>;
  idle_seconds: number;
  max_seconds: number;
  created_at: string;
  used_at: string;
  /** When its idle time or its total time ends, whichever is earlier. */
  expires_at: string;
  closed_at: string | null;
  /** Why it was closed or lost; null while it is not. */
  closed_because: string | null;
  contexts: Context[];
  /** When its files are saved to storage: before the answer, after it, or never. */
  saves: "answer" | "background" | "never";
  files: SavedFiles;
  /** When it was last resumed from storage. Its files were restored, its variables were lost. */
  woken_at: string | null;
}

/** The files of a session at one time, without its variables and processes. */
export interface Snapshot {
  id: string;
  name: string | null;
  /** The session that the files are from. */
  session: string;
  /** The number of files, folders and links. */
  files: number;
  bytes: number;
  created_at: string;
}

export type StatusEnum =
  | "queued"
  | "running"
  | "succeeded"
  | "failed"
  | "timed_out"
  | "out_of_memory"
  | "blocked"
  | "cancelled"
  | "error";

export interface Timings {
  queue_ms: number | null;
  start_ms: number | null;
  run_ms: number | null;
  total_ms: number | null;
}

export interface Usage {
  tenant: string;
  quotas: Quotas;
}

export interface Verdict {
  /** The error code, SB001 to SB009. */
  code: string;
  message: string;
}
