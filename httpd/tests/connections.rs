//! Connections that end before their first request, and connections that give way.

use std::net::SocketAddr;
use std::time::Duration;

use axum::Extension;
use axum::body::Body;
use axum::routing::get;
use switchyard_httpd::{Limits, Metrics, Router, Standing, TcpListener, serve, watch};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
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

/// A listener whose `/known` stands for a request with an identity, and whose `/long` never ends.
async fn listen(limits: Limits) -> (SocketAddr, Metrics, watch::Sender<bool>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let addr = listener.local_addr().expect("an address");
    let metrics = Metrics::new("test").expect("metrics");
    let (stop, stopping) = watch::channel(false);
    let known = async |Extension(standing): Extension<Standing>| {
        standing.recognise(None);
        "known"
    };
    let ops = async |Extension(standing): Extension<Standing>| {
        standing.recognise(Some("ops"));
        "ops"
    };
    fn endless() -> Body {
        let chunk = || Some((Ok::<_, std::convert::Infallible>(vec![b'x'; 64 << 10]), ()));
        Body::from_stream(futures_util::stream::unfold((), move |()| async move { chunk() }))
    }
    let greedy = async |Extension(standing): Extension<Standing>| {
        standing.recognise(Some("greedy"));
        endless()
    };
    let router = Router::new()
        .route("/known", get(known))
        .route("/long", get(async || endless()))
        .route("/ops", get(ops))
        .route("/greedy", get(greedy))
        .fallback(async || "here");
    tokio::spawn(serve(listener, router, None, limits, metrics.clone(), stopping));
    (addr, metrics, stop)
}

/// A connection from one of the addresses of the loopback interface, with a small buffer.
async fn connect_from(source: [u8; 4], addr: SocketAddr) -> TcpStream {
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.set_recv_buffer_size(4096).expect("a buffer");
    socket.bind((source, 0).into()).expect("a source address");
    timeout(LIMIT, socket.connect(addr)).await.expect("in time").expect("a connection")
}

async fn ask(stream: &mut TcpStream, path: &str) {
    let request = format!("GET {path} HTTP/1.1\r\nhost: test\r\n\r\n");
    stream.write_all(request.as_bytes()).await.expect("sent");
}

/// The status line of the next answer, with the start of what follows.
async fn answer(stream: &mut TcpStream) -> String {
    let mut bytes = [0; 1024];
    let read = timeout(LIMIT, stream.read(&mut bytes)).await.expect("in time");
    String::from_utf8_lossy(&bytes[..read.expect("an answer")]).into_owned()
}

/// One address opens answers and reads them slowly, again whenever one is closed. Newcomers from it and from another
/// address are served, and an idle connection of a known client stays.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn strangers_who_read_slowly_give_way() {
    let limits = Limits { max_connections: 16, head_timeout: 4 * LIMIT, ..Limits::default() };
    let (addr, metrics, _stop) = listen(limits).await;
    let mut known = connect_from([127, 0, 0, 1], addr).await;
    ask(&mut known, "/known").await;
    assert!(answer(&mut known).await.ends_with("known"));
    for _ in 0..40 {
        tokio::spawn(async move {
            loop {
                let mut stream = connect_from([127, 0, 0, 2], addr).await;
                let _ = stream.write_all(b"GET /long HTTP/1.1\r\nhost: test\r\n\r\n").await;
                let mut bytes = [0; 16 << 10];
                while matches!(stream.read(&mut bytes).await, Ok(1..)) {
                    sleep(Duration::from_millis(100)).await;
                }
            }
        });
    }
    let crowded = metrics.culled.with_label_values(&["crowded"]);
    wait_for("the crowd", || crowded.get() > 20).await;
    for round in 0..20 {
        let mut probe = connect_from([127, 0, 0, 3], addr).await;
        ask(&mut probe, "/health").await;
        let text = answer(&mut probe).await;
        assert!(text.starts_with("HTTP/1.1 200") && text.ends_with("here"), "{round}: {text}");
    }
    assert!(metrics.connections.get() <= 16);
    ask(&mut known, "/known").await;
    assert!(answer(&mut known).await.ends_with("known"), "the known client was closed");
    assert_eq!(metrics.culled.with_label_values(&["refused"]).get(), 0);
}

/// Known clients at one address take the places of silent strangers, and not those of each other.
#[tokio::test]
async fn strangers_have_a_share_of_the_places() {
    let limits = Limits { max_connections: 32, head_timeout: 4 * LIMIT, ..Limits::default() };
    let (addr, metrics, _stop) = listen(limits).await;
    let mut silent = Vec::new();
    let mut known = Vec::new();
    for _ in 0..28 {
        for _ in 0..4 {
            silent.push(connect_from([127, 0, 0, 2], addr).await);
        }
        let mut stream = connect_from([127, 0, 0, 1], addr).await;
        ask(&mut stream, "/known").await;
        assert!(answer(&mut stream).await.ends_with("known"));
        known.push(stream);
    }
    for stream in &mut known {
        ask(stream, "/known").await;
        assert!(answer(stream).await.ends_with("known"));
    }
    assert_eq!(metrics.culled.with_label_values(&["refused"]).get(), 0);
}

/// One identity holds as many slow answers as it can. The clients of another one at the same address find places, and
/// keep them among strangers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_identity_that_reads_slowly_leaves_places_to_the_others() {
    let limits = Limits { max_connections: 32, head_timeout: 4 * LIMIT, ..Limits::default() };
    let (addr, metrics, _stop) = listen(limits).await;
    // 28 known ones at most.
    let mut greedy = Vec::new();
    for _ in 0..28 {
        let mut stream = connect_from([127, 0, 0, 1], addr).await;
        ask(&mut stream, "/greedy").await;
        assert!(answer(&mut stream).await.starts_with("HTTP/1.1 200"));
        greedy.push(stream);
    }
    let mut ops = Vec::new();
    for _ in 0..10 {
        let mut stream = connect_from([127, 0, 0, 1], addr).await;
        ask(&mut stream, "/ops").await;
        assert!(answer(&mut stream).await.ends_with("ops"));
        ops.push(stream);
    }
    // More of them take none of the others' places, idle as these are.
    for _ in 0..20 {
        let mut stream = connect_from([127, 0, 0, 1], addr).await;
        ask(&mut stream, "/greedy").await;
        assert!(answer(&mut stream).await.starts_with("HTTP/1.1 200"));
        greedy.push(stream);
    }
    // Strangers at the address displace each other.
    let mut silent = Vec::new();
    for _ in 0..40 {
        silent.push(connect_from([127, 0, 0, 1], addr).await);
    }
    for stream in &mut ops {
        ask(stream, "/ops").await;
        assert!(answer(stream).await.ends_with("ops"), "a client of another identity was closed");
    }
    assert_eq!(metrics.culled.with_label_values(&["refused"]).get(), 0);
}

/// A peer that reads a little now and then does not hold its connection.
#[tokio::test]
async fn a_peer_that_reads_too_slowly_is_closed() {
    let limits = Limits {
        write_timeout: Duration::from_millis(500),
        min_write_rate: 64 << 20,
        ..Limits::default()
    };
    let (addr, metrics, _stop) = listen(limits).await;
    let mut stream = connect_from([127, 0, 0, 1], addr).await;
    ask(&mut stream, "/long").await;
    let slow = metrics.culled.with_label_values(&["slow"]);
    let mut bytes = [0; 16 << 10];
    for _ in 0..LIMIT.as_millis() / 20 {
        if slow.get() == 1 {
            return;
        }
        let _ = stream.read(&mut bytes).await;
        sleep(Duration::from_millis(20)).await;
    }
    panic!("the peer held its connection for {LIMIT:?}");
}
