//! No task and no connection outlives what is dropped, and deadlines hold.

mod server;

use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use kvcast_client::proto::{
    subscribe_request, MatchPrefixResponse, MatchPrefixesRequest, MatchPrefixesResponse, Position as Place,
};
use kvcast_client::{Client, Code, Error, MatchRequest, Position, Prompt, SubscribeOptions};
use server::{client_runtime, eventually, no_tasks, resumed, Messages, Server, Service};
use tokio_stream::{wrappers::ReceiverStream, Stream, StreamExt};
use tonic::{Status, Streaming};

/// Tells when it is dropped.
struct Guard(Arc<AtomicBool>);

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Returns a stream that tells when it is dropped.
fn guarded<T: Send + 'static>(
    messages: impl Stream<Item = Result<T, Status>> + Send + 'static,
    dropped: &Arc<AtomicBool>,
) -> Messages<T> {
    let guard = Guard(dropped.clone());
    Box::pin(messages.map(move |m| {
        let _held = &guard;
        m
    }))
}

fn request(token: u32) -> MatchRequest {
    MatchRequest::new([Prompt::tokens([token])])
}

/// Returns an answer that repeats the token of its request as a seq.
fn answer(request: &MatchPrefixesRequest) -> MatchPrefixesResponse {
    let token = request.request.as_ref().unwrap().prompts[0].token_ids[0];
    let position = Some(Place { epoch: "e".into(), seq: token.into() });
    MatchPrefixesResponse { id: request.id, response: Some(MatchPrefixResponse { position, ..Default::default() }) }
}

/// Polls a future once.
async fn poll_once<F: Future + Unpin>(future: &mut F) -> bool {
    std::future::poll_fn(|cx| Poll::Ready(std::pin::Pin::new(&mut *future).poll(cx).is_ready())).await
}

/// Returns a matcher's service that answers a request when there are more, or when the given number is waiting.
fn answers_in_groups(group: usize, ended: &Arc<AtomicBool>) -> Service {
    let ended = ended.clone();
    let matches = move |mut requests: Streaming<MatchPrefixesRequest>| {
        let (answers, stream) = tokio::sync::mpsc::channel(group);
        tokio::spawn(async move {
            let mut waiting = Vec::new();
            while let Some(Ok(request)) = requests.next().await {
                waiting.push(request);
                if waiting.len() == group {
                    for request in waiting.drain(..) {
                        _ = answers.send(Ok(answer(&request))).await;
                    }
                }
            }
        });
        guarded(ReceiverStream::new(stream), &ended)
    };
    Service { matches: Some(Arc::new(matches)), ..Default::default() }
}

#[test]
fn a_subscription_that_is_dropped_cancels_its_stream() {
    let ended = Arc::new(AtomicBool::default());
    let of_stream = ended.clone();
    let subscribe = move |request: kvcast_client::proto::SubscribeRequest| {
        let Some(subscribe_request::Start::After(after)) = request.start else { panic!("no position") };
        guarded(tokio_stream::once(Ok(resumed(&after))).chain(tokio_stream::pending()), &of_stream)
    };
    let server = Server::start(Service { subscribe: Some(Arc::new(subscribe)), ..Default::default() });
    client_runtime().block_on(async {
        let client = Client::new(server.address.to_string()).unwrap();
        let mut updates = client.subscribe(SubscribeOptions::new().after(Position::new("e", 7)));
        assert_eq!(updates.next().await.unwrap().unwrap().position, Some(Position::new("e", 7)));
        assert!(!poll_once(&mut Box::pin(updates.next())).await);
        assert!(!ended.load(Ordering::SeqCst));
        drop(updates);
        eventually("the server's stream has ended", || ended.load(Ordering::SeqCst)).await;
        no_tasks().await;
    });
}

#[test]
fn a_subscription_can_be_dropped_while_it_connects() {
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    client_runtime().block_on(async {
        let client = Client::new(silent.local_addr().unwrap().to_string()).unwrap();
        let mut updates = client.subscribe(SubscribeOptions::new());
        assert!(!poll_once(&mut Box::pin(updates.next())).await);
        drop(updates);
        no_tasks().await;
    });
}

#[test]
fn a_config_that_is_not_allowed_ends_a_subscription() {
    client_runtime().block_on(async {
        let mut updates = Client::new("127.0.0.1:1").unwrap().subscribe(SubscribeOptions::new().idle_timeout(Duration::ZERO));
        assert!(matches!(updates.next().await, Some(Err(Error::Config { .. }))));
        assert!(updates.next().await.is_none());
    });
}

#[test]
fn a_matcher_ends_with_its_last_clone() {
    let ended = Arc::new(AtomicBool::default());
    let server = Server::start(answers_in_groups(1, &ended));
    client_runtime().block_on(async {
        let matcher = Client::new(server.address.to_string()).unwrap().matcher();
        assert_eq!(matcher.match_prefix(request(5)).await.unwrap().position.seq, 5);
        let clone = matcher.clone();
        drop(matcher);
        assert_eq!(clone.match_prefix(request(6)).await.unwrap().position.seq, 6);
        assert!(!ended.load(Ordering::SeqCst));
        drop(clone);
        eventually("the server's stream has ended", || ended.load(Ordering::SeqCst)).await;
        no_tasks().await;
    });
}

#[test]
fn a_request_that_is_dropped_takes_no_answer_of_another() {
    let server = Server::start(answers_in_groups(2, &Arc::default()));
    client_runtime().block_on(async {
        let matcher = Client::new(server.address.to_string()).unwrap().matcher();
        let mut first = Box::pin(matcher.match_prefix(request(1)));
        assert!(!poll_once(&mut first).await);
        drop(first);
        assert_eq!(matcher.match_prefix(request(2)).await.unwrap().position.seq, 2);
    });
}

#[test]
fn requests_beyond_1024_wait() {
    const REQUESTS: u32 = 2048;
    let server = Server::start(answers_in_groups(1024, &Arc::default()));
    client_runtime().block_on(async {
        let matcher = Client::new(server.address.to_string()).unwrap().matcher();
        let ask = |n| {
            let matcher = matcher.clone();
            tokio::spawn(async move { matcher.match_prefix(request(n)).await })
        };
        let all: Vec<_> = (0..REQUESTS).map(ask).collect();
        for (n, request) in (0..).zip(all) {
            assert_eq!(request.await.unwrap().unwrap().position.seq, n);
        }
    });
}

#[test]
fn errors_of_calls() {
    let server = Server::start(Service { hangs: true, ..Default::default() });
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    client_runtime().block_on(async {
        let client = Client::builder(server.address.to_string()).deadline(Duration::from_millis(20)).build().unwrap();
        assert_eq!(client.workers(None).await.unwrap_err().code(), Some(Code::DeadlineExceeded));
        let error = Client::new(&closed).unwrap().workers(None).await.unwrap_err();
        assert_eq!((error.code(), error.reason()), (Some(Code::Unavailable), None), "{error}");
        let error = Client::new(&closed).unwrap().matcher().match_prefix(request(1)).await.unwrap_err();
        assert_eq!((error.code(), error.reason()), (Some(Code::Unavailable), None), "{error}");
        let client = Client::new(format!("{closed},{}", server.address)).unwrap();
        assert_eq!(client.note_routed(vec![]).await.unwrap(), 0);
        assert_eq!(client.match_prefix(request(1)).await.unwrap_err().code(), Some(Code::Unimplemented));
        no_tasks().await;
    });
}
