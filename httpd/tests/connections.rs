//! Connections that end before their first request.

use std::time::Duration;

use switchyard_httpd::{Limits, Metrics, Router, TcpListener, serve, watch};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};

/// Bound of every wait.
const LIMIT: Duration = Duration::from_secs(20);

async fn wait_for(what: &str, mut is_so: impl FnMut() -> bool) {
    for _ in 0..LIMIT.as_millis() / 5 {
        if is_so() {
            return;
        }
        sleep(Duration::from_millis(5)).await;
    }
    panic!("{what} did not come within {LIMIT:?}");
}

/// Probes that connect and close leave nothing behind. At the limit of connections a newcomer takes the place of the
/// silent connection that is there, and not of one that has ended.
#[tokio::test]
async fn a_newcomer_displaces_a_connection_that_lives() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let addr = listener.local_addr().expect("an address");
    let metrics = Metrics::new("test").expect("metrics");
    let (_stop, stopping) = watch::channel(false);
    let limits = Limits { max_connections: 1, head_timeout: LIMIT, ..Limits::default() };
    let router = Router::new().fallback(async || "here");
    tokio::spawn(serve(listener, router, None, limits, metrics.clone(), stopping));

    let (opened, crowded) = (&metrics.connections, metrics.culled.with_label_values(&["crowded"]));
    for _ in 0..10 {
        let probe = TcpStream::connect(addr).await.expect("a connection");
        wait_for("the probe", || opened.get() == 1).await;
        drop(probe);
        wait_for("its end", || opened.get() == 0).await;
    }
    assert_eq!(crowded.get(), 0);
    let _silent = TcpStream::connect(addr).await.expect("a connection");
    wait_for("the silent connection", || opened.get() == 1).await;

    let mut newcomer = TcpStream::connect(addr).await.expect("a connection");
    let request = b"GET / HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\r\n";
    newcomer.write_all(request).await.expect("sent");
    let mut answer = String::new();
    let read = timeout(LIMIT, newcomer.read_to_string(&mut answer)).await;
    read.expect("an answer in time").expect("an answer");
    assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with("here"), "{answer}");
    assert_eq!(crowded.get(), 1);
}
