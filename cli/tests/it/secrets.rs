//! Secrets show up nowhere: not in logs at the level trace, arguments, metrics, answers, errors, traces or the audit log.

mod etcd;
mod taps;

use std::fs::File;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

const LIMIT: Duration = Duration::from_secs(120);

/// A small fleet with known secrets. Each process writes to files of the folder.
struct Fleet {
    dir: TempDir,
    processes: Vec<Child>,
    arguments: String,
}

impl Fleet {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("folder");
        std::fs::create_dir_all(dir.path().join("given")).expect("folder");
        Self { dir, processes: Vec::new(), arguments: String::new() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn command(&self, args: &[&str], name: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_switchyard"));
        let output = |end: &str| File::create(self.path(&format!("{name}.{end}"))).expect("file");
        command
            .args(["--json", "--log", "trace", "--exit-with-parent"])
            .args(args)
            .env_remove("SWITCHYARD_TOKEN")
            .stdin(Stdio::null())
            .stdout(output("out"))
            .stderr(output("err"));
        command
    }

    /// Starts a process, and waits for its event `event`.
    fn start(&mut self, args: &[&str], name: &str, event: &str) -> serde_json::Value {
        self.start_with(args, &[], name, event)
    }

    fn start_with(
        &mut self,
        args: &[&str],
        env: &[(&str, &str)],
        name: &str,
        event: &str,
    ) -> serde_json::Value {
        let child = self.command(args, name).envs(env.iter().copied()).spawn().expect("start");
        let cmdline = std::fs::read(format!("/proc/{}/cmdline", child.id())).expect("arguments");
        self.arguments.push_str(&String::from_utf8_lossy(&cmdline));
        self.processes.push(child);
        let begin = Instant::now();
        loop {
            let text = std::fs::read_to_string(self.path(&format!("{name}.out"))).expect("output");
            let found = text.lines().find(|line| line.contains(event));
            if let Some(Ok(value)) = found.map(serde_json::from_str) {
                return value;
            }
            let log = || std::fs::read_to_string(self.path(&format!("{name}.err")));
            assert!(begin.elapsed() < LIMIT, "{name}: no {event}: {:?}", log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Runs a process to its end. Its output stays in the folder.
    fn run(&self, args: &[&str], env: &[(&str, &str)], name: &str) -> bool {
        let mut command = self.command(args, name);
        command.envs(env.iter().copied()).status().expect("run").success()
    }

    /// Makes a token with the role, and writes it to a file of its own.
    fn new_token(&self, role: &str) -> String {
        let file = self.path("tokens");
        let args = ["token", "new", "--role", role, "--name", role, "--file", text(&file)];
        let output =
            Command::new(env!("CARGO_BIN_EXE_switchyard")).args(args).output().expect("run");
        assert!(output.status.success(), "{output:?}");
        let token = String::from_utf8(output.stdout).expect("text").trim().to_owned();
        std::fs::write(self.path("given").join(role), format!("{token}\n")).expect("token");
        token
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        for process in &mut self.processes {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

fn text(path: &Path) -> &str {
    path.to_str().expect("path")
}

/// The whole answer to a request.
fn ask(addr: &str, method: &str, path: &str, headers: &str, body: &str) -> String {
    let mut stream = TcpStream::connect(addr).expect("connect");
    stream.set_read_timeout(Some(LIMIT)).expect("timeout");
    let length = body.len();
    let request = format!(
        "{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n\
         Content-Length: {length}\r\n{headers}\r\n{body}"
    );
    stream.write_all(request.as_bytes()).expect("send");
    let mut answer = Vec::new();
    // The server may close before it has read all of a request that it refuses.
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}

#[test]
fn secrets_show_up_nowhere() {
    let mut fleet = Fleet::new();
    let [server, client, operator] =
        ["server", "client", "operator"].map(|role| fleet.new_token(role));
    let cluster_token = format!("cluster{:032x}", rand::random::<u128>());
    let wrong = format!("wrong{:032x}", rand::random::<u128>());
    std::fs::write(fleet.path("given").join("cluster"), &cluster_token).expect("token");
    let given = |name: &str| text(&fleet.path("given").join(name)).to_owned();
    let (cluster_file, server_file, client_file) =
        (given("cluster"), given("server"), given("client"));
    let (tokens, audit) = (fleet.path("tokens"), fleet.path("audit"));
    let control = [
        "control-plane",
        "--listen",
        "127.0.0.1:0",
        "--token-file",
        &cluster_file,
        "--tokens",
        text(&tokens),
        "--audit-log",
        text(&audit),
    ];
    let addr =
        fleet.start(&control, "control", "listening")["addr"].as_str().expect("addr").to_owned();
    let url = format!("http://{addr}");
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../data/tiny-moe");
    let place = [
        "expert-server",
        "--model",
        model,
        "--name",
        "a",
        "--listen",
        "127.0.0.1:0",
        "--metrics-listen",
        "127.0.0.1:0",
        "--threads",
        "1",
        "--control-plane",
        &url,
        "--token-file",
        &server_file,
    ];
    // All layers are traced. The collector asks for a secret, too.
    let taps::Collector { url: collector, heads, bodies: traces } = taps::Collector::start();
    let of_collector = format!("collector{:032x}", rand::random::<u128>());
    let headers = format!("authorization=Bearer {of_collector}");
    let traced = [
        ("SWITCHYARD_OTLP_ENDPOINT", collector.as_str()),
        ("SWITCHYARD_TRACE_SAMPLE_RATIO", "1"),
        ("OTEL_EXPORTER_OTLP_HEADERS", headers.as_str()),
    ];
    fleet.start_with(&place, &traced, "server", "serving");

    // A client by file, one by variable, one with a wrong token, and one whose role does not do.
    let generate = [
        "generate",
        "--model",
        model,
        "--prompt",
        "An",
        "--max-new-tokens",
        "2",
        "--control-plane",
        &url,
    ];
    let by_file = [&generate[..], &["--token-file", &client_file]].concat();
    assert!(fleet.run(&by_file, &traced, "by-file"));
    let with_token = [&traced[..], &[("SWITCHYARD_TOKEN", &client)]].concat();
    assert!(fleet.run(&generate, &with_token, "by-variable"));
    // Collectors that do not answer or cannot be used, and URLs with a password.
    for (name, url) in [
        ("no-collector", "http://127.0.0.1:1".to_owned()),
        ("password-of-collector", format!("http://u:{wrong}@127.0.0.1:1")),
        ("malformed-collector", format!("u:{wrong}@127.0.0.1:1")),
    ] {
        let lost = [&with_token[..], &[("SWITCHYARD_OTLP_ENDPOINT", &url)]].concat();
        assert_eq!(fleet.run(&generate, &lost, name), name == "no-collector");
    }
    for scheme in ["http", "dns"] {
        let inside = format!("{scheme}://u:{wrong}@127.0.0.1:1");
        assert!(!fleet.run(&["status", "--control-plane", &inside], &[], &format!("{scheme}-url")));
    }
    assert!(!fleet.run(&generate, &[("SWITCHYARD_TOKEN", &wrong)], "wrong"));
    let drain = ["drain", "a", "--control-plane", &url];
    assert!(!fleet.run(&drain, &[("SWITCHYARD_TOKEN", &client)], "forbidden"));
    // It has the only replicas.
    for (action, more) in [("drain", &["--force"][..]), ("resume", &[])] {
        let args = [&[action, "a", "--control-plane", &url], more].concat();
        assert!(fleet.run(&args, &[("SWITCHYARD_TOKEN", &operator)], action));
    }
    let doctor = ["doctor", "--control-plane", &url];
    fleet.run(&doctor, &[("SWITCHYARD_TOKEN", &operator)], "doctor");

    let bearer = |token: &str| format!("Authorization: Bearer {token}\r\n");
    let operator_header = bearer(&operator);
    let mut answers = String::new();
    for path in [
        "/v1/status",
        "/v1/members",
        "/v1/audit",
        "/v1/events",
        "/v1/whoami",
        "/metrics",
        "/readyz",
    ] {
        let answer = ask(&addr, "GET", path, &operator_header, "");
        assert!(answer.starts_with("HTTP/1.1 200"), "{path}: {answer}");
        answers += &answer;
    }
    assert!(answers.contains("\"drain\""), "the audit log lacks a drain: {answers}");
    // Wrong requests, with secrets where they do not belong.
    let secrets = [&server, &client, &operator, &cluster_token, &wrong];
    for secret in secrets {
        let basic = format!("Authorization: Basic {secret}\r\n");
        let vouch =
            format!("x-switchyard-control-token: {secret}\r\nx-switchyard-caller: {secret}\r\n");
        let json = format!("{{\"token\":\"{secret}\"}}");
        for (method, path, headers, body) in [
            ("GET", "/v1/status", &bearer(secret), ""),
            ("GET", "/v1/status", &basic, ""),
            ("GET", "/v1/status", &vouch, ""),
            ("PUT", "/v1/goals", &bearer(secret), ""),
            ("PUT", "/v1/goals", &operator_header, json.as_str()),
            ("POST", "/v1/members", &bearer(secret), "[]"),
            ("POST", "/nowhere", &bearer(secret), "x"),
        ] {
            let answer = ask(&addr, method, path, headers, body);
            // A control plane takes that for a follower that it does not know.
            let is_vouching = headers == &vouch;
            let is_as_expected = answer.starts_with("HTTP/1.1 5") == is_vouching;
            assert!(is_as_expected, "{method} {path} with {headers:?}: {answer}");
            answers += &answer;
        }
    }
    let metrics_addr = answers.split("\"metrics_addr\":\"").nth(1).expect("the server's listener");
    let metrics_addr = metrics_addr.split('"').next().expect("address").to_owned();
    for path in ["/metrics", "/healthz", "/readyz"] {
        answers += &ask(&metrics_addr, "GET", path, &operator_header, "");
    }
    // A token where a hash belongs: the control plane complains about the file.
    let good = std::fs::read_to_string(&tokens).expect("tokens");
    std::fs::write(&tokens, format!("{good}{server}\n")).expect("tokens");
    let begin = Instant::now();
    while !ask(&addr, "GET", "/v1/status", &operator_header, "").contains("token file") {
        assert!(begin.elapsed() < LIMIT, "the wrong file is not in the status");
        std::thread::sleep(Duration::from_millis(100));
    }
    answers += &ask(&addr, "GET", "/v1/status", &operator_header, "");
    answers += &ask(&addr, "GET", "/v1/audit", &operator_header, "");
    assert!(answers.contains("token file") && answers.contains("wrong_file"), "{answers}");
    std::fs::write(&tokens, &good).expect("tokens");

    let begin = Instant::now();
    while !["layer", "frame", "compute"].iter().all(|span| traces.text().contains(span)) {
        assert!(begin.elapsed() < LIMIT, "spans of client and server: {:?}", traces.text());
        std::thread::sleep(Duration::from_millis(100));
    }

    assert!(heads.text().contains(&of_collector), "the collector has no secret: {}", heads.text());

    // The logs hold all that was written so far.
    let mut searched = fleet.written();
    searched.push(("answers".to_owned(), answers));
    searched.push(("traces".to_owned(), traces.text()));
    let lost = std::fs::read_to_string(fleet.path("no-collector.err")).expect("log");
    assert!(lost.contains("cannot export spans"), "{lost}");
    assert!(searched.iter().any(|(name, text)| name.ends_with("audit") && text.contains("drain")));
    // A part of a secret is as bad.
    let secrets = [&server, &client, &operator, &cluster_token, &wrong, &of_collector];
    expect_absent(&searched, secrets.map(|secret| &secret[secret.len() - 16..]));
}

/// With TLS, one fleet with tickets, and one whose servers show each other a secret derived from the token.
#[test]
fn keys_tickets_and_proofs_show_up_nowhere() {
    for tickets in ["required", "off"] {
        let mut fleet = Fleet::new();
        let token = format!("cluster{:032x}", rand::random::<u128>());
        let ca = fleet.path("given").join("ca");
        let (ca, token_file) = (text(&ca).to_owned(), fleet.path("given").join("token"));
        std::fs::write(&token_file, format!("{token}\n")).expect("token");
        let token_file = text(&token_file);
        for (name, args) in [
            ("init", &["init", &ca][..]),
            (
                "issue-fleet",
                &["issue", &ca, "--role", "server", "--name", "fleet", "--address", "127.0.0.1"],
            ),
            ("issue-admin", &["issue", &ca, "--role", "operator", "--name", "admin"]),
        ] {
            assert!(fleet.run(&[&["certs"], args].concat(), &[], name), "{name}");
        }
        let (own, admin) = (format!("{ca}/fleet"), format!("{ca}/admin"));
        let control =
            ["control-plane", "--listen", "127.0.0.1:0", "--servers", "2", "--replicas", "2"];
        let holder = ["--token-file", token_file, "--tls", &own];
        let control = fleet.start(&[&control[..], &holder].concat(), "control", "listening");
        let url = format!("https://{}", control["addr"].as_str().expect("addr"));

        // The second server has no weights of its own.
        let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../data/tiny-moe");
        let bare = fleet.path("bare");
        std::fs::create_dir(&bare).expect("folder");
        std::fs::copy(format!("{model}/config.json"), bare.join("config.json")).expect("copy");
        for (name, model, from) in [("a", model, "disk"), ("b", text(&bare), "peers")] {
            let place =
                ["expert-server", "--model", model, "--name", name, "--listen", "127.0.0.1:0"];
            let more =
                ["--metrics-listen", "127.0.0.1:0", "--threads", "1", "--weights-from", from];
            let control = ["--tickets", tickets, "--control-plane", &url];
            fleet.start(&[&place[..], &more, &control, &holder].concat(), name, "serving");
        }

        let generate = ["generate", "--model", model, "--prompt", "An", "--max-new-tokens", "2"];
        let generate = [&generate[..], &["--control-plane", &url]].concat();
        assert!(fleet.run(&[&generate[..], &holder].concat(), &[], "generate"), "{tickets}");
        // A holder of a certificate without a token, whose role sends no tokens to servers.
        assert!(!fleet.run(&[&generate[..], &["--tls", &admin]].concat(), &[], "forbidden"));
        // A key where a token belongs.
        let key_file = format!("{own}/key.pem");
        let swapped = ["--token-file", &key_file, "--tls", &own];
        assert!(!fleet.run(&[&generate[..], &swapped].concat(), &[], "swapped"));
        let control = ["--control-plane", &url, "--tls", &admin];
        for args in
            [&["status"][..], &["doctor"], &["top", "--once"], &["drain", "a"], &["resume", "a"]]
        {
            fleet.run(&[args, &control].concat(), &[], args[0]);
        }
        let shown = std::fs::read_to_string(fleet.path("status.out")).expect("status");
        assert!(shown.contains("\"b\""), "status does not show the servers: {shown}");

        let mut secrets = vec![
            token[token.len() - 16..].to_owned(),
            // Tickets and proofs begin with the first, keys of tickets with the second.
            "v4.public.".to_owned(),
            "k4.secret.".to_owned(),
            "PRIVATE KEY".to_owned(),
        ];
        let weights = blake3::derive_key("switchyard 2026 weights of peers", token.as_bytes());
        secrets.push(blake3::Hash::from_bytes(weights).to_hex()[48..].to_owned());
        for key in ["ca-key.pem", "fleet/key.pem", "admin/key.pem"] {
            let pem = std::fs::read_to_string(format!("{ca}/{key}")).expect("key");
            let lines: Vec<&str> = pem.lines().filter(|line| !line.starts_with("-----")).collect();
            assert!(lines.iter().any(|line| line.len() > 16), "{key}");
            // The private part: the beginning is the same for all keys, and the end is public.
            let body = lines.concat();
            secrets.extend([52, 68].map(|at| body[at..][..16].to_owned()));
        }
        expect_absent(&fleet.written(), secrets.iter().map(String::as_str));
    }
}

impl Fleet {
    /// The arguments of all processes, and the files of the folder. Those with secrets are in folders inside.
    fn written(&self) -> Vec<(String, String)> {
        let mut written = vec![("arguments".to_owned(), self.arguments.clone())];
        for entry in std::fs::read_dir(self.dir.path()).expect("folder") {
            let path = entry.expect("entry").path();
            if path.is_file() {
                let bytes = std::fs::read(&path).expect("file");
                written
                    .push((text(&path).to_owned(), String::from_utf8_lossy(&bytes).into_owned()));
            }
        }
        let log = written.iter().find(|(name, _)| name.ends_with("control.err")).expect("log");
        assert!(log.1.contains("TRACE"), "no log at the level trace");
        written
    }
}

fn expect_absent<'a>(written: &[(String, String)], secrets: impl IntoIterator<Item = &'a str>) {
    for secret in secrets {
        for (name, text) in written {
            let found = text.lines().find(|line| line.contains(secret));
            assert!(found.is_none(), "{name} has the secret {secret}: {found:?}");
        }
    }
}
