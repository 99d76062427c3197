/** The longest delay that a server may request. */
export const maxRetryDelayMs = 5 * 60_000;

/** An exponential backoff with jitter. */
export class Backoff {
  /** The number of failures in a row. */
  failures = 0;
  readonly #minMs: number;
  readonly #maxMs: number;
  /** The number of servers that are tried in turn. */
  readonly #servers: number;

  constructor(minMs: number, maxMs: number, servers: number) {
    this.#minMs = minMs;
    this.#maxMs = maxMs;
    this.#servers = servers;
  }

  /**
   * Counts a failure and returns the wait after it in milliseconds: a short one before the next server, until all have
   * failed. If the last server requests a longer delay, the wait is that delay plus up to a quarter at random, since the
   * server requests the same delay from many clients.
   */
  next(requestedMs = 0): number {
    const rounds = Math.floor(this.failures / this.#servers);
    this.failures++;
    if (this.failures % this.#servers !== 0) {
      return Math.random() * (this.#minMs / 10);
    }
    let wait = Math.min(this.#minMs * 2 ** rounds, this.#maxMs);
    wait -= Math.random() * (wait / 2);
    const requested = Math.min(requestedMs, maxRetryDelayMs);
    return requested > 0 ? Math.max(wait, requested * (1 + Math.random() / 4)) : wait;
  }
}
