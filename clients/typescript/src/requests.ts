/** What the service is asked. Made by make_shapes.py: do not edit. */

export interface AdminActive {
  /** The provider's id; for a further configuration of it, `id@name`. */
  provider: string;
  reason?: string;
}

export interface AdminConfig {
  /** The provider's id; for a further configuration of it, `id@name`. */
  provider_type: string;
  /** A masked or missing secret keeps its stored value. */
  config: Record<string, unknown>;
  set_active?: boolean;
  test_connection?: boolean;
  /** The reason for the change, stored with the version. */
  reason?: string;
}

export interface AdminTest {
  provider_type?: string | null;
  /** Another name for `provider_type`. */
  provider?: string | null;
  /** Default: the stored configuration. */
  config?: Record<string, unknown> | null;
}

export interface Cell {
  /** Its bound is bytes of UTF-8. */
  code: string;
  /** What `main` is called with: at most 1048576 bytes. */
  arguments?: Record<string, unknown> | null;
  /** Seconds. Left out, it is the provider's own. */
  timeout?: number | null;
  files?: Array<{ path: string; content_base64: string }> | null;
  mode?: "sync" | "async" | null;
  idempotency_key?: string | null;
  /** Of the session's contexts; `default` where none is named. */
  context?: string | null;
  /** Only in a session. */
  env?: Record<string, string> | null;
  /** Which agent asks. A claim of the caller's. */
  agent?: string | null;
  /** Which model wrote the code. A claim. */
  model?: string | null;
  /** In which conversation. A claim. */
  conversation?: string | null;
  /** For which person. A claim; it is erased when the code is. */
  on_behalf_of?: string | null;
  /** Told when it has ended; only with mode async. */
  webhook?: { url: string } | null;
  /** Functions of the caller's, for code in Python and JavaScript to call. */
  tools?: Array<{
    name: string;
    description?: string;
    parameters: { type: unknown };
    writes?: boolean;
  }> | null;
}

export interface Command {
  command?: string[] | null;
  /** What bash is given to run. */
  shell?: string | null;
  /** Relative to the workspace, or absolute. */
  cwd?: string | null;
  env?: Record<string, string> | null;
  user?: string | null;
  /** Its input can be sent. */
  stdin?: boolean | null;
  /** A terminal of this size, in place of pipes. */
  pty?: { cols: number; rows: number } | null;
  /** Seconds. */
  timeout?: number | null;
  background?: boolean | null;
  /** Which agent asks. A claim of the caller's. */
  agent?: string | null;
  /** Which model wrote the code. A claim. */
  model?: string | null;
  /** In which conversation. A claim. */
  conversation?: string | null;
  /** For which person. A claim; it is erased when the code is. */
  on_behalf_of?: string | null;
}

export interface ContextRequest {
  language: string;
  /** Relative to the workspace, or absolute. */
  cwd?: string | null;
  /** One of the sandbox's choice without it. */
  id?: string | null;
}

export interface ExecutionFilters {
  /** Which agent asks. A claim of the caller's. */
  agent?: string;
  /** In which conversation. A claim. */
  conversation?: string;
  language?: string;
  limit?: number;
  /** Which model wrote the code. A claim. */
  model?: string;
  /** For which person. A claim; it is erased when the code is. */
  on_behalf_of?: string;
  provider?: string;
  /** By its id. */
  schedule?: string;
  status?:
    | "queued"
    | "running"
    | "succeeded"
    | "failed"
    | "timed_out"
    | "out_of_memory"
    | "blocked"
    | "cancelled"
    | "error";
  trace_id?: string;
}

export interface ExecutionRequest {
  /** Its bound is bytes of UTF-8. */
  code: string;
  /** `python` where none is named; in a session, that of its context. */
  language?: string | null;
  /** What `main` is called with: at most 1048576 bytes. */
  arguments?: Record<string, unknown> | null;
  entrypoint?: "auto" | "main" | "script" | null;
  /** Seconds. Left out, it is the provider's own. */
  timeout?: number | null;
  files?: Array<{ path: string; content_base64: string }> | null;
  mode?: "sync" | "async" | null;
  idempotency_key?: string | null;
  /** An open session to run in. */
  session?: string | null;
  /** Of the session's contexts; `default` where none is named. */
  context?: string | null;
  /** Only in a session. */
  env?: Record<string, string> | null;
  /** Which agent asks. A claim of the caller's. */
  agent?: string | null;
  /** Which model wrote the code. A claim. */
  model?: string | null;
  /** In which conversation. A claim. */
  conversation?: string | null;
  /** For which person. A claim; it is erased when the code is. */
  on_behalf_of?: string | null;
  /** In the queue, among the tenant's own; only with mode async. */
  priority?: "low" | "normal" | "high" | null;
  /** Told when it has ended; only with mode async. */
  webhook?: { url: string } | null;
  /** Not before this time, which is to come; only with mode async. */
  run_at?: string | null;
  /** Functions of the caller's, for code in Python and JavaScript to call. */
  tools?: Array<{
    name: string;
    description?: string;
    parameters: { type: unknown };
    writes?: boolean;
  }> | null;
}

export interface PatchedSessionChanges {
  idle_seconds?: number | null;
  max_seconds?: number | null;
  metadata?: Record<string, unknown> | null;
}

export interface SessionFilters {
  limit?: number;
  state?: "open" | "asleep" | "closed" | "lost";
}

export interface SessionRequest {
  /** Unique among the tenant's open sessions. */
  name?: string | null;
  language?: string | null;
  template?: string | null;
  /** A configuration on the tenant's route. */
  provider?: string | null;
  /** Unused for so long, it goes to sleep. */
  idle_seconds?: number | null;
  /** So long after it was opened, it is closed. */
  max_seconds?: number | null;
  /** Of all that runs in it. */
  env?: Record<string, string> | null;
  /** The caller's own; at most 16384 bytes of JSON. */
  metadata?: Record<string, unknown> | null;
  /**
   * When its files are saved: before the answer, behind it, or never. Where they never are, it
   * is closed in place of going to sleep.
   */
  saves?: "answer" | "background" | "never" | null;
  /**
   * A snapshot whose files it begins with, or a session that has ended, where files are kept:
   * it has them then. Variables are no part of either.
   */
  from?: string | null;
}

export type SignalEnum =
  | "SIGHUP"
  | "SIGINT"
  | "SIGQUIT"
  | "SIGKILL"
  | "SIGUSR1"
  | "SIGUSR2"
  | "SIGTERM"
  | "SIGCONT"
  | "SIGSTOP"
  | "SIGTSTP"
  | "SIGWINCH";
