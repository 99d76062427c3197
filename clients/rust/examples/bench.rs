//! Measures how many prompts a second a matcher has matched by a server: of 32 blocks by tokens hashes, with a limit of 8.
//!
//!     cargo run --release --example bench -- 127.0.0.1:50051 [SECONDS] [IN_FLIGHT]
//!
//! The prompts are chains of blocks of the server's snapshot.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use kvcast_client::proto::router_event::Event;
use kvcast_client::{Client, MatchRequest, Prompt, SubscribeOptions};

const BLOCKS: usize = 32;
const PROMPTS: usize = 256;

/// Returns prompts that workers hold.
async fn prompts(client: &Client) -> Result<Vec<Prompt>, kvcast_client::Error> {
    let mut updates = client.subscribe(SubscribeOptions::new());
    let mut chains: HashMap<(String, u64), Vec<u64>> = HashMap::new(); // by worker and last block
    while let Some(update) = updates.next().await.transpose()? {
        let Some(message) = update.message() else { continue };
        for blocks in &message.snapshot_blocks {
            for event in &blocks.events {
                let Some(Event::Stored(s)) = &event.event else { continue };
                let key = |hash| (blocks.worker.clone(), hash);
                let mut chain = s.parent_hash.and_then(|hash| chains.get(&key(hash)).cloned()).unwrap_or_default();
                for (&block, &tokens) in s.block_hashes.iter().zip(&s.tokens_hashes) {
                    chain.push(tokens);
                    chains.insert(key(block), chain.clone());
                }
            }
        }
        if message.snapshot_end.is_some() {
            break;
        }
    }
    let mut all: Vec<Vec<u64>> = chains.into_values().filter(|chain| chain.len() == BLOCKS).collect();
    all.sort();
    all.dedup();
    all.truncate(PROMPTS);
    Ok(all.into_iter().map(Prompt::tokens_hashes).collect())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let client = Client::new(args.next().unwrap_or_else(|| "127.0.0.1:50051".into()))?;
    let duration = Duration::from_secs(args.next().map_or(Ok(5), |text| text.parse())?);
    let in_flight: usize = args.next().map_or(Ok(8), |text| text.parse())?;
    let prompts = prompts(&client).await?;
    if prompts.is_empty() {
        return Err("no worker holds a prompt of 32 blocks".into());
    }
    let matcher = client.matcher();
    let began = Instant::now();
    let mut tasks = Vec::new();
    for task in 0..in_flight {
        let (matcher, prompts) = (matcher.clone(), prompts.clone());
        tasks.push(tokio::spawn(async move {
            let (mut requests, mut matches) = (0usize, 0usize);
            while began.elapsed() < duration {
                let prompt = prompts[(task + requests * in_flight) % prompts.len()].clone();
                let result = matcher.match_prefix(MatchRequest::new([prompt]).limit(8)).await?;
                matches += result.matches[0].len();
                requests += 1;
            }
            Ok::<_, kvcast_client::Error>((requests, matches))
        }));
    }
    let (mut requests, mut matches) = (0, 0);
    for task in tasks {
        let (r, m) = task.await??;
        requests += r;
        matches += m;
    }
    let rate = requests as f64 / began.elapsed().as_secs_f64();
    println!("{rate:.0} prompts/s ({} prompts, {:.1} matches each)", prompts.len(), matches as f64 / requests as f64);
    Ok(())
}
