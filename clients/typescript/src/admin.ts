/**
 * The admin API: providers, their configuration, tests, and the active provider. The API key needs
 * the scope `admin`. A refused request throws AdminRefused.
 */

import type { Asked } from "./options.js";
import type { AdminConfig } from "./requests.js";
import type { AdminMessage, AdminPending, AdminTrial } from "./shapes.js";
import type { Call, Transport } from "./transport.js";

const SANDBOX = "/api/admin/sandbox";

/** One field of a provider's configuration. */
export interface ConfigField {
  type: "string" | "integer" | "number" | "boolean";
  required: boolean;
  label: string;
  secret?: boolean;
  placeholder?: string;
  description?: string;
  default?: string | number | boolean;
  options?: string[];
  multiline?: boolean;
  min?: number;
  max?: number;
}

export interface Provider {
  id: string;
  name: string;
  description: string;
  icon: string;
  tags: string[];
  config_schema: Record<string, ConfigField>;
  supported_languages: string[];
}

export type ConfigValues = Record<string, string | number | boolean>;

/** The configuration of each provider by its id, with masked secrets, and the active provider. */
export interface SandboxConfig {
  active: string | null;
  /** The reason why a configuration cannot be shown, by the provider's id. */
  unreadable?: Record<string, string>;
  [provider: string]: ConfigValues | Record<string, string> | string | null | undefined;
}

/** A secret that is masked or left out does not change. */
export type SandboxConfigRequest = Omit<AdminConfig, "config"> & { config: ConfigValues };

export class SandboxAdmin {
  constructor(private readonly transport: Transport) {}

  /** List all providers with their schemas. */
  async listSandboxProviders(options: Asked = {}): Promise<{ data: Provider[] }> {
    return await this.transport.json(this.call("GET", "/providers", options), "data");
  }

  async getSandboxConfig(options: Asked = {}): Promise<{ data: SandboxConfig }> {
    return await this.transport.json(this.call("GET", "/config", options), "data");
  }

  /** Save a configuration, and activate its provider unless `set_active` is false. The answer has
   * `pending` if a second administrator has to approve. */
  async setSandboxConfig(
    config: SandboxConfigRequest,
    options: Asked = {},
  ): Promise<AdminMessage & Partial<AdminPending>> {
    return await this.transport.json(this.call("POST", "/config", options, config), "message");
  }

  /** Start a sandbox and run code in it, with this configuration or the stored one. */
  async testSandboxConnection(
    provider: string,
    config?: ConfigValues,
    options: Asked = {},
  ): Promise<AdminTrial> {
    const call = this.call("POST", "/test", options, { provider, config });
    return await this.transport.json(call, "success", "message");
  }

  /** Choose the provider that runs the code. */
  async setActiveSandboxProvider(
    provider: string,
    options: Asked & { reason?: string } = {},
  ): Promise<AdminMessage & Partial<AdminPending>> {
    const { reason } = options;
    const call = this.call("PUT", "/active", options, { provider, reason });
    return await this.transport.json(call, "message");
  }

  private call(method: Call["method"], path: string, { signal }: Asked, json?: unknown): Call {
    // A change that is sent twice makes two versions, and a test two sandboxes.
    return { method, path: SANDBOX + path, json, repeatable: method === "GET", signal };
  }
}
