//! Developer commands. `cargo xtask test` checks everything that must hold before a change lands.

mod artifacts;
mod cuda;
mod fault;
mod features;
mod names;
mod output;
mod parallel;
mod process;
mod prose;
mod python;
mod rules;
mod sass;
mod source;
mod steps;
mod tools;
mod tree;

use std::process::ExitCode;
use std::time::Instant;

use clap::{Parser, Subcommand};

use crate::process::{Form, Outcome, is_required, skipped_inside_tests};
use crate::steps::Step;

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Developer commands of Switchyard")]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Runs every check and test. On Debian or Ubuntu as root it installs the packages that they need.
    ///
    /// Steps and tests that cannot run are listed as SKIPPED at the end. `SWITCHYARD_REQUIRE=all`, or a
    /// comma-separated list of step or resource names, turns skips into failures.
    Test {
        /// Runs the long forms of the steps (see `cargo xtask steps`).
        #[arg(long)]
        all: bool,
        /// Runs only these steps (see `cargo xtask steps`).
        #[arg(long, value_delimiter = ',')]
        only: Vec<String>,
        /// Leaves these steps out.
        #[arg(long, value_delimiter = ',')]
        skip: Vec<String>,
        /// Stops at the first failure.
        #[arg(long)]
        fail_fast: bool,
    },
    /// Lists the steps of `test`, with what their long forms add.
    Steps,
    /// Checks what each crate may depend on, and that modules form no new cycles.
    Rules {
        /// Removes from xtask/rules-known.txt the breaches that are gone.
        #[arg(long)]
        write: bool,
        /// Prints all breaches in the form of xtask/rules-known.txt.
        #[arg(long, conflicts_with = "write")]
        list: bool,
    },
    /// Counts breaches of the rules of plain English in comments and Markdown.
    Prose {
        /// Lists the flaws of a folder instead, `.` for files at the root.
        #[arg(long, value_name = "FOLDER")]
        list: Option<String>,
        /// Lowers the ceilings in xtask/prose-ceilings.toml to the counts.
        #[arg(long, conflicts_with = "list")]
        write: bool,
        /// With --write: also raises ceilings, for text that moved from another folder.
        #[arg(long, requires = "write")]
        raise: bool,
    },
    /// Writes the Grafana dashboard and the alerts of Prometheus from the names of the metrics.
    Dashboards,
    /// Formats Rust, C, C++ and CUDA as `test` wants them.
    Fmt,
    /// Builds the Python wheel and its sdist into `target/wheels`.
    Wheel {
        /// Packs a wheel in the development profile, of what `test` builds, without an sdist.
        #[arg(long)]
        dev: bool,
    },
    /// Asks PyPI and crates.io whether the names of the distribution and of the crates are free.
    Names {
        /// Names to ask for. Default: the distribution, and each crate that is not for development only.
        names: Vec<String>,
    },
    /// Installs the CUDA compiler from pinned packages and prints where it is.
    CudaToolkit,
    /// Builds the GPU tests and benchmarks into `target/gpu-bundle`, to be run on a host with a driver.
    GpuBundle,
    /// Runs the fault rig in release, against the binary that is shipped, and writes its report.
    Fault {
        /// Layers to finish at least.
        #[arg(long, default_value_t = 10_000)]
        layers: u64,
        /// Determines inputs and schedule; a fresh one by default.
        #[arg(long)]
        seed: Option<u64>,
        /// Folder for faults.json, instead of printing alone.
        #[arg(long)]
        out: Option<std::path::PathBuf>,
        /// Further arguments for the rig, after `--` (see `fault-rig --help`).
        #[arg(last = true)]
        rig: Vec<String>,
    },
}

fn main() -> ExitCode {
    match Args::parse().command {
        Command::Steps => {
            for step in &steps::ALL {
                println!("{:<10} {}", step.name, step.about);
                if !step.about_long.is_empty() {
                    println!("{:<10} with --all: {}", "", step.about_long);
                }
            }
            ExitCode::SUCCESS
        }
        Command::Fault { layers, seed, out, rig } => fault::run(layers, seed, out, &rig),
        Command::Rules { list: true, .. } => single(rules::list),
        Command::Rules { write, .. } => single(|| rules::run(write)),
        Command::Prose { list: Some(folder), .. } => single(|| prose::list(&folder)),
        Command::Prose { write: false, .. } => single(prose::check),
        Command::Prose { raise: false, .. } => single(|| prose::run(prose::Mode::Lower)),
        Command::Prose { .. } => single(|| prose::run(prose::Mode::Set)),
        Command::Dashboards => single(steps::write_dashboards),
        Command::Fmt => single(steps::fmt::apply),
        Command::Wheel { dev } => single(|| python::wheel(dev)),
        Command::Names { names } => single(|| names::check(&names)),
        Command::CudaToolkit => single(cuda::install_toolkit),
        Command::GpuBundle => single(cuda::make_bundle),
        Command::Test { all, only, skip, fail_fast } => {
            let form = if all { Form::Long } else { Form::Short };
            test(form, &only, &skip, fail_fast)
        }
    }
}

/// Runs one command from the workspace root.
fn single(run: impl FnOnce() -> anyhow::Result<Outcome>) -> ExitCode {
    match process::enter_workspace().and_then(|()| run()) {
        Ok(Outcome::Passed) => ExitCode::SUCCESS,
        Ok(Outcome::Failed(reason) | Outcome::Skipped(reason)) => {
            eprintln!("xtask: {reason}");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn test(form: Form, only: &[String], skip: &[String], fail_fast: bool) -> ExitCode {
    let steps = &steps::ALL;
    for name in only.iter().chain(skip) {
        if !steps.iter().any(|step| step.name == name) {
            eprintln!("xtask: no step is called `{name}`: `cargo xtask steps` lists them");
            return ExitCode::from(2);
        }
    }
    if let Err(error) = process::enter_workspace() {
        eprintln!("xtask: {error:#}");
        return ExitCode::from(2);
    }
    let mut results: Vec<(&Step, Outcome, f64)> = Vec::new();
    for step in steps {
        let name = step.name.to_owned();
        if (!only.is_empty() && !only.contains(&name)) || skip.contains(&name) {
            continue;
        }
        println!("\n==> {}: {}", step.name, step.about);
        let start = Instant::now();
        let outcome = step.run(form).unwrap_or_else(|error| Outcome::Failed(format!("{error:#}")));
        let stop = fail_fast && matches!(outcome, Outcome::Failed(_));
        results.push((step, outcome, start.elapsed().as_secs_f64()));
        if stop {
            break;
        }
    }
    summary(&results)
}

/// Prints a line for each step, the skips inside of test suites, and the counts.
fn summary(results: &[(&Step, Outcome, f64)]) -> ExitCode {
    let (mut passed, mut failed, mut skipped) = (0, 0, 0);
    println!("\n==> summary");
    for (step, outcome, seconds) in results {
        let required = is_required(step.name);
        let (word, reason) = match outcome {
            Outcome::Passed => ("ok", String::new()),
            Outcome::Failed(reason) => ("FAILED", format!(": {reason}")),
            Outcome::Skipped(reason) if required => {
                ("FAILED", format!(": required by SWITCHYARD_REQUIRE, but {reason}"))
            }
            Outcome::Skipped(reason) => ("SKIPPED", format!(": {reason}")),
        };
        match word {
            "ok" => passed += 1,
            "FAILED" => failed += 1,
            _ => skipped += 1,
        }
        println!("{word:<8} {:<10} {seconds:>6.1} s{reason}", step.name);
    }
    for (resource, reason) in skipped_inside_tests() {
        if is_required(&resource) {
            failed += 1;
            println!("FAILED   {resource}: required by SWITCHYARD_REQUIRE, but {reason}");
        } else {
            skipped += 1;
            println!("SKIPPED  {resource}: {reason}");
        }
    }
    println!("{passed} passed, {failed} failed, {skipped} skipped");
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
