import { lookup, type LookupAddress, type LookupOptions } from "node:dns";
import { createClient, type Client as RpcClient, type Interceptor } from "@connectrpc/connect";
import { createGrpcTransport, Http2SessionManager } from "@connectrpc/connect-node";
import type { ConnectionOptions, Token } from "./connection_options.js";
import { ConfigError, KvcastError } from "./errors.js";
import { RouterEventService } from "./gen/kvcast/v1/router_event_service_pb.js";

/** The shortest interval that servers allow, and how long an answer may take until the connection is lost. */
const pingIntervalMs = 10_000;
const pingTimeoutMs = 10_000;
/** How long a connection may take to be made. */
const connectTimeoutMs = 20_000;
/** Larger than any response: an entry has at most about 3 MiB, or a single event. */
const maxMessageBytes = 64 << 20;

/** A connection for one stream or one call. */
export interface Connection {
  readonly rpc: RpcClient<typeof RouterEventService>;
  /** Connects; it throws a KvcastError with UNAVAILABLE. A call connects by itself, without a time limit. */
  connect(): Promise<void>;
  /** Ends all calls and closes the connection. */
  close(): void;
  /** Makes the next connection go to the next server. */
  failed(): void;
}

/** The servers of a client, which are used in turn. */
export class Servers {
  readonly #urls: readonly string[];
  readonly #options: ConnectionOptions;
  /** Grows when the current server fails. */
  #current = 0;

  constructor(addresses: string, options: ConnectionOptions) {
    const scheme = options.tls ? "https" : "http";
    this.#urls = addresses.split(",").map((address) => url(scheme, address.trim()));
    this.#options = options;
  }

  /** The number of servers, at least 1. */
  get count(): number {
    return this.#urls.length;
  }

  /** Opens a connection to the current server. It connects with the first call. */
  open(): Connection {
    const index = this.#current;
    const baseUrl = this.#urls[index % this.#urls.length]!;
    const { tls, token } = this.#options;
    const secure = typeof tls === "object" ? tls : {};
    // The manager's timer for idle connections would keep each one in memory for its time, after it is closed.
    const idleConnectionTimeoutMs = Infinity;
    const manager = new Http2SessionManager(baseUrl, { pingIntervalMs, pingTimeoutMs, idleConnectionTimeoutMs }, {
      lookup: lookupShuffled,
      ...(tls ? { ca: pem(secure.ca), cert: pem(secure.cert), key: pem(secure.key), ...(secure.serverName ? { servername: secure.serverName } : {}) } : {}),
    });
    const interceptors: Interceptor[] = token === undefined ? [] : [authorized(token)];
    const transport = createGrpcTransport({
      baseUrl, sessionManager: manager, readMaxBytes: maxMessageBytes, acceptCompression: [], interceptors,
    });
    return {
      rpc: createClient(RouterEventService, transport),
      connect: () => connect(manager, baseUrl),
      close: () => manager.abort(),
      failed: () => {
        if (this.#current === index) {
          this.#current++;
        }
      },
    };
  }
}

function pem(text: string | Uint8Array | undefined): string | Buffer | undefined {
  return text === undefined || typeof text === "string" ? text : Buffer.from(text);
}

function url(scheme: string, address: string): string {
  const wrong = (): never => {
    throw new ConfigError("addresses", `have ${JSON.stringify(address)}: want HOST:PORT, several separated by commas`);
  };
  if (!/^(\[[0-9a-fA-F:.]+\]|[^:/?#@\s]+):[0-9]+$/.test(address)) {
    wrong();
  }
  try {
    return new URL(`${scheme}://${address}`).href;
  } catch {
    return wrong();
  }
}

function authorized(token: Token): Interceptor {
  return (next) => async (request) => {
    request.header.set("authorization", `Bearer ${typeof token === "string" ? token : await token()}`);
    return next(request);
  };
}

async function connect(manager: Http2SessionManager, baseUrl: string): Promise<void> {
  let timer: NodeJS.Timeout | undefined;
  const late = new Promise<"late">((resolve) => {
    timer = setTimeout(resolve, connectTimeoutMs, "late");
  });
  const state = await Promise.race([manager.connect(), late]);
  clearTimeout(timer);
  if (state === "late" || state === "error") {
    const cause = manager.error();
    manager.abort();
    const why = state === "late" ? `no connection within ${connectTimeoutMs / 1000} s` : cause instanceof Error ? cause.message : String(cause);
    throw new KvcastError(`connect to ${new URL(baseUrl).host}: ${why}`, { code: "UNAVAILABLE" }, { cause });
  }
}

/** Looks a name up, and orders its addresses at random: a name may have those of many servers, which share the load then. */
function lookupShuffled(
  host: string, options: LookupOptions,
  done: (err: NodeJS.ErrnoException | null, address: string | LookupAddress[], family?: number) => void,
): void {
  lookup(host, { ...options, all: true }, (err, all) => {
    if (err) {
      done(err, "");
      return;
    }
    for (let i = all.length - 1; i > 0; i--) {
      const j = Math.floor(Math.random() * (i + 1));
      [all[i], all[j]] = [all[j]!, all[i]!];
    }
    if (options.all) {
      done(null, all);
    } else {
      done(null, all[0]!.address, all[0]!.family);
    }
  });
}
