//! Reads answers of kvcast with the types of Dynamo's crate, for package routers. Each line of the input is a request, and of the
//! output its answer. With a port as the argument, it is Dynamo's standalone indexer instead, until the input ends.

use std::collections::{BTreeMap, HashMap};
use std::io::{stdin, stdout, BufRead, Write};

use dynamo_kv_router::indexer::{TieredMatchDetails, WireTieredMatchDetails};
use dynamo_kv_router::protocols::{compute_block_hash_for_seq, BlockHashOptions, LocalBlockHash, RouterEvent, StorageTier, WorkerWithDpRank};
use dynamo_kv_router::services::indexer::{run_server, IndexerConfig};
use dynamo_kv_router::RadixTree;
use serde::{Deserialize, Serialize};

#[derive(Deserialize)]
struct Request {
    tokens: Vec<u32>,
    block_size: u32,
    /// The body of an answer of /query_tiered_by_hash.
    tiered: Option<Tiered>,
    /// The body of an answer of /dump.
    dump: Option<HashMap<String, Dump>>,
}

#[derive(Deserialize)]
struct Tiered {
    block_size: u32,
    tiered: WireTieredMatchDetails,
}

#[derive(Deserialize)]
struct Dump {
    block_size: u32,
    events: Vec<RouterEvent>,
}

/// Matched blocks by worker and rank.
type Scores = BTreeMap<String, u32>;

#[derive(Serialize)]
struct Answer {
    /// The prompt's hashes, as they are sent to /query_tiered_by_hash.
    hashes: Vec<i64>,
    device: Scores,
    host_pinned: Scores,
    /// The device tier's matches in an index of the crate that has applied the events of the dump.
    dump: Scores,
    /// Events of the dump that the index has rejected.
    rejected: usize,
}

fn name(worker: WorkerWithDpRank) -> String {
    format!("{}/{}", worker.worker_id, worker.dp_rank)
}

fn answer(request: Request) -> Answer {
    let options = BlockHashOptions { block_mm_infos: None, lora_name: None, cache_namespace: None, is_eagle: None };
    let hashes: Vec<LocalBlockHash> = compute_block_hash_for_seq(&request.tokens, request.block_size, options);
    let mut answer = Answer {
        hashes: hashes.iter().map(|h| h.0 as i64).collect(),
        device: Scores::new(),
        host_pinned: Scores::new(),
        dump: Scores::new(),
        rejected: 0,
    };
    if let Some(body) = request.tiered {
        assert_eq!(body.block_size, request.block_size);
        let details: TieredMatchDetails = body.tiered.into();
        answer.device = details.device.overlap_scores.scores.iter().map(|(w, n)| (name(*w), *n)).collect();
        if let Some(host) = details.lower_tier.get(&StorageTier::HostPinned) {
            answer.host_pinned = host.hits.iter().map(|(w, n)| (name(*w), *n as u32)).collect();
        }
    }
    let mut tree = RadixTree::new();
    for dump in request.dump.into_iter().flat_map(HashMap::into_values) {
        assert_eq!(dump.block_size, request.block_size);
        for event in dump.events.into_iter().filter(|e| e.storage_tier == StorageTier::Device) {
            answer.rejected += usize::from(tree.apply_event(event).is_err());
        }
    }
    answer.dump = tree.find_matches(hashes, false).scores.iter().map(|(w, n)| (name(*w), *n)).collect();
    answer
}

/// Serves Dynamo's standalone indexer at a port.
fn serve(port: u16) {
    std::thread::spawn(|| {
        let _ = stdin().lock().lines().last();
        std::process::exit(0);
    });
    let config = IndexerConfig {
        block_size: None,
        port,
        threads: 1,
        workers: None,
        model_name: String::new(),
        routing_group: String::new(),
        peers: None,
        access_log: None,
        trace_id_header: "x-request-id".parse().expect("a header"),
        access_log_local_time: false,
    };
    tokio::runtime::Runtime::new().expect("a runtime").block_on(run_server(config)).expect("the indexer ends with the input");
}

fn main() {
    if let Some(port) = std::env::args().nth(1) {
        return serve(port.parse().expect("a port"));
    }
    for line in stdin().lock().lines() {
        let request = serde_json::from_str(&line.expect("a line")).expect("a request");
        println!("{}", serde_json::to_string(&answer(request)).expect("an answer"));
        stdout().flush().expect("the output");
    }
}
