//! Figures of fleets on this host, in plain text and with TLS and tickets, side by side in one run.
//!
//! ```text
//! fleet_figures SWITCHYARD MODEL join ROUNDS      exec of a server until its first answer, beside other clients' calls
//! fleet_figures SWITCHYARD MODEL layers SECONDS   layers of 1 and 64 tokens, in turns of 0.25 s
//! fleet_figures SWITCHYARD MODEL hedges SECONDS   the same without hedges and with them, no server slow
//! fleet_figures SWITCHYARD MODEL changes ROUNDS   stall and recovery after a kill; calls during a leave
//! ```
//!
//! MODEL is a checkpoint folder. Prints one JSON object a line: each round, then the summary.

mod changes;
mod fleet;
mod join;
mod layers;

use std::path::PathBuf;

use switchyard_cli::anyhow::{Context, Result, bail};

use fleet::Setup;

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [binary, model, mode, amount] = &args[..] else {
        bail!("usage: fleet_figures SWITCHYARD MODEL join|layers|hedges|changes ROUNDS|SECONDS");
    };
    let setup = Setup { binary: PathBuf::from(binary), model: PathBuf::from(model) };
    let amount: u32 = amount.parse().with_context(|| format!("{amount:?}: expected a number"))?;
    match mode.as_str() {
        "join" => join::run(&setup, amount),
        "layers" => layers::run(&setup, amount),
        "hedges" => layers::hedges(&setup, amount),
        "changes" => changes::run(&setup, amount),
        other => bail!("{other}: expected join, layers, hedges or changes"),
    }
}
