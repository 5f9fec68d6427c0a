//! `switchyard generate`: text from a model whose experts run on servers.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use reference_model::{GenerateOptions, Generator};

use super::Counters;
use crate::{Global, ui};

/// Options of `generate`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Checkpoint folder. Default: the small model of this repository.
    #[arg(long, env = "SWITCHYARD_MODEL", value_name = "DIR")]
    model: Option<PathBuf>,
    /// Prompt: the text to continue.
    #[arg(long, env = "SWITCHYARD_PROMPT")]
    prompt: String,
    /// Largest number of tokens to generate.
    #[arg(long, env = "SWITCHYARD_MAX_NEW_TOKENS", default_value_t = 64)]
    max_new_tokens: usize,
    /// Sampling temperature. 0 always takes the most likely token.
    #[arg(
        long,
        env = "SWITCHYARD_TEMPERATURE",
        default_value_t = 0.0,
        value_parser = parse_temperature,
        allow_negative_numbers = true
    )]
    temperature: f32,
    /// Seed of the random choice of tokens.
    #[arg(long, env = "SWITCHYARD_SEED", default_value_t = 0)]
    seed: u64,
    #[command(flatten)]
    control: super::ControlArgs,
    #[command(flatten)]
    local: super::LocalArgs,
    #[command(flatten)]
    client: super::ClientArgs,
}

fn parse_temperature(text: &str) -> Result<f32, String> {
    let found = text.parse::<f32>().map_err(|error| error.to_string())?;
    match found.is_finite() && found >= 0.0 {
        true => Ok(found),
        false => Err("expected 0 or a positive number".to_owned()),
    }
}

pub fn run(global: &Global, args: Args) -> Result<ExitCode> {
    let dir = super::model_or_tiny(args.model)?;
    let checkpoint = super::open_client_checkpoint(&dir, &args.control)?;
    let options = GenerateOptions {
        max_new_tokens: args.max_new_tokens,
        temperature: args.temperature,
        seed: args.seed,
        ..GenerateOptions::default()
    };
    let service =
        super::Service::open(global, &checkpoint, &args.control, &args.local, &args.client)?;
    let mut generator = Generator::open(&checkpoint, service.client.clone())?;
    if !global.json {
        out!("{}", args.prompt);
    }
    let generation = generator.generate(&args.prompt, &options, &mut |event| {
        if !global.json {
            out!("{}", event.text);
        }
    })?;
    let tokens_per_s = generation.timings.tokens_per_s();
    if global.json {
        let counters = Counters::read(&service.client);
        ui::print_json(&serde_json::json!({
            "prompt_ids": generation.prompt_ids,
            "token_ids": generation.token_ids,
            "text": generation.text,
            "tokens_per_s": tokens_per_s,
            "clipped": generation.clipped,
            "lost_requests": counters.lost,
            "duplicated_requests": counters.duplicated,
        }))?;
    } else {
        outln!();
        if generation.clipped {
            let used = generation.max_new_tokens;
            ui::write_err(format_args!("the context ended after {used} new tokens\n"));
        }
        if let Some(rate) = tokens_per_s {
            let count = generation.token_ids.len();
            ui::write_err(format_args!("{count} tokens, {rate:.1} tokens/s\n"));
        }
    }
    Ok(ExitCode::SUCCESS)
}
