//! The program as a process, and its output.

use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

/// A process that is ended with the value.
pub struct Side {
    child: Child,
    out: Option<BufReader<ChildStdout>>,
    /// First line that `listen` printed.
    first: String,
}

/// How a process ended.
#[derive(Debug)]
pub struct Ended {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

/// `listen` at a free port of this host.
pub fn listen(options: &[&str]) -> (Side, SocketAddr) {
    let mut side = start("listen", "127.0.0.1:0", options);
    let mut first = String::new();
    let out = side.out.as_mut().expect("the output");
    out.read_line(&mut first).expect("the first line");
    let address = match serde_json::from_str::<Value>(&first) {
        Ok(line) => line["listening"].as_str().expect("an address").to_owned(),
        Err(_) => first.trim().strip_prefix("listening at ").expect("an address").to_owned(),
    };
    side.first = first;
    (side, address.parse().expect("an address"))
}

pub fn connect(address: SocketAddr, options: &[&str]) -> Side {
    start("connect", &address.to_string(), options)
}

/// A process that needs no other.
pub fn alone(arguments: &[&str]) -> Ended {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ibgda-bring-up"));
    Side::spawn(command.args(arguments)).end()
}

fn start(role: &str, address: &str, options: &[&str]) -> Side {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ibgda-bring-up"));
    Side::spawn(command.args([role, address]).args(options))
}

impl Side {
    fn spawn(command: &mut Command) -> Self {
        let command = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("the program");
        let out = child.stdout.take().map(BufReader::new);
        Self { child, out, first: String::new() }
    }

    /// Waits until it ends by itself.
    pub fn end(mut self) -> Ended {
        let mut out = self.out.take().expect("the output");
        let mut text = self.first.clone();
        // Read by another thread, so that the test notices both too much output and a program that does not end.
        let reader = std::thread::spawn(move || {
            let mut rest = String::new();
            out.read_to_string(&mut rest).expect("text");
            rest
        });
        let deadline = Instant::now() + PATIENCE;
        let status = loop {
            if let Some(status) = self.child.try_wait().expect("the process") {
                break status;
            }
            assert!(Instant::now() < deadline, "the program does not end");
            std::thread::sleep(Duration::from_millis(2));
        };
        text += &reader.join().expect("the reader");
        let mut err = String::new();
        self.child.stderr.take().expect("errors").read_to_string(&mut err).expect("text");
        Ended { code: status.code(), out: text, err }
    }
}

impl Drop for Side {
    fn drop(&mut self) {
        // It has ended, or the test has failed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Ended {
    pub fn lines(&self) -> Vec<Value> {
        let parse =
            |line| serde_json::from_str(line).unwrap_or_else(|_| panic!("not JSON: {line}"));
        self.out.lines().map(parse).collect()
    }

    /// Stages and how they ended.
    pub fn stages(&self) -> Vec<(String, String)> {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let stages = self.lines();
        let stages =
            stages.iter().filter(|line| !line["stage"].is_null() && !line["state"].is_null());
        stages.map(|line| (text(&line["stage"]), text(&line["state"]))).collect()
    }

    /// Output of a stage.
    pub fn detail(&self, stage: &str) -> String {
        let lines = self.lines();
        let line = lines.iter().find(|line| line["stage"] == stage && !line["state"].is_null());
        let line = line.unwrap_or_else(|| panic!("no stage {stage}: {}\n{}", self.out, self.err));
        line["detail"].as_str().expect("text").to_owned()
    }

    /// Fails unless the program ended with `code` because `stage` failed for a reason with all `parts`.
    #[track_caller]
    pub fn expect_failure(&self, code: i32, stage: &str, parts: &[&str]) {
        assert_eq!(self.code, Some(code), "{}\n{}", self.out, self.err);
        let lines = self.lines();
        let failed: Vec<&Value> = lines.iter().filter(|line| line["state"] == "FAILED").collect();
        assert_eq!(failed.len(), 1, "{}", self.out);
        assert_eq!(failed[0]["stage"], stage, "{}", self.out);
        let detail = failed[0]["detail"].as_str().expect("text");
        for part in parts {
            assert!(detail.contains(part), "`{part}` is not in: {detail}");
        }
        assert!(failed[0]["next"].as_str().expect("advice").len() > 20);
        assert!(
            failed[0]["guide"].as_str().expect("a place").contains("docs/how-to/ibgda-bring-up.md")
        );
        let last = lines.last().expect("a result");
        assert_eq!((&last["stage"], &last["exit"]), (&Value::from(stage), &Value::from(code)));
    }
}

/// Files of a host that has everything, below `root`.
pub fn complete_host(root: &Path) {
    let write = |path: &str, text: &str| {
        let path = root.join(path);
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        std::fs::write(path, text).expect("a file");
    };
    let device = "sys/class/infiniband/softnic_0";
    write(&format!("{device}/ports/1/state"), "4: ACTIVE\n");
    write(&format!("{device}/fw_ver"), "28.39.1002\n");
    write(&format!("{device}/hca_type"), "MT4129\n");
    std::fs::create_dir_all(root.join(device).join("device")).expect("a folder");
    let driver = root.join(device).join("device/driver");
    std::os::unix::fs::symlink("/bus/pci/drivers/mlx5_core", driver).expect("a link");
    let modules = "mlx5_ib 1 0\nib_uverbs 1 0\nmlx5_core 1 0\nnvidia_peermem 1 0\n";
    write("proc/modules", modules);
    write("dev/infiniband/uverbs0", "");
    write("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module 570.86\n");
    write("proc/driver/nvidia/params", GOOD_OPTIONS);
    write("proc/sys/kernel/osrelease", "6.1.0\n");
}

pub const GOOD_OPTIONS: &str =
    "EnableStreamMemOPs: 1\nRegistryDwords: \"PeerMappingOverride=1;\"\n";
/// Longer than anything that ends well takes, even on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);
