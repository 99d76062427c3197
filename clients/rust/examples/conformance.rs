//! The runner of the conformance scripts, see test/conformance/README.md: it reads jobs from its standard input, and reports
//! what the client did to its standard output.

use std::io::{self, BufRead, Write};
use std::time::Duration;

use kvcast_client::{
    proto, tokens_hashes, Client, Content, Error, GapPolicy, Match, MatchRequest, MatchResult, Outcome, Position, Prompt, Routed,
    Start, SubscribeOptions, Tier, Trust, Update, View,
};
use serde::Deserialize;
use serde_json::{json, Map, Value};

type Failure = Box<dyn std::error::Error>;

/// What the client is asked to do.
#[derive(Deserialize)]
struct Job {
    targets: String,
    #[serde(default)]
    ca_file: String,
    #[serde(default)]
    token: String,
    #[serde(default)]
    client_id: String,
    calls: Vec<Call>,
}

/// A part of a job, with the fields of its kind.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Call {
    call: String,
    options: Options,
    updates: usize,
    resnapshot_after: usize,
    wait_ms: u64,
    prompts: Vec<PromptSpec>,
    request: RequestSpec,
    requests: Vec<RequestSpec>,
    block_hashes: Vec<String>,
    tokens_hashes: Vec<String>,
    filter: Option<FilterSpec>,
    outcomes: Vec<OutcomeSpec>,
    routed: Vec<RoutedSpec>,
    tokens: Vec<u32>,
    block_size: usize,
    lora: String,
    salt: String,
    text: String,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Options {
    start: String,
    after: String,
    gap_policy: String,
    filter: Option<FilterSpec>,
    idle_timeout_ms: u64,
    backoff_min_ms: u64,
    backoff_max_ms: u64,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct FilterSpec {
    workers: Vec<String>,
    models: Vec<String>,
    tiers: Vec<String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct PromptSpec {
    model: String,
    tokens: Vec<u32>,
    block_size: u32,
    lora: String,
    salt: String,
    eagle: bool,
    exclude_last_token: bool,
    tokens_hashes: Vec<String>,
    block_hashes: Vec<String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct RequestSpec {
    model: String,
    prompts: Vec<PromptSpec>,
    workers: Vec<String>,
    limit: u32,
    after: String,
    max_wait_ms: u64,
    max_block_hashes: u32,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct OutcomeSpec {
    worker: String,
    rank: u32,
    position: String,
    predicted: u64,
    reused: u64,
    trust: String,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct RoutedSpec {
    worker: String,
    rank: u32,
    prompt: PromptSpec,
    ttl_ms: u64,
}

fn numbers(texts: &[String]) -> Result<Vec<u64>, Failure> {
    Ok(texts.iter().map(|text| text.parse()).collect::<Result<_, _>>()?)
}

impl FilterSpec {
    fn export(&self) -> Result<proto::Filter, Failure> {
        let tiers = self.tiers.iter().map(|name| Tier::from_str_name(name).map(i32::from).ok_or("a tier is not known"));
        Ok(proto::Filter { workers: self.workers.clone(), models: self.models.clone(), tiers: tiers.collect::<Result<_, _>>()? })
    }
}

impl PromptSpec {
    fn export(&self, model: &str) -> Result<Prompt, Failure> {
        let prompt = if !self.tokens_hashes.is_empty() {
            Prompt::tokens_hashes(numbers(&self.tokens_hashes)?)
        } else if !self.block_hashes.is_empty() {
            Prompt::block_hashes(numbers(&self.block_hashes)?)
        } else {
            let prompt = Prompt::tokens(&*self.tokens).lora(&self.lora).salt(&self.salt);
            prompt.eagle(self.eagle).exclude_last_token(self.exclude_last_token)
        };
        let model = if self.model.is_empty() { model } else { &self.model };
        Ok(prompt.model(model).block_size(self.block_size))
    }
}

impl RequestSpec {
    fn export(&self) -> Result<MatchRequest, Failure> {
        let prompts = self.prompts.iter().map(|p| p.export(&self.model)).collect::<Result<Vec<_>, _>>()?;
        let request =
            MatchRequest::new(prompts).workers(&*self.workers).limit(self.limit).max_block_hashes(self.max_block_hashes);
        if self.after.is_empty() {
            return Ok(request);
        }
        Ok(request.after(self.after.parse()?, Duration::from_millis(self.max_wait_ms)))
    }
}

impl Options {
    fn export(&self) -> Result<SubscribeOptions, Failure> {
        let mut options = SubscribeOptions::new().start(match &*self.start {
            "latest" => Start::Latest,
            "earliest" => Start::Earliest,
            _ if !self.after.is_empty() => Start::After(self.after.parse()?),
            _ => Start::Snapshot,
        });
        if self.gap_policy == "fail" {
            options = options.gap_policy(GapPolicy::Fail);
        }
        if let Some(filter) = &self.filter {
            options = options.filter(filter.export()?);
        }
        if self.idle_timeout_ms > 0 {
            options = options.idle_timeout(Duration::from_millis(self.idle_timeout_ms));
        }
        if self.backoff_min_ms > 0 {
            options = options.backoff(Duration::from_millis(self.backoff_min_ms), Duration::from_millis(self.backoff_max_ms));
        }
        Ok(options)
    }
}

/// Writes a line, without the fields that say nothing.
fn report(mut line: Value) {
    compact(&mut line);
    let mut out = io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).expect("the report is read");
}

fn compact(line: &mut Value) {
    if let Value::Object(fields) = line {
        fields.retain(|_, v| !(*v == json!(0) || *v == json!("") || *v == json!(false) || v.is_null() || *v == json!({})));
    }
}

/// Returns the name of a gRPC code.
fn code_name(code: kvcast_client::Code) -> String {
    let mut name = String::new();
    for c in format!("{code:?}").chars() {
        if c.is_uppercase() && !name.is_empty() {
            name.push('_');
        }
        name.push(c.to_ascii_uppercase());
    }
    name
}

fn why(error: &Error) -> String {
    match error {
        Error::Status { code, reason: Some(reason), .. } => format!("{}/{reason}", code_name(*code)),
        Error::Status { code, .. } => code_name(*code),
        Error::Violation { .. } => "VIOLATION".into(),
        Error::Idle => "IDLE".into(),
        Error::Ended => "ENDED".into(),
        Error::Rejected(_) => "REJECTED".into(),
        Error::Config { .. } => "CONFIG".into(),
        other => format!("OTHER: {other}"),
    }
}

fn fail(error: &Error) {
    let mut line = json!({"error": why(error)});
    if let Error::Status { reason: Some(_), epoch, oldest, newest, retry_after, .. } = error {
        line["epoch"] = json!(epoch);
        line["retry_after_ms"] = json!(retry_after.map_or(0, |d| d.as_millis() as u64));
        if *newest > 0 {
            line["oldest"] = json!(oldest.to_string());
            line["newest"] = json!(newest.to_string());
        }
    }
    report(line);
}

fn report_update(update: &Update) {
    let mut line = json!({});
    if let Some(position) = &update.position {
        line["position"] = json!(position.to_string());
    }
    match &update.content {
        Content::Interruption(i) => {
            line["interruption"] = json!(why(&i.error));
            line["snapshot"] = json!(i.snapshot);
            line["failures"] = json!(i.failures);
        }
        Content::Message(m) => {
            let kind = if let Some(accepted) = &m.accepted {
                line["mode"] = json!(accepted.mode().as_str_name());
                "accepted"
            } else if m.progress.is_some() {
                "progress"
            } else if m.snapshot_begin.is_some() {
                "snapshot_begin"
            } else if let Some(worker) = &m.snapshot_worker {
                line["worker"] = json!(worker.worker);
                "snapshot_worker"
            } else if !m.snapshot_blocks.is_empty() {
                "snapshot_blocks"
            } else if m.snapshot_end.is_some() {
                "snapshot_end"
            } else if !m.entries.is_empty() {
                line["seqs"] = m.entries.iter().map(|e| json!(e.seq.to_string())).collect();
                "entries"
            } else {
                "unknown"
            };
            line["update"] = json!(kind);
        }
    }
    report(line);
}

fn match_line(m: &Match) -> Value {
    let tiers: Map<String, Value> =
        m.tiers.iter().filter(|t| t.blocks > 0).map(|t| (t.tier.as_str_name().into(), json!(t.blocks))).collect();
    let reasons: Vec<_> = m.reasons.iter().map(|r| r.as_str_name()).collect();
    let mut line = json!({
        "worker": m.worker, "rank": m.rank, "blocks": m.blocks, "tokens": m.tokens, "tiers": tiers, "trust": m.trust.as_str_name(),
        "endpoint": m.endpoint, "expected_blocks": m.expected_blocks,
    });
    if !reasons.is_empty() {
        line["reasons"] = json!(reasons);
    }
    compact(&mut line);
    line
}

fn match_lines(matches: &[Vec<Match>]) -> Value {
    matches.iter().map(|of_prompt| of_prompt.iter().map(match_line).collect::<Value>()).collect()
}

fn report_result(result: &Result<MatchResult, Error>) {
    match result {
        Ok(r) => report(json!({"position": r.position.to_string(), "matches": match_lines(&r.matches)})),
        Err(error) => fail(error),
    }
}

fn report_ignored(result: Result<u64, Error>) {
    match result {
        Ok(ignored) => report(json!({"ignored": ignored.to_string()})),
        Err(error) => fail(&error),
    }
}

fn holder_line(h: &proto::BlockHolder) -> Value {
    let mut line = json!({
        "block_hash": h.block_hash.to_string(), "worker": h.worker, "model": h.model, "dp_rank": h.dp_rank, "tier": h.tier().as_str_name(),
        "tokens_hash": h.tokens_hash.map(|hash| hash.to_string()), "lora_name": h.lora_name,
    });
    if !h.sources.is_empty() {
        line["sources"] = json!(h.sources);
    }
    compact(&mut line);
    line
}

/// Returns the fields of a worker's status that scripts have.
fn worker_line(w: &proto::WorkerStatus) -> Value {
    let mut line =
        json!({"name": w.name, "model": w.model, "block_size": w.block_size, "endpoint": w.endpoint, "labels": w.labels});
    compact(&mut line);
    line
}

async fn subscribe(client: &Client, call: &Call) -> Result<(), Failure> {
    let mut updates = client.subscribe(call.options.export()?);
    for n in 1..=call.updates {
        match updates.next().await {
            Some(Ok(update)) => report_update(&update),
            Some(Err(error)) => {
                fail(&error);
                break;
            }
            None => break,
        }
        if n == call.resnapshot_after {
            updates.resnapshot("the caller rejects its state");
        }
    }
    Ok(())
}

async fn view(client: &Client, call: &Call) -> Result<(), Failure> {
    let mut updates = client.subscribe(call.options.export()?);
    let view = View::new();
    for _ in 0..call.updates {
        match updates.next().await {
            Some(Ok(update)) => view.apply(&update),
            Some(Err(error)) => {
                fail(&error);
                return Ok(());
            }
            None => break,
        }
    }
    tokio::time::sleep(Duration::from_millis(call.wait_ms)).await;
    let prompts = call.prompts.iter().map(|p| p.export("")).collect::<Result<Vec<_>, _>>()?;
    let matches: Vec<_> = prompts.iter().map(|p| view.match_prompt(p)).collect();
    report(json!({"matches": match_lines(&matches)}));
    Ok(())
}

async fn matches(client: &Client, call: &Call) -> Result<(), Failure> {
    let matcher = client.matcher();
    let requests = call.requests.iter().map(RequestSpec::export).collect::<Result<Vec<_>, _>>()?;
    let ask = |request| {
        let matcher = matcher.clone();
        tokio::spawn(async move { matcher.match_prefix(request).await })
    };
    let tasks: Vec<_> = requests.into_iter().map(ask).collect();
    for task in tasks {
        report_result(&task.await?);
    }
    Ok(())
}

async fn make(client: &Client, call: &Call) -> Result<(), Failure> {
    let filter = call.filter.as_ref().map(FilterSpec::export).transpose()?;
    match &*call.call {
        "subscribe" => subscribe(client, call).await?,
        "view" => view(client, call).await?,
        "match" => report_result(&client.match_prefix(call.request.export()?).await),
        "matches" => matches(client, call).await?,
        "lookup" => match client.lookup_blocks(numbers(&call.block_hashes)?, numbers(&call.tokens_hashes)?, filter).await {
            Ok(holders) => report(json!({"holders": holders.iter().map(holder_line).collect::<Value>()})),
            Err(error) => fail(&error),
        },
        "workers" => match client.workers(filter).await {
            Ok(workers) => report(json!({"workers": workers.iter().map(worker_line).collect::<Value>()})),
            Err(error) => fail(&error),
        },
        "report_outcomes" => {
            let outcome = |o: &OutcomeSpec| -> Result<Outcome, Failure> {
                let trust = Trust::from_str_name(&o.trust).unwrap_or_default();
                let (worker, position) = (o.worker.clone(), o.position.parse()?);
                Ok(Outcome { worker, rank: o.rank, position, predicted: o.predicted, reused: o.reused, trust })
            };
            report_ignored(client.report_outcomes(call.outcomes.iter().map(outcome).collect::<Result<_, _>>()?).await);
        }
        "note_routed" => {
            let routed = |r: &RoutedSpec| -> Result<Routed, Failure> {
                let (prompt, ttl) = (r.prompt.export("")?, Duration::from_millis(r.ttl_ms));
                Ok(Routed { worker: r.worker.clone(), rank: r.rank, prompt, ttl })
            };
            report_ignored(client.note_routed(call.routed.iter().map(routed).collect::<Result<_, _>>()?).await);
        }
        "tokens_hashes" => {
            let hashes = tokens_hashes(&call.tokens, call.block_size, &call.lora, &call.salt);
            report(json!({"tokens_hashes": hashes.iter().map(u64::to_string).collect::<Vec<_>>()}));
        }
        "position" => match call.text.parse::<Position>() {
            Ok(p) => report(json!({"epoch": p.epoch, "seq": p.seq.to_string(), "text": p.to_string()})),
            Err(_) => report(json!({"error": "POSITION"})),
        },
        other => return Err(format!("call {other:?} is not known").into()),
    }
    Ok(())
}

#[tokio::main(worker_threads = 1)]
async fn main() -> Result<(), Failure> {
    for line in io::stdin().lock().lines() {
        let job: Job = serde_json::from_str(&line?)?;
        let mut builder = Client::builder(&job.targets).client_id(&job.client_id);
        if !job.token.is_empty() {
            builder = builder.token(&job.token);
        }
        if !job.ca_file.is_empty() {
            builder = builder.tls_ca_file(&job.ca_file);
        }
        let client = builder.build()?;
        for call in &job.calls {
            make(&client, call).await?;
        }
        report(json!({"end": true}));
    }
    Ok(())
}
