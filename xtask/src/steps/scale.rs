//! The step `scale`: a thousand peers, storms of connects and deaths over libfabric. The step `unit` runs the same
//! tests over shared memory.

use anyhow::Result;

use crate::features;
use crate::process::{Form, Outcome, cargo, run};

pub(super) fn check(form: Form) -> Result<Outcome> {
    let tests = ["--test", "scale", "--test", "scale_storm", "--test", "scale_kill"];
    // The step `unit` has built them.
    let mut command = cargo(&["test", "--workspace", "--features", &features::all()]);
    command
        .args(tests)
        .env("SWITCHYARD_TEST_TRANSPORT", "libfabric:tcp;ofi_rxm")
        // A death takes longer than over shared memory: its process opens the provider first.
        .env("SWITCHYARD_KILL_DEATHS", form.pick("24", "60"));
    run(&mut command)
}
