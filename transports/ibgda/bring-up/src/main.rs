//! `ibgda-bring-up`: takes a pair of mlx5 NICs through the bring-up guide of `docs/how-to/ibgda-bring-up.md`.
//!
//! **Not yet run on a ConnectX.** Two processes, one per host, exchange the parameters of their queues over a TCP
//! connection and go through the stages together. Both sides name the stage that fails, with the next steps for
//! its repair. With `--software-nic` both run on one host without any NIC.
//!
//! | module | content |
//! |---|---|
//! | `args` | the command line |
//! | `stage` | the stages, and advice for each that fails |
//! | `setup` | from the host's files to joined queues |
//! | `traffic` | tests of joined queues |
//! | `layer` | the fused kernels of a layer, on a GPU |
//! | `post` | the device functions, compiled for the processor |
//! | `memory` | the slots |
//! | `exchange` | the connection between both sides |
//! | `report` | lines and exit statuses |

mod args;
mod exchange;
mod in_use;
mod layer;
mod memory;
mod post;
mod report;
mod setup;
mod stage;
mod traffic;

use std::net::TcpListener;
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser};

use crate::args::{Cli, Options, Role};
use crate::exchange::{Channel, ExchangeError};
use crate::report::{Failure, Reporter};
use crate::setup::Setup;
use crate::stage::Stage;
use crate::traffic::Session;

fn main() -> ExitCode {
    let Cli { role } = Cli::parse();
    let (Role::Listen { options, .. } | Role::Connect { options, .. }) = &role;
    if let Err(text) = options.check() {
        Cli::command().error(ErrorKind::ArgumentConflict, text).exit();
    }
    let reporter = Reporter { is_json: options.json };
    reporter.end(run(&role, options, reporter)).into()
}

fn run(role: &Role, options: &Options, reporter: Reporter) -> Result<(), Failure> {
    // First, so that the other side may start at any time, and a wrong address fails immediately.
    let listener = match role {
        Role::Connect { .. } => None,
        Role::Listen { address, .. } => {
            let listener = TcpListener::bind(address).map_err(|source| ExchangeError::Io {
                what: format!("listening at {address}"),
                source,
            });
            let listener = listener.map_err(|error| failed(Stage::Connect, error.into()))?;
            reporter.listening(listener.local_addr().unwrap_or(*address));
            Some(listener)
        }
    };
    let is_connector = listener.is_none();
    let setup = Setup::new(options, is_connector, reporter);
    let Some(ready) = setup.prepare()? else { return Ok(()) };
    let channel = match (role, &listener) {
        (Role::Connect { address, .. }, _) => Channel::connect(*address, options.wait),
        (Role::Listen { .. }, Some(listener)) => Channel::accept(listener, options.wait),
        (Role::Listen { address, .. }, None) => {
            let source = std::io::ErrorKind::NotConnected.into();
            Err(ExchangeError::Io { what: format!("listening at {address}"), source })
        }
    };
    let channel = channel.map_err(|error| failed(Stage::Connect, error.into()))?;
    let session = setup.connect(ready, channel)?;
    go_through(session, options, reporter)
}

fn go_through(mut session: Session, options: &Options, reporter: Reporter) -> Result<(), Failure> {
    for stage in Stage::ALL.into_iter().filter(|stage| !stage.is_needed()) {
        if !options.stage.contains(&stage) {
            if stage < *options.stage.start() {
                reporter.left_out(stage, "by --stage");
            }
            continue;
        }
        if let Some(why) = session.lacks_fused().filter(|_| stage == Stage::Fused) {
            // A run of this stage alone must report that it did not run.
            if *options.stage.start() == Stage::Fused {
                let error = anyhow::anyhow!("{why}: give both sides `--gpu`");
                return Err(Failure { stage, is_lacking: true, error });
            }
            reporter.left_out(stage, why);
            continue;
        }
        match session.run(stage) {
            Ok(detail) => reporter.passed(stage, &detail),
            Err(error) => return Err(failed(stage, session.give_up(stage, error))),
        }
    }
    Ok(())
}

fn failed(stage: Stage, error: anyhow::Error) -> Failure {
    Failure { stage, is_lacking: false, error }
}
