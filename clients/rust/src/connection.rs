use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tonic::transport::{Channel, Endpoint};

use crate::proto::router_event_service_client::RouterEventServiceClient;
use crate::Error;

/// The interval of HTTP/2 pings of a connection without traffic: servers allow no shorter one. The connection is lost if
/// there is no answer within the timeout.
const PING_INTERVAL: Duration = Duration::from_secs(10);
const PING_TIMEOUT: Duration = Duration::from_secs(10);
/// In bytes, larger than any response: a response has at most 1 MiB or a single entry, and an entry has at most about 3 MiB
/// or a single event.
const MAX_MESSAGE: usize = 64 << 20;
/// Flow-control windows in bytes: 64 KiB, the default, would limit a snapshot from a distant server to some MiB/s.
const STREAM_WINDOW: u32 = 1 << 20;
const CONNECTION_WINDOW: u32 = 2 << 20;

/// The service over a connection of its own.
pub(crate) type Service = RouterEventServiceClient<Channel>;

/// The servers of a client. They are used in turn: the next one after a failure.
#[derive(Debug)]
pub(crate) struct Servers {
    endpoints: Vec<Endpoint>,
    /// The number of failures; it selects the server to use.
    current: AtomicUsize,
}

/// A server that was selected. It says which failure moves on to the next.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Turn(usize);

impl Servers {
    /// Parses addresses, separated by commas.
    pub fn new(targets: &str, scheme: &str, configure: impl Fn(Endpoint) -> Result<Endpoint, Error>) -> Result<Self, Error> {
        let mut endpoints = Vec::new();
        for target in targets.split(',').map(str::trim) {
            let wrong = |problem: &str| Error::config("targets", format!("{target:?} in {targets:?} {problem}"));
            if !target.rsplit_once(':').is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok()) {
                return Err(wrong("is not allowed: want HOST:PORT, or several separated by commas"));
            }
            let endpoint =
                Endpoint::from_shared(format!("{scheme}://{target}")).map_err(|e| wrong(&format!("is not allowed: {e}")))?;
            if endpoint.uri().path() != "/" || endpoint.uri().host().is_none() {
                return Err(wrong("is not allowed: want HOST:PORT"));
            }
            endpoints.push(configure(
                endpoint
                    .http2_keep_alive_interval(PING_INTERVAL)
                    .keep_alive_timeout(PING_TIMEOUT)
                    .initial_stream_window_size(STREAM_WINDOW)
                    .initial_connection_window_size(CONNECTION_WINDOW),
            )?);
        }
        Ok(Self { endpoints, current: AtomicUsize::new(0) })
    }

    pub fn len(&self) -> usize {
        self.endpoints.len()
    }

    /// Returns the server to use.
    pub fn turn(&self) -> Turn {
        Turn(self.current.load(Ordering::Relaxed))
    }

    /// Makes the next connection go to the next server, unless another failure of this turn has.
    pub fn failed(&self, turn: Turn) {
        let next = turn.0.wrapping_add(1);
        // An error means that it has.
        let _ = self.current.compare_exchange(turn.0, next, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Opens a connection. Its tasks end when the service and the streams over it are dropped.
    pub async fn connect(&self, turn: Turn) -> Result<Service, Error> {
        let endpoint = &self.endpoints[turn.0 % self.endpoints.len()];
        let channel = endpoint.connect().await.map_err(|e| Error::transport(&e))?;
        Ok(RouterEventServiceClient::new(channel).max_decoding_message_size(MAX_MESSAGE))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets() {
        for (targets, want) in [("a:1", 1), ("a:1,b:2", 2), ("a:1, [::1]:50051", 2), ("10.0.0.1:1", 1)] {
            assert_eq!(Servers::new(targets, "http", Ok).unwrap().len(), want, "{targets}");
        }
        for targets in ["", "a", "a:1,", ",a:1", "a:port", ":1", "http://a:1", "a/b:1", "a b:1", "a:99999"] {
            assert!(matches!(Servers::new(targets, "http", Ok), Err(Error::Config { .. })), "{targets}");
        }
    }

    #[test]
    fn a_failure_counts_once() {
        let servers = Servers::new("a:1,b:2", "http", Ok).unwrap();
        let turn = servers.turn();
        servers.failed(turn);
        servers.failed(turn);
        assert_eq!(servers.turn().0, 1);
    }
}
