//! Many reconnects leak neither tasks nor file descriptors nor memory.

mod server;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvcast_client::proto::{self, subscribe_request, Entry, SubscribeResponse};
use kvcast_client::{Client, Error, Position, SubscribeOptions};
use server::{client_runtime, eventually, no_tasks, resumed, Server, Service};

/// The tests measure the process, so that they run one after the other.
static MEASURING: Mutex<()> = Mutex::new(());

fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count)
}

/// Returns the resident memory in bytes.
fn memory() -> usize {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    pages.split(' ').nth(1).map_or(0, |n| n.parse::<usize>().unwrap() * 4096)
}

/// Returns a service whose streams have one entry each, and end.
fn one_entry_each() -> Service {
    let subscribe = |request: proto::SubscribeRequest| {
        let Some(subscribe_request::Start::After(after)) = request.start else { panic!("no position") };
        let seq = after.seq + 1;
        let position = Position::new("e", seq);
        let entries = vec![Entry { seq, worker: "w".into(), ..Default::default() }];
        let message = SubscribeResponse { entries, position: Some(position.into()), prev_seq: after.seq, ..Default::default() };
        Box::pin(tokio_stream::iter([Ok(resumed(&after)), Ok(message)])) as server::Messages<_>
    };
    Service { subscribe: Some(Arc::new(subscribe)), ..Default::default() }
}

fn reconnect(times: u64) {
    let _measuring = MEASURING.lock().unwrap_or_else(|e| e.into_inner());
    let server = Server::start(one_entry_each());
    client_runtime().block_on(async {
        let client = Client::new(server.address.to_string()).unwrap();
        let ms = Duration::from_millis(1);
        let mut updates = client.subscribe(SubscribeOptions::new().after(Position::new("e", 0)).backoff(ms, ms));
        let (mut seq, mut interruptions) = (0, 0);
        let mut warm = None; // open files and memory after some reconnects
        while interruptions < times {
            let update = updates.next().await.unwrap().unwrap();
            if let Some(i) = update.interruption() {
                assert!(matches!(i.error, Error::Ended) && i.failures == 1, "{i:?}");
                interruptions += 1;
                if interruptions == times / 5 {
                    warm = Some((open_files(), memory()));
                }
            } else {
                seq += update.message().unwrap().entries.len() as u64;
            }
            assert_eq!(update.position, Some(Position::new("e", seq)));
        }
        assert_eq!(seq, times);
        let (files, bytes) = warm.unwrap();
        drop(updates);
        no_tasks().await;
        eventually("the files are closed", || open_files() <= files).await;
        let growth = memory().saturating_sub(bytes);
        // A kilobyte for each reconnect would be more; the rest is what allocators keep.
        assert!(growth < 2 << 20 | (times as usize) << 9, "{growth} bytes more after {times} reconnects");
    });
}

#[test]
fn reconnects_leak_nothing() {
    reconnect(500);
}

/// `cargo test --release --test reconnects -- --ignored` runs it.
#[test]
#[ignore = "it takes half a minute"]
fn many_reconnects_leak_nothing() {
    reconnect(10_000);
}
