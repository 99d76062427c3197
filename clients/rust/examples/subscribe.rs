//! Prints the updates of a server, and after each the position from which to resume.
//!
//!     cargo run --example subscribe -- 127.0.0.1:50051 [EPOCH:SEQ]

use kvcast_client::{Client, Content, SubscribeOptions};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let client = Client::new(args.next().unwrap_or_else(|| "127.0.0.1:50051".into()))?;
    let mut options = SubscribeOptions::new();
    if let Some(position) = args.next() {
        options = options.after(position.parse()?);
    }
    let mut updates = client.subscribe(options);
    while let Some(update) = updates.next().await.transpose()? {
        match &update.content {
            Content::Message(m) if m.snapshot_begin.is_some() => println!("a snapshot begins: discard the state"),
            Content::Message(m) => {
                for entry in &m.entries {
                    println!("entry {} of worker {} has {} events", entry.seq, entry.worker, entry.events.len());
                }
            }
            Content::Interruption(i) => println!("the stream ended, another follows in {:?}: {}", i.wait, i.error),
        }
        if let Some(position) = &update.position {
            println!("resume after {position}"); // store it with the state
        }
    }
    Ok(())
}
