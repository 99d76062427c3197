//! The messages and the service of the contract, `kvcast.v1`. `clients/rust/generate` generates them from `proto/kvcast/v1`.

#![allow(missing_docs, clippy::all)]

#[rustfmt::skip]
mod kvcast_v1;

pub use kvcast_v1::*;
