//! Ends of connections that keep what the processes send there: a collector of traces, and a relay to etcd.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

/// Bytes that were read, as text with replacements.
#[derive(Clone, Default)]
pub struct Kept(Arc<Mutex<String>>);

impl Kept {
    pub fn text(&self) -> String {
        self.0.lock().expect("lock").clone()
    }

    fn add(&self, bytes: &[u8]) {
        self.0.lock().expect("lock").push_str(&String::from_utf8_lossy(bytes));
    }
}

/// Accepts connections until the test ends; `serve` handles each on a thread of its own.
fn listen(serve: impl Fn(TcpStream) + Clone + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("listen");
    let addr = listener.local_addr().expect("address");
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let serve = serve.clone();
            std::thread::spawn(move || serve(stream));
        }
    });
    format!("http://{addr}")
}

/// A collector of OpenTelemetry over HTTP.
pub struct Collector {
    pub url: String,
    /// Heads of requests. They may have secrets for the collector.
    pub heads: Kept,
    pub bodies: Kept,
}

impl Collector {
    pub fn start() -> Self {
        let (heads, bodies) = (Kept::default(), Kept::default());
        let kept = (heads.clone(), bodies.clone());
        let url = listen(move |stream| {
            let mut reader = BufReader::new(stream);
            while let Some(length) = read_head(&mut reader, &kept.0) {
                let mut body = vec![0; length];
                if reader.read_exact(&mut body).is_err() {
                    return;
                }
                kept.1.add(&body);
                let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n";
                if reader.get_mut().write_all(answer).is_err() {
                    return;
                }
            }
        });
        Self { url, heads, bodies }
    }
}

/// The length of the body after the next head, or `None` at the end of the connection.
fn read_head(reader: &mut impl BufRead, heads: &Kept) -> Option<usize> {
    let mut length = 0;
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).ok()? == 0 {
            return None;
        }
        if line == "\r\n" {
            return Some(length);
        }
        heads.add(line.as_bytes());
        let field = line.split_once(':');
        let field = field.filter(|(name, _)| name.eq_ignore_ascii_case("content-length"));
        length = field.map_or(length, |(_, value)| value.trim().parse().expect("length"));
    }
}

/// Passes connections on to `url`, and keeps the answers.
pub fn relay(url: &str) -> (String, Kept) {
    let (target, kept) = (url.trim_start_matches("http://").to_owned(), Kept::default());
    let answers = kept.clone();
    let url = listen(move |mut near| {
        let Ok(mut far) = TcpStream::connect(&target) else { return };
        let (mut from, mut to) =
            (near.try_clone().expect("clone"), far.try_clone().expect("clone"));
        std::thread::spawn(move || {
            let _ = std::io::copy(&mut from, &mut to);
            let _ = to.shutdown(Shutdown::Write);
        });
        let mut chunk = [0; 4096];
        while let Ok(length @ 1..) = far.read(&mut chunk) {
            answers.add(&chunk[..length]);
            if near.write_all(&chunk[..length]).is_err() {
                break;
            }
        }
        let _ = near.shutdown(Shutdown::Both);
    });
    (url, kept)
}
