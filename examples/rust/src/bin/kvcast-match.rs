//! Asks a kvcast server which workers hold the longest prefix of a prompt, and prints a line for each,
//! the best first:
//!
//!     vllm-1 10.0.0.6:8000 32 tokens, TRUST_EXACT
//!
//! `cargo run --bin kvcast-match -- http://localhost:50051 MODEL 1,2,3`, with token ids. A router keeps
//! the channel, and routes by load if there is no answer in time.

use std::time::Duration;

pub mod kvcast {
    tonic::include_proto!("kvcast.v1");
}

use kvcast::router_event_service_client::RouterEventServiceClient;
use kvcast::{MatchPrefixRequest, Prompt, Trust};
use tonic::transport::Endpoint;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [addr, model, tokens] = args.as_slice() else {
        return Err("usage: kvcast-match ADDRESS MODEL TOKEN,...".into());
    };
    let token_ids = tokens.split(',').map(str::parse).collect::<Result<_, _>>()?;
    let channel = Endpoint::from_shared(addr.clone())?.connect().await?;
    let mut request = tonic::Request::new(MatchPrefixRequest {
        model: model.clone(),
        prompts: vec![Prompt { token_ids, ..Default::default() }],
        limit: 4,
        ..Default::default()
    });
    request.set_timeout(Duration::from_secs(10));
    let answer = RouterEventServiceClient::new(channel).match_prefix(request).await?;
    for m in &answer.into_inner().prompts[0].matches {
        let trust = Trust::try_from(m.trust)?.as_str_name();
        println!("{} {} {} tokens, {trust}", m.worker, m.endpoint, m.tokens);
    }
    Ok(())
}
