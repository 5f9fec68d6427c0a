//! `switchyard bench`.

mod engine;
mod moe;
mod p2p;

use std::process::ExitCode;

use anyhow::Result;
use clap::Subcommand;
use clap::error::ErrorKind;

use crate::Global;

/// Flags of `bench`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    bench: Bench,
}

#[derive(Debug, Subcommand)]
enum Bench {
    /// Latency and bandwidth of puts and flags between processes.
    P2p(p2p::Args),
    /// One layer through the service against the same experts in process.
    Moe(moe::Args),
}

/// Runs this process's part if it is a child of `bench p2p` or `bench moe --device`.
pub fn child() -> Option<ExitCode> {
    moe::child().or_else(p2p::child)
}

/// Refuses flags that would have no effect.
///
/// # Errors
/// A usage error that names the flag.
pub fn check(matches: &clap::ArgMatches) -> Result<(), clap::Error> {
    let bench = matches.subcommand_matches("bench");
    let of = |name| bench.and_then(|bench| bench.subcommand_matches(name));
    let useless = of("moe").and_then(moe::Args::useless);
    match useless.or_else(|| of("p2p").and_then(p2p::Args::useless)) {
        Some(text) => Err(clap::Error::raw(ErrorKind::ArgumentConflict, format!("{text}\n"))),
        None => Ok(()),
    }
}

pub fn run(global: &Global, args: Args) -> Result<ExitCode> {
    match args.bench {
        Bench::P2p(args) => p2p::run(global, args),
        Bench::Moe(args) => moe::run(global, args),
    }
}
