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
  /** The limit counts the bytes of its UTF-8. */
  code: string;
  /** The arguments of `main`: at most 1048576 bytes. */
  arguments?: Record<string, unknown> | null;
  /** In seconds. The default is the provider's. */
  timeout?: number | null;
  files?: Array<{ path: string; content_base64: string }> | null;
  mode?: "sync" | "async" | null;
  idempotency_key?: string | null;
  /** A context of the session; without it, the context `default`. */
  context?: string | null;
  /** Only in a session. */
  env?: Record<string, string> | null;
  /** The agent, as claimed by the caller. */
  agent?: string | null;
  /** The model that wrote the code, as claimed by the caller. */
  model?: string | null;
  /** The conversation, as claimed by the caller. */
  conversation?: string | null;
  /** The person, as claimed by the caller. It is erased together with the code. */
  on_behalf_of?: string | null;
  /** Gets a request when the execution has ended; only with mode async. */
  webhook?: { url: string } | null;
  /** Functions of the caller that Python and JavaScript code can call. */
  tools?: Array<{
    name: string;
    description?: string;
    parameters: { type: unknown };
    writes?: boolean;
  }> | null;
}

export interface Command {
  command?: string[] | null;
  /** A script for bash. */
  shell?: string | null;
  /** Relative to the workspace, or absolute. */
  cwd?: string | null;
  env?: Record<string, string> | null;
  user?: string | null;
  /** Keep the input open, so that bytes can be sent to it. */
  stdin?: boolean | null;
  /** Run in a terminal of this size instead of with pipes. */
  pty?: { cols: number; rows: number } | null;
  /** In seconds. */
  timeout?: number | null;
  background?: boolean | null;
  /** The agent, as claimed by the caller. */
  agent?: string | null;
  /** The model that wrote the code, as claimed by the caller. */
  model?: string | null;
  /** The conversation, as claimed by the caller. */
  conversation?: string | null;
  /** The person, as claimed by the caller. It is erased together with the code. */
  on_behalf_of?: string | null;
}

export interface ContextRequest {
  language: string;
  /** Relative to the workspace, or absolute. */
  cwd?: string | null;
  /** The default is an id that the sandbox chooses. */
  id?: string | null;
}

export interface ExecutionFilters {
  /** The agent, as claimed by the caller. */
  agent?: string;
  /** The conversation, as claimed by the caller. */
  conversation?: string;
  language?: string;
  limit?: number;
  /** The model that wrote the code, as claimed by the caller. */
  model?: string;
  /** The person, as claimed by the caller. It is erased together with the code. */
  on_behalf_of?: string;
  provider?: string;
  /** The id of a schedule. */
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
  /** The limit counts the bytes of its UTF-8. */
  code: string;
  /** The default is `python`; in a session, the language of the context. */
  language?: string | null;
  /** The arguments of `main`: at most 1048576 bytes. */
  arguments?: Record<string, unknown> | null;
  entrypoint?: "auto" | "main" | "script" | null;
  /** In seconds. The default is the provider's. */
  timeout?: number | null;
  files?: Array<{ path: string; content_base64: string }> | null;
  mode?: "sync" | "async" | null;
  idempotency_key?: string | null;
  /** An open session to run in. */
  session?: string | null;
  /** A context of the session; without it, the context `default`. */
  context?: string | null;
  /** Only in a session. */
  env?: Record<string, string> | null;
  /** The agent, as claimed by the caller. */
  agent?: string | null;
  /** The model that wrote the code, as claimed by the caller. */
  model?: string | null;
  /** The conversation, as claimed by the caller. */
  conversation?: string | null;
  /** The person, as claimed by the caller. It is erased together with the code. */
  on_behalf_of?: string | null;
  /** The priority in the queue, among the tenant's executions; only with mode async. */
  priority?: "low" | "normal" | "high" | null;
  /** Gets a request when the execution has ended; only with mode async. */
  webhook?: { url: string } | null;
  /** Start not before this time, which must be in the future; only with mode async. */
  run_at?: string | null;
  /** Functions of the caller that Python and JavaScript code can call. */
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
  /** The idle time in seconds after which it goes to sleep. */
  idle_seconds?: number | null;
  /** The age in seconds at which it is closed. */
  max_seconds?: number | null;
  /** The environment variables of all code and commands in it. */
  env?: Record<string, string> | null;
  /** Data of the caller; at most 16384 bytes of JSON. */
  metadata?: Record<string, unknown> | null;
  /**
   * When its files are saved to storage: before the answer, after it, or never. Without saved
   * files, it does not go to sleep but is closed.
   */
  saves?: "answer" | "background" | "never" | null;
  /**
   * The id of a snapshot, or of an ended session whose files were kept. The session starts
   * with these files, without variables.
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
