//! `scale` against a control plane that stores goals and cannot advise.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::process::Command;

/// Answers requests for goals with the last ones that it took, and all other requests with an error.
fn control_plane_without_advice() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let addr = listener.local_addr().expect("an address");
    std::thread::spawn(move || {
        let mut goals = br#"{"replicas": 2, "spare": 0.25}"#.to_vec();
        for stream in listener.incoming() {
            let Ok(stream) = stream else { return };
            let mut request = BufReader::new(&stream);
            let mut head = String::new();
            while !head.ends_with("\r\n\r\n") && request.read_line(&mut head).expect("head") > 0 {}
            let lines = head.lines().map(str::to_ascii_lowercase);
            let mut length =
                lines.filter_map(|line| line.strip_prefix("content-length: ")?.parse().ok());
            let mut body = vec![0; length.next_back().unwrap_or(0)];
            request.read_exact(&mut body).expect("body");
            if head.starts_with("PUT /v1/goals ") {
                goals = body;
            }
            let (status, answer) = match head.contains(" /v1/goals ") {
                true => ("200 OK", goals.as_slice()),
                false => ("409 Conflict", &br#"{"code": "no_model", "message": "marker"}"#[..]),
            };
            let length = answer.len();
            let head = format!(
                "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n"
            );
            (&stream).write_all(&[head.as_bytes(), answer].concat()).expect("answer");
        }
    });
    addr
}

#[test]
fn goals_in_force_are_no_error_if_the_advice_fails() {
    let url = format!("http://{}", control_plane_without_advice());
    let args = ["scale", "--replicas", "3", "--control-plane", &url];
    let output = Command::new(env!("CARGO_BIN_EXE_switchyard"))
        .args(args)
        .env_remove("SWITCHYARD_TOKEN")
        .output()
        .expect("start");
    let [stdout, stderr] =
        [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    assert!(output.status.success(), "{stdout}{stderr}");
    assert!(stdout.contains("3 replicas of each expert, 0.250"), "{stdout}");
    assert!(stderr.starts_with("warning: ") && stderr.contains("marker"), "{stderr}");
}
