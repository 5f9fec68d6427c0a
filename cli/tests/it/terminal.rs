//! Text of other processes reaches no terminal with its control characters.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::process::Command;

/// A server that claims to be a control plane and answers every request with `status` and `body`.
fn false_control_plane(status: &'static str, body: String) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let addr = listener.local_addr().expect("an address");
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            let mut request = [0; 4096];
            let _ = stream.read(&mut request);
            let length = body.len();
            let head = format!(
                "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n"
            );
            let _ = stream.write_all(format!("{head}{body}").as_bytes());
        }
    });
    addr
}

/// Checks standard output and standard error of a command, and that the text came through.
fn assert_harmless(addr: SocketAddr, args: &[&str]) {
    let url = format!("http://{addr}");
    let output = Command::new(env!("CARGO_BIN_EXE_switchyard"))
        .args(args)
        .args(["--control-plane", &url])
        .output()
        .expect("start");
    let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).expect("UTF-8"));
    let text = text.concat();
    assert!(text.contains("marker"), "{args:?}: {text}");
    let bad = |c: char| (c.is_control() && c != '\n' && c != '\t') || c == '\u{202e}';
    assert!(!text.contains(bad), "{args:?}: {text:?}");
}

#[test]
fn an_error_of_a_false_control_plane_is_escaped() {
    let evil = r"marker \u001b[2J\u001b]0;owned\u0007\u009b31m\u202e\r";
    let body = format!(r#"{{"code": "no_leader {evil}", "message": "{evil}\nhealth: healthy"}}"#);
    let addr = false_control_plane("409 Conflict", body);
    for args in [
        &["status"][..],
        &["status", "--json"],
        &["top", "--once"],
        &["drain", "s1"],
        &["scale"],
        &["doctor"],
    ] {
        assert_harmless(addr, args);
    }
}
