//! Chooses a worker for prompts, which are read as lines of token ids, by a view that follows a server.
//!
//!     echo "1 2 3 4" | cargo run --example route -- 127.0.0.1:50051 MODEL

use std::io::BufRead;
use std::sync::Arc;

use kvcast_client::{Client, Prompt, SubscribeOptions, Trust, View};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let client = Client::new(args.next().unwrap_or_else(|| "127.0.0.1:50051".into()))?;
    let model = args.next().unwrap_or_default();
    let view = Arc::new(View::new());
    let follower = tokio::spawn({
        let (view, updates) = (view.clone(), client.subscribe(SubscribeOptions::new()));
        async move { view.follow(updates).await }
    });
    tokio::select! {
        () = view.ready() => {}
        error = follower => return Err(error?.into()),
    }
    for line in std::io::stdin().lock().lines() {
        let tokens = line?.split_whitespace().map(str::parse).collect::<Result<Vec<u32>, _>>()?;
        let prompt = Prompt::tokens(tokens).model(&model).exclude_last_token(true);
        let matches = view.match_prompt(&prompt);
        // A prefix that is not exact may be shorter at the engine: any other rank may be as good.
        match matches.iter().find(|m| m.trust == Trust::Exact).or(matches.first()) {
            Some(m) => println!("{} rank {} has {} tokens ({})", m.worker, m.rank, m.tokens, m.trust.as_str_name()),
            None => println!("no worker has a block of the prompt"),
        }
    }
    Ok(())
}
