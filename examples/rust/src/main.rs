//! Subscribes to a kvcast server and prints a line per message and entry:
//!
//!     headers after 3 ms
//!     accepted after 3 ms: epoch 4d1c65e3a6a8b5f0, MODE_EARLIEST
//!     entry 1 of vllm-0: 1 event
//!
//! `cargo run -- http://localhost:50051 10` stops after 10 entries. Without a number, the
//! program does not stop. A tonic client returns the stream when it has received the headers,
//! so the server must not delay the headers until there is an entry.

use std::time::{Duration, Instant};

pub mod kvcast {
    tonic::include_proto!("kvcast.v1");
}

use kvcast::router_event_service_client::RouterEventServiceClient;
use kvcast::{accepted, subscribe_request::Start, FromEarliest, SubscribeRequest};
use tonic::transport::Endpoint;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let addr = args.next().unwrap_or("http://localhost:50051".into());
    let limit: u64 = match args.next() {
        Some(n) => n.parse()?,
        None => u64::MAX,
    };
    // Pings detect a dead connection. Servers allow a ping every 10 s.
    let channel = Endpoint::from_shared(addr)?
        .http2_keep_alive_interval(Duration::from_secs(10))
        .connect()
        .await?;
    let mut client = RouterEventServiceClient::new(channel);

    let began = Instant::now();
    let request = SubscribeRequest {
        start: Some(Start::Earliest(FromEarliest {})),
        ..Default::default()
    };
    let mut stream = client.subscribe(request).await?.into_inner();
    println!("headers after {} ms", began.elapsed().as_millis());
    let mut entries = 0;
    while let Some(message) = stream.message().await? {
        if let Some(a) = &message.accepted {
            let mode = accepted::Mode::try_from(a.mode)?.as_str_name();
            let ms = began.elapsed().as_millis();
            println!("accepted after {ms} ms: epoch {}, {mode}", a.epoch);
        }
        for e in &message.entries {
            let s = if e.events.len() == 1 { "" } else { "s" };
            println!("entry {} of {}: {} event{s}", e.seq, e.worker, e.events.len());
            entries += 1;
        }
        if entries >= limit {
            break;
        }
    }
    Ok(())
}
