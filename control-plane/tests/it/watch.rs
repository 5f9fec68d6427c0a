//! The watch on the placement.

use control_api::{
    DrainRequest, LayerPlacement, LeaseRequest, ModelDescriptor, PlacementTable, PlacementWatch,
    WatchOptions, WatchStatus, code,
};
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

use super::*;

fn watch(client: &ControlClient) -> PlacementWatch {
    PlacementWatch::spawn(client, &Handle::current(), WatchOptions::default()).unwrap()
}

#[tokio::test]
async fn a_watch_sees_every_epoch_in_order() {
    let mut config = config();
    config.lease_ttl = Duration::from_secs(60);
    let plane = Plane::start(config).await;
    let client = plane.client();
    let mut stream = client.watch_placement().await.unwrap();
    let mut seen = vec![stream.next().await.unwrap().epoch];
    // 30 changes as fast as possible: fewer than a watcher may lag behind.
    for i in 0..15 {
        let member = serve(&client, "a", i).await;
        client.drain(&member, &DrainRequest::default()).await.unwrap();
    }
    let last = client.placement().await.unwrap().epoch;
    while *seen.last().unwrap() < last {
        let table = tokio::time::timeout(BOUND, stream.next()).await.unwrap().unwrap();
        seen.push(table.epoch);
    }
    let all: Vec<u64> = (seen[0]..=last).collect();
    assert_eq!(seen, all);
    assert!(all.len() >= 31, "{all:?}");
    plane.stop().await;
}

#[tokio::test]
async fn keep_alives_hold_a_quiet_stream_open_and_silence_ends_it() {
    let mut config = config();
    config.limits.watch_keep_alive = Duration::from_millis(100);
    let plane = Plane::start(config).await;
    let mut options = control_api::ClientOptions::default();
    options.watch_idle_timeout = Duration::from_secs(2);
    let client =
        ControlClient::with_options(&plane.url(), Some(TOKEN.to_owned()), options).unwrap();
    let mut stream = client.watch_placement().await.unwrap();
    stream.next().await.unwrap();
    // Twice the idle limit without a table.
    tokio::time::timeout(Duration::from_secs(4), stream.next()).await.unwrap_err();
    serve(&client, "a", 1).await;
    assert!(stream.next().await.unwrap().model.is_some());

    // A server that is silent.
    let mute = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mute_url = format!("http://{}", mute.local_addr().unwrap());
    let hold = tokio::spawn(async move {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let (mut stream, _) = mute.accept().await.unwrap();
        let mut request = [0; 4096];
        assert!(stream.read(&mut request).await.unwrap() > 0);
        let head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n";
        stream.write_all(head).await.unwrap();
        std::future::pending::<()>().await;
        drop(stream);
    });
    let mut options = control_api::ClientOptions::default();
    options.watch_idle_timeout = Duration::from_millis(100);
    let client = ControlClient::with_options(&mute_url, None, options).unwrap();
    let mut stream = client.watch_placement().await.unwrap();
    let err = stream.next().await.unwrap_err();
    assert!(matches!(err, control_api::ControlError::Timeout { .. }), "{err}");
    hold.abort();
    plane.stop().await;
}

#[tokio::test]
async fn the_last_table_stays_while_the_control_plane_is_down() {
    let dir = tempfile::tempdir().unwrap();
    let plane = Plane::start(durable_config(dir.path())).await;
    let client = plane.client();
    let watch = watch(&client);
    serve(&client, "a", 1).await;
    let table = watch.wait_for(BOUND, |table| table.servers.len() == 1).await.unwrap();
    assert_eq!(watch.state().borrow().status, WatchStatus::Connected);

    let addr = plane.addr;
    plane.stop().await;
    let mut state = watch.state();
    let down = state.wait_for(|state| state.status == WatchStatus::Disconnected);
    drop(tokio::time::timeout(BOUND, down).await.unwrap().unwrap());
    assert_eq!(watch.current(), table);
    assert!(state.borrow().last_error.is_some());

    let mut config = durable_config(dir.path());
    config.listen = addr.to_string();
    let plane = Plane::start(config).await;
    let after = watch.wait_for(BOUND, |new| new.epoch > table.epoch).await.unwrap();
    assert_eq!(after.cluster_id, table.cluster_id);
    assert_eq!(after.servers, table.servers);
    let up = state.wait_for(|state| state.status == WatchStatus::Connected);
    assert_eq!(tokio::time::timeout(BOUND, up).await.unwrap().unwrap().num_connects, 2);
    plane.stop().await;
}

fn table(cluster: &str, epoch: u64) -> PlacementTable {
    PlacementTable { cluster_id: cluster.to_owned(), epoch, ..Default::default() }
}

/// Sends the tables to one watch. Returns the URL, and the task that keeps the stream open.
async fn script(tables: impl IntoIterator<Item = PlacementTable>) -> (String, JoinHandle<()>) {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let event = |table: PlacementTable| {
        format!("event: placement\ndata: {}\n\n", serde_json::to_string(&table).unwrap())
    };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let body: String = tables.into_iter().map(event).collect();
    let server = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut request = [0; 4096];
        assert!(stream.read(&mut request).await.unwrap() > 0);
        let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n";
        for piece in (head.to_owned() + &body).as_bytes().chunks(7) {
            stream.write_all(piece).await.unwrap();
        }
        std::future::pending::<()>().await;
        drop(stream);
    });
    (url, server)
}

/// Made-up events: the watch refuses an older epoch of the same cluster and accepts a newer cluster.
#[tokio::test]
async fn an_older_epoch_is_refused_and_a_new_cluster_accepted() {
    let tables = [("one", 5), ("one", 4), ("one", 6), ("one", 3), ("two", 1), ("two", 2)];
    let (url, server) = script(tables.map(|(cluster, epoch)| table(cluster, epoch))).await;
    let client = ControlClient::new(&url, None).unwrap();
    let watch = PlacementWatch::spawn_thread(&client, WatchOptions::default()).unwrap();
    let table = watch.wait_for(BOUND, |table| table.cluster_id == "two" && table.epoch == 2).await;
    table.unwrap();
    assert_eq!(watch.state().borrow().num_stale_tables, 2);
    server.abort();
}

/// Made-up events: the control plane has replaced the model, as it does once all servers of a model have gone.
#[tokio::test]
async fn a_table_of_another_model_is_refused() {
    let of_model = |epoch, fingerprint: &str| {
        let model = ModelDescriptor { fingerprint: fingerprint.to_owned(), ..model() };
        let replicas = vec![Vec::new(); model.num_experts as usize];
        let layer = |&layer: &u32| LayerPlacement { layer, replicas: replicas.clone() };
        let layers = model.moe_layers.iter().map(layer).collect();
        PlacementTable { model: Some(model), layers, ..table("one", epoch) }
    };
    let (own, other) = ("00aabbccddeeff11", "11aabbccddeeff22");
    let tables = || [table("one", 1), of_model(2, own), of_model(3, other), table("one", 4)];
    let mut pinned = WatchOptions::default();
    pinned.fingerprint = Some(own.to_owned());
    for options in [WatchOptions::default(), pinned] {
        let (url, server) = script(tables()).await;
        let client = ControlClient::new(&url, None).unwrap();
        let watch = PlacementWatch::spawn(&client, &Handle::current(), options).unwrap();
        let is_other = |table: &PlacementTable| {
            table.model.as_ref().is_some_and(|model| model.fingerprint == other)
        };
        let seen = watch.wait_for(BOUND, |table| is_other(table) || table.epoch == 4).await;
        assert_eq!(seen.unwrap_or_else(|last| panic!("{last:?} {:?}", watch.state())).epoch, 4);
        assert_eq!(watch.state().borrow().num_other_models, 1);
        let mut state = watch.state();
        let cleared = state.wait_for(|state| state.last_error.is_none());
        tokio::time::timeout(BOUND, cleared).await.expect("a table fits again").unwrap();
        server.abort();
    }

    // The stream stays open, and the state says what is wrong.
    let (url, server) = script([of_model(2, own), of_model(3, other)]).await;
    let client = ControlClient::new(&url, None).unwrap();
    let watch =
        PlacementWatch::spawn(&client, &Handle::current(), WatchOptions::default()).unwrap();
    let mut state = watch.state();
    let refused = state.wait_for(|state| state.num_other_models == 1 && state.last_error.is_some());
    let refused = tokio::time::timeout(BOUND, refused).await.expect("it is told").unwrap().clone();
    let error = refused.last_error.unwrap_or_default();
    assert!(error.contains(own) && error.contains(other), "{error}");
    assert_eq!((refused.status, refused.num_connects), (WatchStatus::Connected, 1));
    assert_eq!(watch.tables().borrow().epoch, 2);
    server.abort();
}

#[tokio::test]
async fn too_many_watches_are_refused_and_closed_ones_make_room() {
    let mut config = config();
    config.limits.max_watchers = 2;
    config.limits.watch_keep_alive = Duration::from_millis(50);
    let plane = Plane::start(config).await;
    let client = plane.client();
    let first = client.watch_placement().await.unwrap();
    let _second = client.watch_placement().await.unwrap();
    let err = client.watch_placement().await.unwrap_err();
    assert_eq!(err.code(), Some(code::TOO_MANY_WATCHERS));
    assert_eq!(client.status().await.unwrap().num_watchers, 2);
    drop(first);
    let retry = async {
        while client.watch_placement().await.is_err() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(BOUND, retry).await.unwrap();
    plane.stop().await;
}

#[tokio::test]
async fn expiry_reaches_the_watch() {
    let plane = Plane::start(patient_config()).await;
    let client = plane.client();
    let watch = watch(&client);
    let live = serve(&client, "live", 1).await;
    serve(&client, "dead", 2).await;
    watch.wait_for(BOUND, |table| table.servers.len() == 2).await.unwrap();
    let heartbeat = tokio::spawn({
        let client = client.clone();
        async move {
            let lease = LeaseRequest { incarnation: 1, assignment_version: 0, load: None };
            loop {
                client.renew(&live, &lease).await.unwrap();
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        }
    });
    let table = watch.wait_for(BOUND, |table| table.servers.len() == 1).await.unwrap();
    assert_eq!(table.servers[0].name, "live");
    heartbeat.abort();
    plane.stop().await;
}

/// A new cluster that stays incomplete is accepted after the grace period.
#[tokio::test]
async fn the_grace_period_of_a_new_cluster_ends() {
    let mut config = patient_config();
    config.num_servers = 1;
    config.replicas = 1;
    let plane = Plane::start(config.clone()).await;
    config.listen = plane.addr.to_string();
    let mut options = WatchOptions::default();
    options.new_cluster_grace = Duration::from_millis(300);
    let client = plane.client();
    let watch = PlacementWatch::spawn(&client, &Handle::current(), options).unwrap();
    serve(&client, "a", 1).await;
    let before = watch.wait_for(BOUND, |table| table.is_complete()).await.unwrap();
    plane.stop().await;
    let plane = Plane::start(config).await;
    let after = watch.wait_for(BOUND, |table| table.cluster_id != before.cluster_id).await;
    assert!(after.unwrap().servers.is_empty());
    plane.stop().await;
}

#[tokio::test]
async fn an_unreachable_control_plane_is_named_with_its_cause() {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", free.local_addr().unwrap());
    drop(free);
    let err = ControlClient::new(&url, None).unwrap().status().await.unwrap_err().to_string();
    assert!(err.contains(&url) && err.contains("Connection refused"), "{err}");
    assert!(err.contains("is it running?") && !err.contains("error sending"), "{err}");
}

/// A watcher that does not read skips tables instead of buffering them, and ends at the newest.
#[tokio::test]
async fn a_slow_watcher_skips_to_the_newest_table() {
    let mut config = config();
    config.lease_ttl = Duration::from_secs(60);
    // The watcher reads nothing while the tables change, which takes long on a busy host.
    config.limits.write_timeout = Duration::from_secs(600);
    let plane = Plane::start(config).await;
    let client = plane.client();
    let mut big = request("a", 0);
    big.model.moe_layers = (0..64).collect();
    big.model.num_experts = 256;
    let mut stream = client.watch_placement().await.unwrap();
    // Tables of 100 KB each: more than all buffers hold.
    for incarnation in 0..150 {
        big.incarnation = incarnation;
        let joined = client.register(&big).await.unwrap();
        let ready = ReadyRequest { incarnation, holds: joined.assignment };
        client.ready(&joined.member_id, &ready).await.unwrap();
    }
    let last = client.placement().await.unwrap().epoch;
    let mut epochs = vec![0];
    while epochs[epochs.len() - 1] < last {
        let table = tokio::time::timeout(BOUND, stream.next()).await.unwrap().unwrap();
        epochs.push(table.epoch);
    }
    assert!(epochs.is_sorted_by(|a, b| a < b), "{epochs:?}");
    assert!(epochs.len() < 250, "nothing was skipped: {} of {last}", epochs.len());
    plane.stop().await;
}
