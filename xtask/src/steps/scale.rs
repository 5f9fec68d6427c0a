//! The step `scale`: a thousand peers, storms of connects and deaths over libfabric. The step `unit` runs the same
//! tests over shared memory.

use anyhow::Result;

use crate::features;
use crate::process::{Form, Outcome, cargo, run};

pub(super) fn check(form: Form) -> Result<Outcome> {
    // Each test counts resources of its process. Without nextest, they run one after the other in one process.
    let nextest = cargo(&["nextest", "--version"]).output().is_ok_and(|out| out.status.success());
    let command: &[&str] = if nextest { &["nextest", "run", "--no-capture"] } else { &["test"] };
    let features = features::all();
    // The step `unit` has built them.
    let mut command = cargo(command);
    command.args(["--workspace", "--features", &features, "--test", "scale"]);
    if nextest {
        command.args(["-E", "not test(/^engine::/)"]);
    } else {
        command.args(["--", "--test-threads=1", "--nocapture", "--skip", "engine::"]);
    }
    command
        .env("SWITCHYARD_TEST_TRANSPORT", "libfabric:tcp;ofi_rxm")
        // A death takes longer than over shared memory: its process opens the provider first.
        .env("SWITCHYARD_KILL_DEATHS", form.pick("24", "60"));
    run(&mut command)
}
