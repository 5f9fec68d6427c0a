//! A fleet with certificates of `certs`, and what is refused without them.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use control_api::{ControlClient, ModelDescriptor, ReadyRequest, RegisterRequest};
use tempfile::TempDir;

const TOKEN: &str = "not-for-strangers";
const LIMIT: Duration = Duration::from_secs(60);

fn switchyard(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_switchyard"));
    command.args(args).env("SWITCHYARD_TOKEN", TOKEN);
    command
}

fn run(args: &[&str]) -> Output {
    switchyard(args).output().expect("start")
}

/// The only line of a failed command.
fn failure(args: &[&str]) -> String {
    only_line(args, run(args))
}

/// As [`failure`], without the token, so that the certificate alone says who calls.
fn failure_by_certificate(args: &[&str]) -> String {
    only_line(args, switchyard(args).env_remove("SWITCHYARD_TOKEN").output().expect("start"))
}

fn only_line(args: &[&str], output: Output) -> String {
    assert_eq!(output.status.code(), Some(1), "{args:?}: {output:?}");
    let text = String::from_utf8(output.stderr).expect("text");
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(text.starts_with("error: ") && !text.contains(TOKEN), "{text}");
    text
}

/// A process of the fleet, killed at the end. Keeps what it wrote.
struct Process {
    child: Child,
    first: serde_json::Value,
}

impl Process {
    /// Waits for the event `mark`.
    fn start(args: &[&str], mark: &str) -> Self {
        let mut command = switchyard(args);
        let child = command.arg("--json").stdout(Stdio::piped()).spawn().expect("start");
        // Dropped, it kills the child, also after a failed assertion.
        let mut process = Self { child, first: serde_json::Value::Null };
        let lines = BufReader::new(process.child.stdout.take().expect("stdout")).lines();
        for line in lines.map_while(Result::ok) {
            let event: serde_json::Value = serde_json::from_str(&line).expect("JSON");
            let is_last = event["event"] == mark;
            if process.first.is_null() {
                process.first = event;
            }
            if is_last {
                return process;
            }
        }
        panic!("{args:?} ended");
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn tiny() -> String {
    format!("{}/../data/tiny-moe", env!("CARGO_MANIFEST_DIR"))
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a path of Unicode")
}

#[test]
fn three_commands_make_a_secure_fleet() {
    let dir = TempDir::new().expect("a folder");
    let ca = dir.path().join("ca");
    let (ca, fleet, engine) = (text(&ca), ca.join("fleet"), ca.join("engine"));
    let (fleet, engine) = (text(&fleet), text(&engine));
    let admin = format!("{ca}/admin");
    for args in [
        &["certs", "init", ca][..],
        &["certs", "issue", ca, "--role", "server", "--name", "fleet", "--address", "127.0.0.1"],
        &["certs", "issue", ca, "--role", "client", "--name", "engine"],
        &["certs", "issue", ca, "--role", "operator", "--name", "admin"],
    ] {
        let output = run(args);
        assert!(output.status.success(), "{args:?}: {output:?}");
    }
    let again = failure(&["certs", "init", ca]);
    assert!(again.contains("exists") && again.contains("--force"), "{again}");
    for (path, expected) in [
        (&format!("{fleet}/cert.pem")[..], "server fleet at 127.0.0.1, until 20"),
        (fleet, "server fleet at 127.0.0.1, until 20"),
        (ca, "authority "),
    ] {
        let shown = run(&["certs", "show", path]);
        let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
        assert!(shown.starts_with(expected), "{shown}");
    }
    let line = failure(&["certs", "show", "nosuch.pem"]);
    assert!(line.contains("a file with certificates"), "{line}");
    let line = failure(&["certs", "issue", ca, "--role", "viewer", "--name", "ca.pem"]);
    assert!(line.contains("--name") && line.contains("--out"), "{line}");

    let control = Process::start(
        &["control-plane", "--listen", "127.0.0.1:0", "--servers", "1", "--tls", fleet],
        "listening",
    );
    assert_eq!(control.first["scheme"], "https");
    let addr = control.first["addr"].as_str().expect("an address");
    let url = format!("https://{addr}");
    let model = tiny();
    let server = ["expert-server", "--name", "a", "--listen", "127.0.0.1:0", "--threads", "1"];
    let place = ["--model", &model, "--control-plane", &url, "--tls", fleet];
    let _server = Process::start(&[&server[..], &place].concat(), "serving");

    let status = run(&["status", "--control-plane", &url, "--tls", &admin]);
    let status = String::from_utf8_lossy(&status.stdout).into_owned();
    assert!(status.contains("health: healthy") && !status.contains("INSECURE"), "{status}");
    let generate = [
        "generate",
        "--model",
        &model,
        "--control-plane",
        &url,
        "--tls",
        engine,
        "--prompt",
        "Ownership is",
        "--max-new-tokens",
        "4",
    ];
    let generated = run(&generate);
    assert!(generated.status.success(), "{generated:?}");
    // A client gets a new ticket after all are revoked.
    let revoked = run(&["token", "revoke-tickets", "--control-plane", &url, "--tls", &admin]);
    assert!(revoked.status.success(), "{revoked:?}");
    let generated = run(&generate);
    assert!(generated.status.success(), "{generated:?}");

    let line = failure_by_certificate(&["drain", "a", "--control-plane", &url, "--tls", engine]);
    assert!(line.contains("operator"), "{line}");
    let line = failure(&["status", "--control-plane", &url]);
    assert!(line.contains("--tls DIR") && line.contains("SWITCHYARD_TLS"), "{line}");
    let authority = format!("{ca}/ca.pem");
    let line = failure_by_certificate(&["status", "--control-plane", &url, "--tls-ca", &authority]);
    assert!(line.contains("no client certificate") && line.contains("--tls DIR"), "{line}");
    let line = failure(&["status", "--control-plane", &format!("http://{addr}")]);
    assert!(line.contains("speaks HTTPS only"), "{line}");

    // The files are replaced by those of an authority that the client does not know.
    let other = dir.path().join("other");
    let other = text(&other);
    for args in [
        &["certs", "init", other][..],
        &["certs", "issue", other, "--role", "server", "--name", "fleet", "--address", "127.0.0.1"],
    ] {
        assert!(run(args).status.success());
    }
    for file in ["key.pem", "cert.pem"] {
        let from = format!("{other}/fleet/{file}");
        std::fs::copy(from, format!("{fleet}/{file}")).expect("copy");
    }
    let begin = Instant::now();
    let line = loop {
        let output = run(&["status", "--control-plane", &url, "--tls", &admin]);
        if !output.status.success() {
            break String::from_utf8_lossy(&output.stderr).into_owned();
        }
        assert!(begin.elapsed() < LIMIT, "the new files never came into force");
    };
    assert!(line.contains("not signed by an authority that this side trusts"), "{line}");
}

#[test]
fn plain_text_to_other_hosts_is_refused_with_both_remedies() {
    let model = tiny();
    let server = ["expert-server", "--name", "a", "--experts", "all", "--model", &model];
    for args in [
        &["control-plane", "--listen", "0.0.0.0:0"][..],
        &[&server[..], &["--listen", "0.0.0.0:0"]].concat(),
        &[&server[..], &["--listen", "127.0.0.1:0", "--metrics-listen", "0.0.0.0:0"]].concat(),
        &["status", "--control-plane", "http://10.255.255.1:7070"],
    ] {
        let line = failure(args);
        assert!(line.contains("--tls DIR") && line.contains("--insecure"), "{line}");
    }
    let open =
        Process::start(&["control-plane", "--listen", "0.0.0.0:0", "--insecure"], "listening");
    let addr = open.first["addr"].as_str().expect("an address").replace("0.0.0.0", "127.0.0.1");
    let url = format!("http://{addr}");
    for args in [&["status", "--control-plane", &url][..], &["doctor", "--control-plane", &url]] {
        let output = String::from_utf8_lossy(&run(args).stdout).into_owned();
        assert!(output.contains("INSECURE: 0.0.0.0:"), "{output}");
    }
}

/// A server that other hosts reach in plain text, or without a ticket, makes a fleet degraded that serves every expert.
#[test]
fn the_status_names_insecure_servers() {
    for (data_addr, needs_tickets, plain_text, expected) in [
        ("10.255.255.1:7171", true, true, Some("plain text to other hosts")),
        ("10.255.255.1:7171", false, false, Some("admits clients without a ticket")),
        ("[::1]:7171", false, true, None),
    ] {
        let args =
            ["control-plane", "--listen", "127.0.0.1:0", "--servers", "1", "--replicas", "1"];
        let args = [&args[..], &["--lease-ttl-ms", "3600000"]].concat();
        let plane = Process::start(&args, "listening");
        let url = format!("http://{}", plane.first["addr"].as_str().expect("an address"));
        let request = RegisterRequest {
            needs_tickets,
            plain_text,
            ..RegisterRequest::new("gpu-1", data_addr, small_model())
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.expect("a runtime").block_on(async {
            let client = ControlClient::new(&url, Some(TOKEN.to_owned())).expect("a client");
            let answer = client.register(&request).await.expect("a member");
            let (incarnation, holds) = (request.incarnation, answer.assignment);
            let ready = ReadyRequest { incarnation, holds };
            client.ready(&answer.member_id, &ready).await.expect("ready");
        });
        let output = run(&["status", "--control-plane", &url]);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let json = run(&["status", "--control-plane", &url, "--json"]);
        let json: serde_json::Value = serde_json::from_slice(&json.stdout).expect("JSON");
        let problems = json["problems"].to_string();
        let doctor = run(&["doctor", "--control-plane", &url]);
        let doctor = String::from_utf8_lossy(&doctor.stdout).into_owned();
        match expected {
            Some(expected) => {
                assert_eq!(output.status.code(), Some(3), "{text}");
                // Scripts that look at the picture learn the same.
                for args in [&["top", "--once"][..], &["top", "--json"]] {
                    let picture = run(&[args, &["--control-plane", &url]].concat());
                    assert_eq!(picture.status.code(), Some(3), "{picture:?}");
                }
                let line = format!("INSECURE: gpu-1: {expected}");
                assert!(text.contains(&line) && problems.contains(&line), "{text}\n{problems}");
                assert!(doctor.contains(&line), "{doctor}");
            }
            None => assert!(!(text.clone() + &doctor).contains("INSECURE"), "{text}\n{doctor}"),
        }
    }
}

fn small_model() -> ModelDescriptor {
    ModelDescriptor {
        fingerprint: "0123456789abcdef".to_owned(),
        architecture: "qwen3_moe".to_owned(),
        hidden: 64,
        moe_layers: vec![0],
        num_experts: 4,
        top_k: 2,
    }
}

#[test]
fn bad_certificates_are_named_before_anything_starts() {
    let dir = TempDir::new().expect("a folder");
    let line = failure(&["control-plane", "--listen", "127.0.0.1:0", "--tls", text(dir.path())]);
    assert!(line.contains("has no ca.pem"), "{line}");
    let line = failure(&["certs", "issue", text(dir.path()), "--role", "client", "--name", "x"]);
    assert!(line.contains("switchyard certs init"), "{line}");
    let (ca, key) = (dir.path().join("ca"), dir.path().join("key.pem"));
    assert!(run(&["certs", "init", text(&ca)]).status.success());
    assert!(
        run(&[
            "certs",
            "issue",
            text(&ca),
            "--role",
            "server",
            "--name",
            "a",
            "--address",
            "127.0.0.1"
        ])
        .status
        .success()
    );
    let [cert, cert_key] = ["cert.pem", "key.pem"].map(|name| ca.join("a").join(name));
    let (only_cert, required) =
        (["--tls-cert", text(&cert), "--tls-key", text(&cert_key)], ["--tls-clients", "required"]);
    let model = tiny();
    // With the rule that clients need a certificate, nothing listens without it.
    for listener in [
        &["control-plane", "--listen", "127.0.0.1:0"][..],
        &[
            "expert-server",
            "--name",
            "a",
            "--experts",
            "all",
            "--model",
            &model,
            "--listen",
            "127.0.0.1:0",
        ],
    ] {
        for (files, expected) in [
            (&[][..], "needs a certificate and an authority"),
            (&["--insecure"], "needs a certificate and an authority"),
            (&["--tls-ca", text(&ca.join("ca.pem"))], "needs a certificate and an authority"),
            (&only_cert, "no authority is given"),
        ] {
            let line = failure(&[listener, &required, files].concat());
            assert!(line.contains("--tls-clients required") && line.contains(expected), "{line}");
        }
        let line = failure(&[listener, &["--tls", text(&ca)]].concat());
        assert!(line.contains(text(&ca)) && line.contains("cert.pem"), "{line}");
    }
    std::fs::copy(ca.join("ca-key.pem"), &key).expect("copy");
    let line =
        failure(&["status", "--control-plane", "https://127.0.0.1:1", "--tls-key", text(&key)]);
    assert!(line.contains("--tls-cert and --tls-key"), "{line}");
}
