/** What the service answers. Made by make_shapes.py: do not edit. */

export interface AdminMessage {
  message: string;
}

export interface AdminPending {
  message: string;
  /** The change that waits for approval. */
  pending: number;
}

export interface AdminTrial {
  success: boolean;
  message: string;
  latency_ms: number | null;
  runtime: string | null;
  isolation: string | null;
  language: string | null;
  /** SB001 to SB009 on failure. */
  code: string | null;
  field: string | null;
  /** Refused fields and why. */
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
  /** Below the workspace. */
  cwd: string;
}

/** Which execution it is, and where it ran. */
export interface Execution {
  id: string;
  status: StatusEnum;
  /** Where it ran; null: by itself. */
  session: string | null;
  context: string | null;
  /** Whether the context still has its state. */
  context_kept: boolean | null;
  /** Of a command in a session. */
  pid: number | null;
  /** Who asked, by the caller's word. */
  agent: string | null;
  model: string | null;
  conversation: string | null;
  /** Null also where it was erased with the code. */
  on_behalf_of: string | null;
  traceparent: string | null;
  language: string;
  provider: string;
  /** The tool that isolated. */
  runtime: string;
  /** How strongly: microvm, gvisor, namespaces or none; empty when nothing ran. */
  isolation: string;
  /** Whom the sandbox served: execution, this run alone; tenant, its others too. */
  sharing: string;
  /** What `main` returned. */
  result: unknown;
  has_result: boolean;
  stdout: string;
  stderr: string;
  stdout_truncated: boolean;
  stderr_truncated: boolean;
  exit_code: number | null;
  /** Rich outputs, each a map from MIME type to data. */
  outputs: Array<Record<string, unknown>>;
  artifacts: Artifact[];
  /** Files that the code left and that were not kept, and why. */
  artifacts_skipped: Omission[];
  /** Rich outputs and ends of streams that were not kept, and why. */
  outputs_skipped: Omission[];
  error: Verdict | null;
  /** What ended a program that failed; null where it has not, or said nothing. */
  exception: ProgramException | null;
  /** The providers that were tried or passed over, and why. */
  hops: Array<Record<string, unknown>>;
  /** Estimated; null where the provider has no price. */
  cost: string | null;
  timings: Timings;
  created_at: string;
  /** Nobody takes it before. */
  run_at: string | null;
  schedule: string | null;
  /** The signed entry of the ledger, once ended. See examples/receipts. */
  receipt: Record<string, unknown> | null;
  /** What came of it after the record had been closed as lost; changes nothing else. */
  late_result: LateResult | null;
  /** Whether the files of its session are in storage as it left them. */
  files_saved: boolean | null;
  /** The first since its session was woken: files are there, variables are not. */
  restored: boolean;
  /** Which held, and what was found by it. */
  policy: Policy | null;
  /** What was seen of it. */
  observations: Observation[];
}

/** Which execution it is, and where it ran. */
export interface ExecutionSummary {
  id: string;
  status: StatusEnum;
  /** Where it ran; null: by itself. */
  session: string | null;
  context: string | null;
  /** Whether the context still has its state. */
  context_kept: boolean | null;
  /** Of a command in a session. */
  pid: number | null;
  /** Who asked, by the caller's word. */
  agent: string | null;
  model: string | null;
  conversation: string | null;
  /** Null also where it was erased with the code. */
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
  /** Nobody takes it before. */
  run_at: string | null;
  schedule: string | null;
}

export interface File {
  path: string;
  type: "file" | "directory" | "symlink" | "other";
  size_bytes: number;
  mode: number;
  modified_at: string | null;
  /** What a symbolic link says. */
  target?: string;
}

export interface Languages {
  languages: string[];
  /** What Python programs can import, by the id of a provider that knows its own. */
  packages: Record<string, unknown>;
}

/** What came of a run after its record had been closed. */
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
  /** Names and hashes; the bytes were not kept. */
  artifacts: Array<Record<string, unknown>>;
  error: Verdict | null;
  finished_at: string;
}

export interface LedgerKey {
  key_id: string;
  algorithm: string;
  /** 32 bytes in base64. */
  public_key: string;
}

export interface LedgerKeys {
  /** What is signed starts with it and a line feed. */
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
  /** The host, from outside of the sandbox, or the supervisor within it. */
  seen_by: "host" | "supervisor";
  count: number;
}

/** What code has left or shown, and the answer has not. The last one may say how many more. */
export interface Omission {
  /**
   * Of a file, its path below `artifacts/`; of an output, its number and type, or the stream.
   * A byte that is no text is told as `\xNN`.
   */
  name: string;
  reason: string;
}

export interface Policy {
  id: number | null;
  /** In the policy's history. */
  version: number | null;
  warnings: PolicyRemark[];
  /** Who has approved which code, and when. */
  approved: Record<string, unknown> | null;
}

export interface PolicyRemark {
  /** Of the code, from 1; 0 is all of it. */
  line: number;
  /** import, call, code, remark or note. */
  kind: string;
  name: string;
}

export interface Process {
  pid: number;
  execution: string | null;
  state: "running" | "exited";
  exit_code: number | null;
}

/** What ended the program, by its own account. */
export interface ProgramException {
  /** Such as ValueError; Error where there are no types. */
  type: string;
  message: string;
  /** With notes, causes and members of groups; empty where there is none. */
  traceback: string;
}

export interface Quota {
  /** Null: a budget that nobody has set. */
  limit: number | null;
  /** With what is reserved for what has not ended. */
  used: number;
  /** Null where it is given back by itself, as by what ends. */
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

/** What is in storage of a session's files. */
export interface SavedFiles {
  /** Files, folders and links. */
  count: number;
  bytes: number;
  saved_at: string | null;
  /** Null where all that is in its sandbox is saved. */
  unsaved_since: string | null;
  /** Why it is not. */
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
  /** The earlier of both ages. */
  expires_at: string;
  closed_at: string | null;
  closed_because: string | null;
  contexts: Context[];
  saves: "answer" | "background" | "never";
  files: SavedFiles;
  /** Its files were restored then; variables were not. */
  woken_at: string | null;
}

/** The files of a session as they were once. Variables and processes are no part of it. */
export interface Snapshot {
  id: string;
  name: string | null;
  /** Whose files these were. */
  session: string;
  /** Files, folders and links. */
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
  /** SB001 to SB009. */
  code: string;
  message: string;
}
