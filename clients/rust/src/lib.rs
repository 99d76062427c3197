#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod backoff;
mod builder;
mod client;
mod connection;
mod error;
mod matcher;
mod matches;
mod options;
mod outcome;
mod position;
mod prompt;
pub mod proto;
mod status_details;
mod subscription;
mod update;
mod validator;
mod view;

pub use builder::ClientBuilder;
pub use client::Client;
pub use error::{Error, Reason};
pub use matcher::Matcher;
pub use matches::{Match, MatchRequest, MatchResult, PoolPrefix, TierPrefix};
pub use options::{GapPolicy, Start, SubscribeOptions};
pub use outcome::{Outcome, Routed};
pub use position::Position;
pub use prompt::{tokens_hashes, Prompt};
pub use proto::{DegradedReason, Tier, Trust};
pub use subscription::Subscription;
pub use tonic::Code;
pub use update::{Content, Interruption, Update};
pub use view::{Rank, View, ViewStatus, Worker};
