use std::fmt;
use std::sync::Arc;
use std::time::Duration;

#[cfg(feature = "tls")]
use tonic::transport::{Certificate, ClientTlsConfig, Identity};

use crate::client::{Client, Inner, TokenSource};
use crate::connection::Servers;
use crate::Error;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
const DEADLINE: Duration = Duration::from_secs(30);

/// Makes a [`Client`].
#[derive(Clone)]
#[must_use]
pub struct ClientBuilder {
    targets: String,
    token: Option<TokenSource>,
    client_id: String,
    deadline: Duration,
    connect_timeout: Duration,
    #[cfg(feature = "tls")]
    tls: Option<ClientTlsConfig>,
    #[cfg(feature = "tls")]
    error: Option<Error>,
}

impl fmt::Debug for ClientBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A token and a key are secrets.
        f.debug_struct("ClientBuilder").field("targets", &self.targets).finish_non_exhaustive()
    }
}

impl ClientBuilder {
    pub(crate) fn new(targets: impl Into<String>) -> Self {
        Self {
            targets: targets.into(),
            token: None,
            client_id: String::new(),
            deadline: DEADLINE,
            connect_timeout: CONNECT_TIMEOUT,
            #[cfg(feature = "tls")]
            tls: None,
            #[cfg(feature = "tls")]
            error: None,
        }
    }

    /// Sends a token with each call.
    pub fn token(self, token: impl Into<String>) -> Self {
        let token = token.into();
        self.token_from(move || token.clone())
    }

    /// Sends a token with each call, which a function returns: it may change.
    pub fn token_from(mut self, source: impl Fn() -> String + Send + Sync + 'static) -> Self {
        self.token = Some(Arc::new(source));
        self
    }

    /// Names the router for people, in the server's list of subscribers: at most 128 bytes of printable ASCII. It need not be
    /// unique.
    pub fn client_id(mut self, id: impl Into<String>) -> Self {
        self.client_id = id.into();
        self
    }

    /// Bounds the time of a unary call with all its attempts; 30 s by default.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Bounds the time to connect to a server; 10 s by default.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// Returns the client. It does not connect.
    pub fn build(self) -> Result<Client, Error> {
        #[cfg(feature = "tls")]
        if let Some(error) = self.error {
            return Err(error);
        }
        for (field, value) in [("deadline", self.deadline), ("connect_timeout", self.connect_timeout)] {
            if value.is_zero() {
                return Err(Error::config(field, "is 0: want more"));
            }
        }
        if let Some(token) = &self.token {
            crate::client::authorization(&token())?;
        }
        #[cfg(feature = "tls")]
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        #[cfg(not(feature = "tls"))]
        let scheme = "http";
        let servers = Servers::new(&self.targets, scheme, |endpoint| {
            let endpoint = endpoint.connect_timeout(self.connect_timeout);
            #[cfg(feature = "tls")]
            if let Some(tls) = &self.tls {
                return endpoint.tls_config(tls.clone()).map_err(|e| Error::config("tls", chain(&e)));
            }
            Ok(endpoint)
        })?;
        let inner = Inner { servers, token: self.token, client_id: self.client_id, deadline: self.deadline };
        Ok(Client(Arc::new(inner)))
    }
}

#[cfg(feature = "tls")]
impl ClientBuilder {
    fn with_tls(mut self, change: impl FnOnce(ClientTlsConfig) -> ClientTlsConfig) -> Self {
        self.tls = Some(change(self.tls.unwrap_or_default()));
        self
    }

    /// Reads a file; [`build`](Self::build) returns its error.
    fn read(&mut self, field: &str, path: &std::path::Path) -> Vec<u8> {
        std::fs::read(path).unwrap_or_else(|e| {
            self.error = Some(Error::config(field, format!("{}: {e}", path.display())));
            Vec::new()
        })
    }

    /// Uses TLS, and trusts the certificates of authorities in PEM.
    pub fn tls_ca(self, pem: impl AsRef<[u8]>) -> Self {
        self.with_tls(|tls| tls.ca_certificate(Certificate::from_pem(pem)))
    }

    /// Uses TLS, and trusts the certificates of authorities in a PEM file.
    pub fn tls_ca_file(mut self, path: impl AsRef<std::path::Path>) -> Self {
        let pem = self.read("tls_ca_file", path.as_ref());
        self.tls_ca(pem)
    }

    /// Uses TLS, and trusts the authorities that the system trusts.
    #[cfg(feature = "tls-native-roots")]
    pub fn tls_native_roots(self) -> Self {
        self.with_tls(ClientTlsConfig::with_native_roots)
    }

    /// Uses TLS, and expects this name in the servers' certificates in place of their host.
    pub fn tls_server_name(self, name: impl Into<String>) -> Self {
        self.with_tls(|tls| tls.domain_name(name))
    }

    /// Uses TLS, and presents a client certificate, in PEM with its key.
    pub fn tls_identity(self, certificate: impl AsRef<[u8]>, key: impl AsRef<[u8]>) -> Self {
        self.with_tls(|tls| tls.identity(Identity::from_pem(certificate, key)))
    }
}

#[cfg(feature = "tls")]
fn chain(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(source) => format!("{error}: {}", chain(source)),
        None => error.to_string(),
    }
}
