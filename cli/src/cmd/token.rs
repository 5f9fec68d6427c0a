//! `switchyard token`: make, list and remove the tokens of a token file, and revoke the tickets of clients.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, bail};
use trust::Role;
use trust::tokens::{self, TokenEntry};

use crate::{Global, ui};

/// Options of `token`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, clap::Subcommand)]
enum Action {
    /// Make a random token of 256 bits, add its hash to the file, and print the token. It cannot be shown again.
    New(NewArgs),
    /// List the tokens of the file: identity, name, role and expiry. The file holds no token itself.
    List(FileArgs),
    /// Remove tokens from the file. Control planes refuse them within a second.
    Remove(RemoveArgs),
    /// Make servers refuse all tickets that the control plane has issued so far. Clients with a valid token or certificate
    /// get new ones by themselves. Connections that are open stay.
    RevokeTickets(super::ControlArgs),
}

/// The token file.
#[derive(Debug, clap::Args)]
struct FileArgs {
    /// Token file of the control plane: see its option --tokens.
    #[arg(long, env = "SWITCHYARD_TOKENS_FILE", value_name = "FILE")]
    file: PathBuf,
}

#[derive(Debug, clap::Args)]
struct NewArgs {
    #[command(flatten)]
    file: FileArgs,
    /// Rights of the holder. server: registers a server and changes it. client: reads the placement, gets tickets,
    /// reports servers. operator: drains servers, sets goals, reads everything. viewer: reads everything.
    #[arg(long, env = "SWITCHYARD_TOKEN_ROLE", value_name = "server|client|operator|viewer", value_parser = clap::value_parser!(Role))]
    role: Role,
    /// Name of the holder: 1 to 128 visible ASCII characters. A name may have several tokens of one role at a time.
    #[arg(long, env = "SWITCHYARD_TOKEN_NAME")]
    name: String,
    /// Time after which the token is refused, such as 90d or 12h. Default: never.
    #[arg(long, env = "SWITCHYARD_TOKEN_EXPIRES_IN", value_name = "TIME", value_parser = humantime::parse_duration)]
    expires_in: Option<Duration>,
}

#[derive(Debug, clap::Args)]
struct RemoveArgs {
    #[command(flatten)]
    file: FileArgs,
    /// Identity of one token, as `token list` shows it, or the name of a holder for all of its tokens.
    token: String,
}

pub fn run(global: &Global, args: Args) -> Result<ExitCode> {
    match args.action {
        Action::RevokeTickets(control) => {
            let url = control.required_url()?;
            let client = control.client(&url)?;
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .context("cannot start the runtime")?;
            let revoked = runtime.block_on(client.revoke_tickets())?;
            match global.json {
                true => ui::print_json(&revoked)?,
                false => {
                    outln!("tickets issued so far are revoked: least epoch {}", revoked.least_epoch)
                }
            }
        }
        Action::New(args) => {
            let token = tokens::generate();
            if args.expires_in.is_some_and(|time| time > LONGEST_LIFE) {
                bail!(
                    "--expires-in is more than 100 years: leave it out for a token that never ends"
                );
            }
            let end = args.expires_in.map(|time| SystemTime::now() + time);
            let entry = TokenEntry::new(&args.name, args.role, &token, end).context("--name")?;
            tokens::add(&args.file.file, &entry)?;
            match global.json {
                true => {
                    let mut shown = describe(&entry);
                    shown["token"] = token.into();
                    ui::print_json(&shown)?;
                }
                // Nothing else, so that a shell can take it into a file or a variable.
                false => outln!("{token}"),
            }
        }
        Action::List(args) => {
            let table = tokens::read(&args.file)?;
            if global.json {
                let entries: Vec<_> = table.entries().iter().map(describe).collect();
                ui::print_json(&entries)?;
            } else {
                table.entries().iter().for_each(show);
            }
        }
        Action::Remove(args) => {
            let removed = tokens::remove(&args.file.file, &args.token)?;
            if global.json {
                ui::print_json(&removed.iter().map(describe).collect::<Vec<_>>())?;
            } else {
                for entry in &removed {
                    outln!("removed {} of {}", entry.hash.id(), entry.name);
                }
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn describe(entry: &TokenEntry) -> serde_json::Value {
    serde_json::json!({
        "id": entry.hash.id(),
        "name": entry.name,
        "role": entry.role,
        "expires": entry.expires_text(),
        "expired": entry.has_expired(SystemTime::now()),
    })
}

fn show(entry: &TokenEntry) {
    let end = match entry.expires_text() {
        None => "never expires".to_owned(),
        Some(end) if entry.has_expired(SystemTime::now()) => format!("expired {end}"),
        Some(end) => format!("expires {end}"),
    };
    outln!("{}  {:8}  {}  {end}", entry.hash.id(), entry.role.name(), entry.name);
}

/// Longest life of a token that ends.
const LONGEST_LIFE: Duration = Duration::from_secs(100 * 365 * 86_400);
