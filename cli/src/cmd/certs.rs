//! `switchyard certs`: a small certificate authority for one fleet.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Result, bail};
use control_api::trust::Role;
use control_api::trust::certs::{
    Authority, CA_FILE, CA_KEY_FILE, CERT_FILE, CertificateInfo, Request, read_certificates,
    validity_from_now,
};

use crate::{Global, ui};

/// Options of `certs`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Make the authority of a fleet: its certificate ca.pem, and its key ca-key.pem, which only its owner can read.
    Init(InitArgs),
    /// Issue a certificate: writes cert.pem, key.pem and ca.pem into a folder for --tls.
    Issue(IssueArgs),
    /// Show the certificates in a file: holder, role, addresses and end.
    Show(ShowArgs),
}

#[derive(Debug, clap::Args)]
struct InitArgs {
    /// Folder of the authority. Keep it off the hosts of the fleet.
    dir: PathBuf,
    /// Replace an authority that is there. Certificates that it has issued are then worth nothing.
    #[arg(
        long,
        env = "SWITCHYARD_CERTS_FORCE",
        value_parser = clap::builder::FalseyValueParser::new()
    )]
    force: bool,
}

#[derive(Debug, clap::Args)]
struct IssueArgs {
    /// Folder of the authority.
    dir: PathBuf,
    /// Role of the holder. Control planes and expert servers are servers. Processes that compute with the experts are
    /// clients. Operators change the fleet, and viewers look at it.
    #[arg(long, env = "SWITCHYARD_CERTS_ROLE", value_name = "server|client|operator|viewer")]
    role: Role,
    /// Name of the holder. Status and audit show it.
    #[arg(long, env = "SWITCHYARD_CERTS_NAME")]
    name: String,
    /// Host name or IP address by which others reach a server. May be given several times.
    #[arg(
        long,
        env = "SWITCHYARD_CERTS_ADDRESS",
        value_name = "HOST_OR_IP",
        value_delimiter = ',',
        num_args = 1..
    )]
    address: Vec<String>,
    /// Days until the certificate ends, 1 to 3650.
    #[arg(
        long,
        env = "SWITCHYARD_CERTS_DAYS",
        default_value_t = 365,
        value_parser = clap::value_parser!(u32).range(1..=3650)
    )]
    days: u32,
    /// Folder to write into. Default: one with the holder's name in the folder of the authority.
    #[arg(long, env = "SWITCHYARD_CERTS_OUT", value_name = "DIR")]
    out: Option<PathBuf>,
    /// Replace a certificate and key that are there, such as for a renewal.
    #[arg(
        long,
        env = "SWITCHYARD_CERTS_FORCE",
        value_parser = clap::builder::FalseyValueParser::new()
    )]
    force: bool,
}

#[derive(Debug, clap::Args)]
struct ShowArgs {
    /// A file with certificates in PEM format, or a folder of `certs`.
    file: PathBuf,
}

pub fn run(global: &Global, args: Args) -> Result<ExitCode> {
    match args.command {
        Command::Init(args) => init(global, &args)?,
        Command::Issue(args) => issue(global, args)?,
        Command::Show(args) => show(global, &args)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn init(global: &Global, args: &InitArgs) -> Result<()> {
    Authority::init(&args.dir, args.force)?;
    let (cert, key) = (args.dir.join(CA_FILE), args.dir.join(CA_KEY_FILE));
    if global.json {
        return ui::print_json(&serde_json::json!({ "certificate": cert, "key": key }));
    }
    outln!("authority in {}: keep {} secret", args.dir.display(), key.display());
    outln!(
        "next: switchyard certs issue {} --role server --name NAME --address HOST_OR_IP",
        args.dir.display()
    );
    Ok(())
}

fn issue(global: &Global, args: IssueArgs) -> Result<()> {
    let (not_before, not_after) = validity_from_now(args.days);
    let IssueArgs { role, name, address: addresses, .. } = args;
    let out = args.out.unwrap_or_else(|| args.dir.join(&name));
    if out.is_file() {
        bail!("{} is a file: give another --name, or a folder by --out DIR", out.display());
    }
    let request = Request { name, role, addresses, not_before, not_after };
    Authority::open(&args.dir)?.issue_into(&out, &request, args.force)?;
    if global.json {
        return ui::print_json(&serde_json::json!({ "folder": out, "role": role.name() }));
    }
    outln!("certificate of {} {} in {}", role, request.name, out.display());
    outln!("use it with --tls {}, or SWITCHYARD_TLS={}", out.display(), out.display());
    Ok(())
}

fn show(global: &Global, args: &ShowArgs) -> Result<()> {
    let certificates = read_certificates(&file_of(&args.file))?;
    if global.json {
        return ui::print_json(&certificates);
    }
    for certificate in &certificates {
        outln!("{}", line(certificate));
    }
    Ok(())
}

/// The file with the certificate of a folder of `certs`, or `path` itself.
fn file_of(path: &Path) -> PathBuf {
    let inside = [CERT_FILE, CA_FILE].map(|name| path.join(name));
    inside.into_iter().find(|file| file.is_file()).unwrap_or_else(|| path.to_owned())
}

fn line(certificate: &CertificateInfo) -> String {
    let CertificateInfo { subject, name, role, addresses, is_authority, .. } = certificate;
    let holder = match (name, role) {
        (Some(name), Some(role)) => format!("{role} {name}"),
        _ if *is_authority => format!("authority {subject}"),
        _ => format!("{subject}, without a role"),
    };
    let addresses = match &addresses[..] {
        [] => String::new(),
        addresses => format!(" at {}", addresses.join(", ")),
    };
    format!("{holder}{addresses}, until {}", certificate.not_after_text)
}
