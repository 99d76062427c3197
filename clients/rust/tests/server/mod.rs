//! A server for tests, whose streams are given by functions.

#![allow(dead_code)] // each test uses a part

#[allow(missing_docs, clippy::all)]
#[rustfmt::skip]
mod kvcast_v1;

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvcast_client::proto::{
    self, accepted::Mode, MatchPrefixesRequest, MatchPrefixesResponse, SubscribeRequest, SubscribeResponse,
};
use kvcast_v1::router_event_service_server::{RouterEventService, RouterEventServiceServer};
use tokio::net::TcpListener;
use tokio_stream::Stream;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status, Streaming};

pub type Messages<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;
type Subscribe = dyn Fn(SubscribeRequest) -> Messages<SubscribeResponse> + Send + Sync;
type Matches = dyn Fn(Streaming<MatchPrefixesRequest>) -> Messages<MatchPrefixesResponse> + Send + Sync;

/// What the server answers. What is not given is UNIMPLEMENTED.
#[derive(Clone, Default)]
pub struct Service {
    pub subscribe: Option<Arc<Subscribe>>,
    pub matches: Option<Arc<Matches>>,
    /// ListWorkers has no answer.
    pub hangs: bool,
}

#[tonic::async_trait]
impl RouterEventService for Service {
    async fn subscribe(&self, request: Request<SubscribeRequest>) -> Result<Response<Messages<SubscribeResponse>>, Status> {
        let subscribe = self.subscribe.as_ref().ok_or_else(|| Status::unimplemented(""))?;
        Ok(Response::new(subscribe(request.into_inner())))
    }

    async fn match_prefixes(
        &self,
        request: Request<Streaming<MatchPrefixesRequest>>,
    ) -> Result<Response<Messages<MatchPrefixesResponse>>, Status> {
        let matches = self.matches.as_ref().ok_or_else(|| Status::unimplemented(""))?;
        Ok(Response::new(matches(request.into_inner())))
    }

    async fn list_workers(&self, _: Request<proto::ListWorkersRequest>) -> Result<Response<proto::ListWorkersResponse>, Status> {
        if self.hangs {
            std::future::pending::<()>().await;
        }
        Err(Status::unimplemented(""))
    }
}

/// A server in a thread and a runtime of its own, so that its tasks are not the client's. It ends when it is dropped.
pub struct Server {
    pub address: SocketAddr,
    _runtime: tokio::runtime::Runtime,
}

impl Server {
    pub fn start(service: Service) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        let server = tonic::transport::Server::builder().add_service(RouterEventServiceServer::new(service));
        runtime.spawn(server.serve_with_incoming(TcpIncoming::from(listener).with_nodelay(Some(true))));
        Self { address, _runtime: runtime }
    }
}

/// Returns a runtime for a client.
pub fn client_runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

/// Returns the Accepted of a stream that resumes.
pub fn resumed(position: &proto::Position) -> SubscribeResponse {
    let accepted = proto::Accepted { epoch: "e".into(), mode: Mode::Resume as i32, ..Default::default() };
    SubscribeResponse { accepted: Some(accepted), position: Some(position.clone()), prev_seq: position.seq, ..Default::default() }
}

/// Waits until a condition holds, however slow the machine is.
pub async fn eventually(what: &str, condition: impl Fn() -> bool) {
    let began = Instant::now();
    while !condition() {
        assert!(began.elapsed() < Duration::from_secs(120), "it did not happen: {what}");
        tokio::task::yield_now().await;
    }
}

/// Waits until the client's runtime has no tasks.
pub async fn no_tasks() {
    let handle = tokio::runtime::Handle::current();
    eventually("the client has no tasks", || handle.metrics().num_alive_tasks() == 0).await;
}
