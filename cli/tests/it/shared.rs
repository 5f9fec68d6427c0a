//! Two control planes on one etcd, killed under a client and servers that go on.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use attention_client::{ClientModel, MoeClient};
use checkpoint::Checkpoint;
use reference_model::{GenerateOptions, Generator};
use test_support::etcd::EtcdCluster;

const TOKEN: &str = "secret";
const LIMIT: Duration = Duration::from_secs(60);

/// A process of the binary, killed at the end.
struct Process {
    child: Child,
    lines: Vec<String>,
}

impl Process {
    /// Starts the binary and waits for a line of its output that contains `mark`.
    fn start(args: &[&str], mark: &str) -> Self {
        let child = Command::new(env!("CARGO_BIN_EXE_switchyard"))
            .arg("--json")
            .args(args)
            .env("SWITCHYARD_TOKEN", TOKEN)
            .stdout(Stdio::piped())
            .spawn()
            .expect("start");
        let mut process = Self { child, lines: Vec::new() };
        let stdout = BufReader::new(process.child.stdout.take().expect("stdout"));
        for line in stdout.lines().map_while(Result::ok) {
            let is_last = line.contains(mark);
            process.lines.push(line);
            if is_last {
                return process;
            }
        }
        panic!("{args:?} ended: {:?}", process.lines);
    }

    fn control_plane(etcd: &str) -> Self {
        let store = ["--store", "etcd", "--etcd-endpoints", etcd, "--etcd-lease-s", "2"];
        let fleet =
            ["control-plane", "--listen", "127.0.0.1:0", "--servers", "2", "--replicas", "2"];
        Self::start(&[&fleet[..], &store].concat(), "listening")
    }

    fn server(name: &str, control_planes: &str, model: &Path) -> Self {
        let model = model.to_str().expect("path");
        let place = ["expert-server", "--name", name, "--listen", "127.0.0.1:0", "--threads", "1"];
        let fleet = ["--control-plane", control_planes, "--model", model];
        Self::start(&[&place[..], &fleet].concat(), "serving")
    }

    /// The URL of a control plane.
    fn url(&self) -> String {
        let line: serde_json::Value = serde_json::from_str(&self.lines[0]).expect("JSON");
        format!("http://{}", line["addr"].as_str().expect("address"))
    }

    fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

fn status(urls: &str) -> Option<serde_json::Value> {
    let output = Command::new(env!("CARGO_BIN_EXE_switchyard"))
        .args(["--json", "status", "--control-plane", urls])
        .env("SWITCHYARD_TOKEN", TOKEN)
        .output()
        .expect("status");
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).ok()?;
    Some(json["status"].clone())
}

fn eventually(what: &str, condition: impl Fn() -> bool) {
    let begin = Instant::now();
    while !condition() {
        assert!(begin.elapsed() < LIMIT, "after {LIMIT:?} there was no {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_killed_leader_stops_no_call_and_new_servers_join() {
    let etcd = EtcdCluster::start(1);
    let endpoint = etcd.endpoints().remove(0);
    let mut planes = [Process::control_plane(&endpoint), Process::control_plane(&endpoint)];
    let urls = format!("{},{}", planes[0].url(), planes[1].url());
    let folder = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../data/tiny-moe"));
    let _servers = ["a", "b"].map(|name| Process::server(name, &urls, folder));

    let checkpoint = Arc::new(Checkpoint::open(folder).expect("checkpoint"));
    let token = Some(TOKEN.to_owned());
    let client = MoeClient::builder(ClientModel::of(&checkpoint))
        .control_plane(urls.clone(), token.clone())
        .secret(token)
        .deadline(Duration::from_secs(10))
        .build()
        .expect("client");
    client.wait_ready(LIMIT).expect("servers");
    let (stop, num_texts) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let traffic = std::thread::spawn({
        let (stop, num_texts) = (Arc::clone(&stop), Arc::clone(&num_texts));
        move || {
            let mut generator = Generator::open(&checkpoint, client).expect("generator");
            let options = GenerateOptions { max_new_tokens: 8, ..Default::default() };
            let mut generate = || {
                generator.generate("Ownership is", &options, &mut |_| {}).expect("a text").token_ids
            };
            let expected = generate();
            while !stop.load(Ordering::Relaxed) {
                assert_eq!(generate(), expected);
                num_texts.fetch_add(1, Ordering::Relaxed);
            }
        }
    });
    let goes_on = || {
        let before = num_texts.load(Ordering::Relaxed);
        eventually("text", || {
            traffic.is_finished() || num_texts.load(Ordering::Relaxed) > before + 3
        });
    };
    goes_on();

    let leader = status(&urls).expect("status")["leader"].as_str().expect("leader").to_owned();
    let index = usize::from(planes[1].url() == leader);
    let epoch = status(&urls).expect("status")["epoch"].as_u64();
    planes[index].kill();
    goes_on();
    // Joins as soon as the other control plane leads.
    let _third = Process::server("c", &urls, folder);
    eventually("status of the new leader", || {
        status(&urls).is_some_and(|status| {
            status["members"]["serving"] == 3
                && status["epoch"].as_u64() > epoch
                && status["leader"].as_str() == Some(&planes[1 - index].url())
        })
    });
    goes_on();
    stop.store(true, Ordering::Relaxed);
    traffic.join().expect("no call fails");
}

#[test]
fn settings_of_etcd_that_cannot_work_are_explained() {
    let plane = ["control-plane", "--listen", "127.0.0.1:0"];
    let missing = Path::new("/nonexistent/password");
    let missing = missing.to_str().expect("path");
    let etcd = ["--store", "etcd", "--etcd-endpoints", "http://127.0.0.1:1"];
    for (more, word) in [
        (&["--store", "etcd"][..], "--etcd-endpoints"),
        (&["--etcd-endpoints", "http://127.0.0.1:1"], "--store etcd"),
        (&etcd, "http://127.0.0.1:1"),
        (&[&etcd[..], &["--etcd-user", "root"]].concat(), "--etcd-password"),
        (&[&etcd[..], &["--etcd-password", "x"]].concat(), "--etcd-user"),
        (&[&etcd[..], &["--etcd-user", "root", "--etcd-password-file", missing]].concat(), missing),
        (&[&etcd[..], &["--data-dir", "/nonexistent"]].concat(), "choose one"),
    ] {
        let line = super::commands::fails(&[&plane[..], more].concat(), &[]);
        assert!(line.contains(word), "{word}: {line}");
    }
}
