//! The step `scale`: a thousand peers, storms of connects and deaths over libfabric. Over shared memory
//! they belong to the unit tests.

use anyhow::Result;

use crate::features;
use crate::process::{Outcome, cargo, run};

/// Deaths cost more here than over shared memory: a process opens its provider first.
const NUM_DEATHS: &str = "60";

pub(super) fn check() -> Result<Outcome> {
    let tests = ["--test", "scale", "--test", "scale_storm", "--test", "scale_kill"];
    // Built by the step `unit`.
    let mut command = cargo(&["test", "--workspace", "--features", &features::all()]);
    command
        .args(tests)
        .env("SWITCHYARD_TEST_TRANSPORT", "libfabric:tcp;ofi_rxm")
        .env("SWITCHYARD_KILL_DEATHS", NUM_DEATHS);
    run(&mut command)
}
