/** How to connect with TLS. */
export interface TlsOptions {
  /** Certificates of authorities in PEM; undefined: those of Node.js. */
  ca?: string | Uint8Array | undefined;
  /** The client's certificate and key in PEM, for servers that ask for one. */
  cert?: string | Uint8Array | undefined;
  key?: string | Uint8Array | undefined;
  /** The name that the server's certificate must have; undefined: the host of the address. */
  serverName?: string | undefined;
}

/** The token of each call: text, or a function that is called before each call, for tokens that change. */
export type Token = string | (() => string | Promise<string>);

/** How to connect, and as whom. */
export interface ConnectionOptions {
  /** With true, the server's certificate must be of an authority that Node.js knows; undefined or false: no TLS. */
  tls?: TlsOptions | boolean | undefined;
  token?: Token | undefined;
}
