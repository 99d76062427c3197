use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tonic::metadata::{Ascii, MetadataValue};
use tonic::{Code, Request};

use crate::builder::ClientBuilder;
use crate::connection::{Servers, Service};
use crate::matcher::Matcher;
use crate::options::SubscribeOptions;
use crate::proto;
use crate::subscription::Subscription;
use crate::{Error, MatchRequest, MatchResult, Outcome, Routed};

/// The most outcomes and routed prompts of a call.
const MAX_REPORTED: usize = 1_000;
const MAX_ROUTED: usize = 64;

pub(crate) type TokenSource = Arc<dyn Fn() -> String + Send + Sync>;

/// A client of a server, or of several that serve the same workers. Clones share what they know of the servers.
///
/// Of several addresses, it uses the first one until a stream ends or a call finds it unavailable, and then the next. A
/// subscription resumes at its position there, if the servers share their journal; otherwise their epochs differ, and it
/// continues with a snapshot.
///
/// Each stream and each unary call opens its own connection, so that names are resolved again after a failure. The client
/// has no connection and no task between them.
#[derive(Clone)]
pub struct Client(pub(crate) Arc<Inner>);

pub(crate) struct Inner {
    pub servers: Servers,
    pub token: Option<TokenSource>,
    pub client_id: String,
    pub deadline: Duration,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("servers", &self.0.servers).finish_non_exhaustive()
    }
}

/// Returns the value of the header "authorization".
pub(crate) fn authorization(token: &str) -> Result<MetadataValue<Ascii>, Error> {
    let mut value: MetadataValue<Ascii> =
        format!("Bearer {token}").parse().map_err(|_| Error::config("token", "has characters that a header cannot have"))?;
    value.set_sensitive(true);
    Ok(value)
}

impl Inner {
    /// Returns a request with the token.
    pub fn request<T>(&self, message: T) -> Result<Request<T>, Error> {
        let mut request = Request::new(message);
        if let Some(token) = &self.token {
            request.metadata_mut().insert("authorization", authorization(&token())?);
        }
        Ok(request)
    }
}

impl Client {
    /// Returns a client without TLS and token for addresses `HOST:PORT`, separated by commas. It does not connect.
    pub fn new(targets: impl Into<String>) -> Result<Self, Error> {
        Self::builder(targets).build()
    }

    /// Returns a builder of a client for addresses `HOST:PORT`, separated by commas.
    pub fn builder(targets: impl Into<String>) -> ClientBuilder {
        ClientBuilder::new(targets)
    }

    /// Starts a subscription. It connects when the first update is awaited.
    pub fn subscribe(&self, options: SubscribeOptions) -> Subscription {
        Subscription::new(self.clone(), options)
    }

    /// Returns a matcher, which costs less than [`match_prefix`](Self::match_prefix) for more than a few requests. It does
    /// not connect.
    pub fn matcher(&self) -> Matcher {
        Matcher::new(self.clone())
    }

    /// Returns the dp ranks that hold prefixes of prompts, according to the server.
    pub async fn match_prefix(&self, request: MatchRequest) -> Result<MatchResult, Error> {
        let message = request.into_proto()?;
        let response = self.call(&message, |mut service, request| async move { service.match_prefix(request).await }).await?;
        Ok(MatchResult::from_proto(&message.model, response))
    }

    /// Returns the holders of blocks, by the engine's own hashes and by hashes of the contents: 1 to 10,000 in all. Blocks
    /// that no worker holds have none. A lookup by tokens hash is slow: it reads every block of the selected workers.
    pub async fn lookup_blocks(
        &self,
        block_hashes: Vec<u64>,
        tokens_hashes: Vec<u64>,
        filter: Option<proto::Filter>,
    ) -> Result<Vec<proto::BlockHolder>, Error> {
        let message = proto::LookupBlocksRequest { block_hashes, tokens_hashes, filter };
        let response = self.call(&message, |mut service, request| async move { service.lookup_blocks(request).await }).await?;
        Ok(response.holders)
    }

    /// Returns the workers that a filter selects, by name; None: all. The tiers of the filter are ignored.
    pub async fn workers(&self, filter: Option<proto::Filter>) -> Result<Vec<proto::WorkerStatus>, Error> {
        let message = proto::ListWorkersRequest { filter };
        let response = self.call(&message, |mut service, request| async move { service.list_workers(request).await }).await?;
        Ok(response.workers)
    }

    /// Reports what engines have reused of prompts, and returns how many outcomes the server ignored: those of workers,
    /// ranks and positions that it does not know.
    pub async fn report_outcomes(&self, outcomes: Vec<Outcome>) -> Result<u64, Error> {
        let mut ignored = 0;
        for part in outcomes.chunks(MAX_REPORTED) {
            let message = proto::ReportOutcomeRequest { outcomes: part.iter().map(Outcome::to_proto).collect() };
            let response =
                self.call(&message, |mut service, request| async move { service.report_outcome(request).await }).await?;
            ignored += u64::from(response.ignored);
        }
        Ok(ignored)
    }

    /// Tells the server where prompts were sent, and returns how many it ignored. Until the engine reports that their blocks
    /// are stored, the server's matches say that they are expected ([`Match::expected_blocks`](crate::Match)), so that
    /// requests with the same prefix can go to the same engine. Other servers do not get them.
    pub async fn note_routed(&self, routed: Vec<Routed>) -> Result<u64, Error> {
        let mut ignored = 0;
        for part in routed.chunks(MAX_ROUTED) {
            let message = proto::NoteRoutedRequest { routed: part.iter().map(Routed::to_proto).collect() };
            let response = self.call(&message, |mut service, request| async move { service.note_routed(request).await }).await?;
            ignored += u64::from(response.ignored);
        }
        Ok(ignored)
    }

    /// Makes a call over a connection for it. It tries each server until one is available.
    async fn call<M, R, F>(&self, message: &M, call: impl Fn(Service, Request<M>) -> F) -> Result<R, Error>
    where
        M: Clone,
        F: Future<Output = Result<tonic::Response<R>, tonic::Status>>,
    {
        let attempts = async {
            let servers = &self.0.servers;
            let mut attempt = 1;
            loop {
                let turn = servers.turn();
                let request = self.0.request(message.clone())?;
                let result = match servers.connect(turn).await {
                    Ok(service) => call(service, request).await.map_err(|status| Error::from_status(&status)),
                    Err(error) => Err(error),
                };
                let error = match result {
                    Ok(response) => return Ok(response.into_inner()),
                    Err(error) => error,
                };
                if error.code() != Some(Code::Unavailable) {
                    return Err(error);
                }
                servers.failed(turn);
                if attempt == servers.len() {
                    return Err(error);
                }
                attempt += 1;
            }
        };
        tokio::time::timeout(self.0.deadline, attempts)
            .await
            .unwrap_or_else(|_| Err(Error::local(Code::DeadlineExceeded, "the call has no answer within the client's deadline")))
    }
}
