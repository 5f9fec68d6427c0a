//! Tokens with roles, their rotation, the audit log, and rates.

use std::path::PathBuf;
use std::time::Instant;

use control_api::{
    ClientsReport, ControlError, DrainRequest, FleetGoals, LeaseKeeper, LeaseOptions, LeaseStatus,
    MemberState, PlacementWatch, SuspectRequest, TicketRequest, TicketRole, WatchOptions, code,
};
use switchyard_control_plane::{BindError, EtcdConfig};
use tempfile::TempDir;
use test_support::etcd::EtcdCluster;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::runtime::Handle;
use trust::Role;
use trust::ticket::SecretKey;
use trust::tokens::{self, TokenEntry};

use super::*;

/// A folder with a token file, and tokens in files of their own.
struct Tokens {
    dir: TempDir,
}

impl Tokens {
    fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap() }
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("tokens")
    }

    fn add(&self, name: &str, role: Role) -> String {
        let token = tokens::generate();
        tokens::add(&self.path(), &TokenEntry::new(name, role, &token, None).unwrap()).unwrap();
        token
    }

    /// The file that a process named `name` reads its token from.
    fn hand_out(&self, name: &str, token: &str) -> PathBuf {
        let path = self.dir.path().join(name);
        let new = path.with_extension("new");
        std::fs::write(&new, format!("{token}\n")).unwrap();
        std::fs::rename(new, &path).unwrap();
        path
    }

    /// A configuration with this file and without the cluster's own token.
    fn config(&self) -> ServerConfig {
        let mut config = patient_config();
        config.token = None;
        config.tokens = Some(self.path());
        config.audit_log = Some(self.dir.path().join("audit"));
        config
    }
}

fn client_of(plane: &Plane, token: &str) -> ControlClient {
    ControlClient::new(&plane.url(), Some(token.to_owned())).unwrap()
}

/// Waits until `check` returns a value.
async fn eventually<T>(mut check: impl AsyncFnMut() -> Option<T>) -> T {
    let begin = Instant::now();
    loop {
        if let Some(value) = check().await {
            return value;
        }
        assert!(begin.elapsed() < BOUND, "it did not happen");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn assert_forbidden<T: std::fmt::Debug>(outcome: Result<T, ControlError>, words: &[&str]) {
    let err = outcome.unwrap_err();
    assert_eq!(err.code(), Some(code::FORBIDDEN), "{err}");
    let text = err.to_string();
    assert!(words.iter().all(|word| text.contains(word)), "{text}");
    assert_eq!(text.lines().count(), 1, "{text}");
}

#[tokio::test]
async fn every_role_may_do_its_work_and_no_more() {
    let tokens = Tokens::new();
    let [server, other] = ["gpu-1", "gpu-2"].map(|name| tokens.add(name, Role::Server));
    let (client, operator) =
        (tokens.add("engine", Role::Client), tokens.add("ops", Role::Operator));
    let viewer = tokens.add("wall", Role::Viewer);
    let plane = Plane::start(tokens.config()).await;
    let [server, other, client, operator, viewer] =
        [server, other, client, operator, viewer].map(|token| client_of(&plane, &token));

    let member = serve(&server, "a", 1).await;
    // Everyone reads the placement and the status.
    for reader in [&server, &client, &operator, &viewer] {
        assert_eq!(reader.placement().await.unwrap().servers.len(), 1);
        reader.status().await.unwrap();
    }
    let who = operator.whoami().await.unwrap();
    assert_eq!((who.name.as_str(), who.credential.as_str()), ("ops", "token"));
    assert_eq!(who.roles, ["operator", "viewer"]);
    let drain = DrainRequest::default();
    assert_forbidden(viewer.drain(&member, &drain).await, &["operator", "wall", "viewer", "drain"]);
    assert_forbidden(client.drain(&member, &drain).await, &["engine", "client"]);
    assert_forbidden(client.members().await.map(drop), &["engine"]);
    assert_forbidden(operator.register(&request("b", 1)).await.map(drop), &["server", "ops"]);
    // Tickets to compute are for clients and servers, tickets to read weights for servers alone.
    let key = SecretKey::generate().unwrap().public().to_string();
    let compute = TicketRequest::new("tester".to_owned(), key);
    let read = TicketRequest { role: TicketRole::Server, ..compute.clone() };
    let mut issued = Vec::new();
    // The log has one entry for requests that are alike.
    for asking in [&server, &client, &client, &client] {
        issued.push(asking.ticket(&compute).await.unwrap());
    }
    issued.push(server.ticket(&read).await.unwrap());
    assert_forbidden(client.ticket(&read).await, &["engine", "weights", "server"]);
    assert_forbidden(viewer.ticket(&compute).await, &["wall"]);
    let goals = FleetGoals { replicas: 1, spare: 0.0 };
    assert_forbidden(viewer.set_goals(&goals).await, &["wall"]);
    assert_forbidden(server.set_goals(&goals).await, &["gpu-1"]);
    assert_forbidden(server.resume(&member).await, &["operator"]);
    // Clients do not keep an old model in service by their reports.
    let clients = ClientsReport { reporter: "engine".to_owned(), clients: Vec::new() };
    assert_forbidden(client.report_clients(&clients).await, &["server", "engine"]);
    server.report_clients(&clients).await.unwrap();

    // Another server changes nothing about the member, and does not take over its name.
    assert_forbidden(other.drain(&member, &drain).await, &["gpu-2", "another server"]);
    assert_forbidden(other.leave(&member).await, &["gpu-2"]);
    assert_forbidden(other.register(&request("a", 2)).await.map(drop), &["name a"]);
    assert_eq!(viewer.members().await.unwrap()[0].state, MemberState::Serving);

    // The owner and an operator do.
    let info = operator.drain(&member, &drain).await.unwrap();
    assert_eq!(info.state, MemberState::Draining);
    operator.resume(&member).await.unwrap();
    server.drain(&member, &drain).await.unwrap();
    let report = SuspectRequest {
        reporter: "engine".to_owned(),
        reason: "silent".to_owned(),
        incarnation: None,
    };
    client.suspect(&member, &report).await.unwrap();
    server.leave(&member).await.unwrap();

    // Every change and every refused one is in the log, in memory and in the file.
    assert_forbidden(client.audit(0).await.map(drop), &["engine"]);
    let log = viewer.audit(0).await.unwrap();
    let seen: Vec<_> = log
        .entries
        .iter()
        .map(|entry| (entry.name.as_str(), entry.action.as_str(), entry.outcome.as_str()))
        .collect();
    let expected = [
        ("gpu-1", "register", "ok"),
        ("wall", "drain", "forbidden"),
        ("engine", "drain", "forbidden"),
        ("ops", "register", "forbidden"),
        ("gpu-1", "ticket", "ok"),
        ("engine", "ticket", "ok"),
        ("gpu-1", "ticket", "ok"),
        ("engine", "ticket", "forbidden"),
        ("wall", "ticket", "forbidden"),
        ("wall", "goals", "forbidden"),
        ("gpu-1", "goals", "forbidden"),
        ("gpu-1", "resume", "forbidden"),
        ("gpu-2", "drain", "forbidden"),
        ("gpu-2", "leave", "forbidden"),
        ("gpu-2", "register", "forbidden"),
        ("ops", "drain", "ok"),
        ("ops", "resume", "ok"),
        ("gpu-1", "drain", "ok"),
        ("gpu-1", "leave", "ok"),
    ];
    assert_eq!(seen, expected);
    let first = &log.entries[0];
    assert_eq!((first.target.as_deref(), first.address.as_deref()), (Some("a"), Some("127.0.0.1")));
    assert!(first.request_id.is_some());
    let [of_client, of_server] = [&log.entries[5], &log.entries[6]];
    let shown = of_client.tickets.unwrap();
    assert_eq!((shown.count, shown.role), (1, Some(TicketRole::Client)));
    assert_eq!(
        (shown.first_epoch, shown.last_epoch),
        (Some(issued[1].epoch), Some(issued[1].epoch))
    );
    assert_eq!(of_client.target.as_deref(), Some("all servers"));
    assert_eq!(of_client.address.as_deref(), Some("127.0.0.1"));
    assert!(of_client.detail.as_ref().unwrap().contains("tester"), "{of_client:?}");
    assert_eq!(of_server.tickets.unwrap().role, Some(TicketRole::Server));
    assert_eq!(log.entries[8].tickets.unwrap().count, 1);
    let file = eventually(async || {
        let text = std::fs::read_to_string(tokens.dir.path().join("audit")).ok()?;
        (text.lines().count() == expected.len()).then_some(text)
    })
    .await;
    assert!(issued.iter().all(|issued| !file.contains(&issued.ticket[..40])), "{file}");
    let entry: control_api::AuditEntry =
        serde_json::from_str(file.lines().next().unwrap()).unwrap();
    assert_eq!(&entry, first);
    plane.stop().await;
    // The rest of the counts is in the file once the process ends.
    let file = std::fs::read_to_string(tokens.dir.path().join("audit")).unwrap();
    let rest: Vec<control_api::AuditEntry> =
        file.lines().skip(expected.len()).map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(rest.len(), 1, "{rest:?}");
    assert_eq!((rest[0].name.as_str(), rest[0].tickets.unwrap().count), ("engine", 2));
}

#[tokio::test]
async fn an_identity_stays_bound_to_its_member_over_a_restart() {
    let tokens = Tokens::new();
    let [mine, other] = ["gpu-1", "gpu-2"].map(|name| tokens.add(name, Role::Server));
    let config = || {
        let mut config = tokens.config();
        config.data_dir = Some(tokens.dir.path().join("data"));
        config
    };
    let plane = Plane::start(config()).await;
    let member = serve(&client_of(&plane, &mine), "a", 1).await;
    plane.stop().await;
    let plane = Plane::start(config()).await;
    let drain = DrainRequest::default();
    assert_forbidden(client_of(&plane, &other).drain(&member, &drain).await, &["gpu-2"]);
    client_of(&plane, &mine).drain(&member, &drain).await.unwrap();
    plane.stop().await;
}

#[tokio::test]
async fn tokens_are_rotated_while_members_renew_and_clients_watch() {
    let tokens = Tokens::new();
    let (old_server, old_client) =
        (tokens.add("gpu", Role::Server), tokens.add("engine", Role::Client));
    let viewer = tokens.add("wall", Role::Viewer);
    let (server_file, client_file) =
        (tokens.hand_out("server", &old_server), tokens.hand_out("client", &old_client));
    let plane = Plane::start(tokens.config()).await;
    let viewer = client_of(&plane, &viewer);
    let connect =
        |path| ControlClient::new(&plane.url(), None).unwrap().with_token_file(path).unwrap();
    let servers = connect(&server_file);
    let keepers: Vec<_> = (0..4)
        .map(|idx| {
            let request = request(&format!("server-{idx}"), idx);
            LeaseKeeper::spawn(&servers, request, LeaseOptions::default()).unwrap()
        })
        .collect();
    for keeper in &keepers {
        let holds = keeper.registered(BOUND).await.unwrap();
        keeper.set_ready(Assignment::clone(&holds));
        keeper.serving(BOUND).await.unwrap();
    }
    let client = connect(&client_file);
    let watch =
        PlacementWatch::spawn(&client, &Handle::current(), WatchOptions::default()).unwrap();
    let calls = tokio::spawn(async move {
        // Every call must succeed, before, during and after the rotation.
        loop {
            assert_eq!(client.placement().await.unwrap().servers.len(), 4);
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });

    // 1. New tokens, beside the old ones. 2. Hand them out. 3. Remove the old ones.
    let (new_server, new_client) =
        (tokens.add("gpu", Role::Server), tokens.add("engine", Role::Client));
    for (name, old, new) in
        [("server", &old_server, &new_server), ("client", &old_client, &new_client)]
    {
        let newer = client_of(&plane, new);
        eventually(async || newer.placement().await.ok()).await;
        client_of(&plane, old).placement().await.unwrap();
        tokens.hand_out(name, new);
        let old_id = tokens::TokenHash::of(old.as_bytes()).id();
        tokens::remove(&tokens.path(), &old_id).unwrap();
        let older = client_of(&plane, old);
        let err = eventually(async || older.placement().await.err()).await;
        assert_eq!(err.code(), Some(code::UNAUTHORIZED), "{err}");
    }
    // Two leases' time: each member has renewed with its new token.
    let renewals = |keeper: &LeaseKeeper| keeper.state().borrow().num_renewals;
    let before: Vec<_> = keepers.iter().map(renewals).collect();
    eventually(async || {
        let grown =
            keepers.iter().zip(&before).all(|(keeper, before)| renewals(keeper) > before + 4);
        grown.then_some(())
    })
    .await;
    for keeper in &keepers {
        let state = keeper.state().borrow().clone();
        assert_eq!((state.status, state.num_registrations), (LeaseStatus::Leased, 1));
        assert_eq!(state.last_error, None);
    }
    assert!(!calls.is_finished());
    calls.abort();
    assert!(calls.await.unwrap_err().is_cancelled());
    // The stream that was opened with the old token has ended, and a new one stands in its place.
    let mut state = watch.state();
    let connected = state.wait_for(|state| state.status == control_api::WatchStatus::Connected);
    drop(tokio::time::timeout(BOUND, connected).await.unwrap().unwrap());
    let log = viewer.audit(0).await.unwrap();
    let reloads = log.entries.iter().filter(|entry| entry.action == "tokens").count();
    assert!(reloads >= 2, "{log:?}");
    assert!(log.entries.iter().all(|entry| entry.outcome == "ok"), "{log:?}");
    drop(keepers);
    plane.stop().await;
}

/// The stream waits for a change when the token is removed.
#[tokio::test]
async fn a_watch_gets_no_table_after_its_token_was_removed() {
    let tokens = Tokens::new();
    let (server, operator) = (tokens.add("gpu", Role::Server), tokens.add("ops", Role::Operator));
    let removed = tokens.add("wall", Role::Viewer);
    let mut config = tokens.config();
    // Nothing else wakes the stream.
    config.limits.watch_keep_alive = 2 * BOUND;
    let plane = Plane::start(config).await;
    let member = serve(&client_of(&plane, &server), "a", 1).await;
    let mut stream = TcpStream::connect(plane.addr).await.unwrap();
    let request = format!(
        "GET /v1/placement/watch HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {removed}\r\n\
         connection: close\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut text = Vec::new();
    let first = async {
        while !text.windows(16).any(|window| window == b"event: placement") {
            assert!(stream.read_buf(&mut text).await.unwrap() > 0, "the stream has ended");
        }
    };
    tokio::time::timeout(BOUND, first).await.expect("the table in force");
    let id = tokens::TokenHash::of(removed.as_bytes()).id();
    tokens::remove(&tokens.path(), &id).unwrap();
    let viewer = client_of(&plane, &removed);
    eventually(async || viewer.placement().await.err()).await;
    client_of(&plane, &operator).drain(&member, &DrainRequest::default()).await.unwrap();
    let mut rest = String::new();
    let end = tokio::time::timeout(BOUND, stream.read_to_string(&mut rest));
    end.await.expect("the stream ends").unwrap();
    assert!(!rest.contains("event: placement"), "{rest}");
    plane.stop().await;
}

#[tokio::test]
async fn a_wrong_token_file_keeps_the_old_tokens_and_says_so() {
    let tokens = Tokens::new();
    let viewer = tokens.add("wall", Role::Viewer);
    let plane = Plane::start(tokens.config()).await;
    let viewer = client_of(&plane, &viewer);
    let good = std::fs::read_to_string(tokens.path()).unwrap();
    for wrong in [Some("sy_0123456789\n"), Some(""), None] {
        match wrong {
            Some(text) => std::fs::write(tokens.path(), text).unwrap(),
            None => std::fs::remove_file(tokens.path()).unwrap(),
        }
        let problem = eventually(async || problem_of_the_file(&viewer).await).await;
        assert!(!problem.contains("sy_0123456789"), "{problem}");
        assert!(metrics(&plane).await.contains("switchyard_control_token_file_valid 0\n"));
        std::fs::write(tokens.path(), &good).unwrap();
        eventually(async || problem_of_the_file(&viewer).await.is_none().then_some(())).await;
    }
    assert!(metrics(&plane).await.contains("switchyard_control_token_file_valid 1\n"));
    plane.stop().await;
    // At the start a wrong file is an error.
    std::fs::write(tokens.path(), "x").unwrap();
    let err = Server::bind(tokens.config()).await.unwrap_err();
    assert!(matches!(err, BindError::Tokens(_)) && err.to_string().contains("line 1"), "{err}");
}

async fn problem_of_the_file(viewer: &ControlClient) -> Option<String> {
    let problems = viewer.status().await.unwrap().problems;
    problems.into_iter().find(|problem| problem.contains("token file"))
}

async fn metrics(plane: &Plane) -> String {
    raw(plane.addr, b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await
}

#[tokio::test]
async fn a_flood_is_limited_while_members_and_probes_pass() {
    let mut config = patient_config();
    config.limits.rates.per_address = 1;
    config.limits.rates.per_identity = 1;
    let plane = Plane::start(config).await;
    let client = plane.client();
    let member = serve(&client, "a", 1).await;
    // Strangers behind the same address guess tokens.
    let guesser = client_of(&plane, "wrong");
    eventually(async || {
        let err = guesser.placement().await.unwrap_err();
        (err.code() == Some(code::RATE_LIMITED)).then_some(())
    })
    .await;
    let head = b"GET /v1/status HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
    eventually(async || {
        let answer = raw(plane.addr, head).await.to_ascii_lowercase();
        assert!(answer.starts_with("http/1.1 4"), "{answer}");
        let is_limited = answer.starts_with("http/1.1 429");
        (is_limited && answer.contains("\r\nretry-after: ")).then_some(())
    })
    .await;
    // The holder of a token floods, too.
    eventually(async || client.status().await.is_err_and(|err| err.is_transient()).then_some(()))
        .await;
    // Renewals and probes have limits of their own.
    let lease = control_api::LeaseRequest { incarnation: 1, assignment_version: 1, load: None };
    for _ in 0..50 {
        client.renew(&member, &lease).await.unwrap();
    }
    let text = metrics(&plane).await;
    for reason in ["address_rate", "identity_rate", "unauthorized"] {
        let line = format!("switchyard_control_refused_requests_total{{reason=\"{reason}\"}} ");
        let count = text.split(&line).nth(1).unwrap().lines().next().unwrap();
        assert!(count.parse::<u64>().unwrap() > 0, "{reason}: {text}");
    }
    plane.stop().await;
}

#[tokio::test]
async fn only_an_object_with_known_fields_changes_anything() {
    let plane = Plane::start(patient_config()).await;
    let client = plane.client();
    let member = serve(&client, "a", 1).await;
    let paths = [
        ("POST", format!("/v1/members/{member}/drain")),
        ("POST", format!("/v1/members/{member}/resume")),
        ("DELETE", format!("/v1/members/{member}")),
        ("PUT", "/v1/goals".to_owned()),
    ];
    let bodies = [
        "[]",
        "[null]",
        "null",
        "0",
        "\"\"",
        "true",
        "{",
        "{\"incarnaton\":7}",
        "{\"incarnation\":-1}",
        "{\"incarnation\":\"1\"}",
        "{\"replicas\":1,\"spare\":0,\"x\":1}",
        "{}{}",
    ];
    for (method, path) in &paths {
        for body in bodies {
            let request = format!(
                "{method} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Type: \
                 application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
                body.len()
            );
            let answer = raw(plane.addr, request.as_bytes()).await;
            assert!(answer.starts_with("HTTP/1.1 400"), "{method} {path} {body}: {answer}");
        }
    }
    assert_eq!(client.members().await.unwrap()[0].state, MemberState::Serving);
    plane.stop().await;
}

/// A request to a follower reaches the leader with the caller's own rights, name and address.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_follower_passes_the_caller_on() {
    let etcd = EtcdCluster::start(1);
    let tokens = Tokens::new();
    let [server, operator, viewer] =
        [Role::Server, Role::Operator, Role::Viewer].map(|role| tokens.add(role.name(), role));
    let config = |with_token: bool| {
        let mut config = tokens.config();
        config.audit_log = None;
        config.token = with_token.then(|| TOKEN.to_owned());
        let mut settings = EtcdConfig::new(etcd.endpoints());
        settings.lease = Duration::from_secs(2);
        config.etcd = Some(settings);
        config
    };
    // Without a token of the cluster they could not believe each other.
    let err = Server::bind(config(false)).await.unwrap_err().to_string();
    assert!(err.contains("SWITCHYARD_TOKEN"), "{err}");
    let planes = [Plane::start(config(true)).await, Plane::start(config(true)).await];
    let follower = eventually(async || {
        let [first, second] = [planes[0].client(), planes[1].client()];
        match (first.leader().await.ok()?, second.leader().await.ok()?) {
            (leader, info) if leader.leads && info.url.is_some() => Some(&planes[1]),
            (info, leader) if leader.leads && info.url.is_some() => Some(&planes[0]),
            _ => None,
        }
    })
    .await;
    let client = |token: &str| client_of(follower, token);
    let member = serve(&client(&server), "a", 1).await;
    let drain = DrainRequest::default();
    assert_forbidden(client(&viewer).drain(&member, &drain).await, &["viewer", "operator"]);
    client(&operator).drain(&member, &drain).await.unwrap();
    let err = client("wrong").drain(&member, &drain).await.unwrap_err();
    assert_eq!(err.code(), Some(code::UNAUTHORIZED), "{err}");
    // A caller that vouches for itself gains nothing.
    let head = format!(
        "PUT /v1/goals HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer {viewer}\r\n\
         x-switchyard-forwarded: 1\r\nx-switchyard-control-token: {viewer}\r\nx-switchyard-caller: \
         eyJjZXJ0aWZpY2F0ZSI6eyJuYW1lIjoib3BzIiwicm9sZSI6Im9wZXJhdG9yIn0sImFkZHJlc3MiOm51bGx9\r\n\r\n"
    );
    for plane in &planes {
        let answer = raw(plane.addr, head.as_bytes()).await;
        assert!(answer.starts_with("HTTP/1.1 403"), "{answer}");
    }
    let log = client(&viewer).audit(0).await.unwrap();
    let drained = log.entries.iter().find(|entry| entry.action == "drain" && entry.outcome == "ok");
    let drained = drained.unwrap_or_else(|| panic!("{log:?}"));
    assert_eq!(
        (drained.name.as_str(), drained.address.as_deref()),
        ("operator", Some("127.0.0.1"))
    );
    for plane in planes {
        plane.stop().await;
    }
}

/// Watches keep their connections for good, so neither one identity nor all watches together can take them all.
#[tokio::test]
async fn watches_of_one_identity_leave_room_for_the_others() {
    let tokens = Tokens::new();
    let (engine, other) = (tokens.add("engine", Role::Client), tokens.add("other", Role::Client));
    let server = tokens.add("gpu-1", Role::Server);
    let mut config = tokens.config();
    config.limits.max_connections = 16;
    let plane = Plane::start(config).await;
    let [engine, other, server] = [engine, other, server].map(|token| client_of(&plane, &token));
    let mut watches = Vec::new();
    for _ in 0..6 {
        watches.push(engine.watch_placement().await.unwrap());
    }
    let Err(err) = engine.watch_placement().await else { panic!("a seventh watch is open") };
    assert_eq!(err.code(), Some(code::TOO_MANY_WATCHERS), "{err}");
    assert!(err.to_string().contains("engine has 6 placement watches open"), "{err}");
    for _ in 0..6 {
        watches.push(other.watch_placement().await.unwrap());
    }
    let Err(err) = server.watch_placement().await else { panic!("a 13th watch is open") };
    assert!(err.to_string().contains("12 placement watches are open"), "{err}");
    // All other requests are answered, and a watch that ends makes room.
    serve(&server, "a", 1).await;
    assert!(
        raw(plane.addr, b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            .await
            .ends_with("ok\n")
    );
    drop(watches.remove(0));
    eventually(async || engine.watch_placement().await.ok()).await;
    plane.stop().await;
}

/// A browser adds certificates and reaches loopback ports by itself, so the control plane looks where a change comes from.
#[tokio::test]
async fn pages_of_other_sites_change_nothing() {
    let tokens = Tokens::new();
    let operator = tokens.add("ops", Role::Operator);
    let plane = Plane::start(tokens.config()).await;
    let revoke = async |more: &str| {
        let request = format!(
            "POST /v1/tickets/revoke HTTP/1.1\r\nhost: {}\r\nauthorization: Bearer {operator}\r\n{more}connection: close\r\n\r\n",
            plane.addr
        );
        raw(plane.addr, request.as_bytes()).await
    };
    for foreign in ["origin: https://evil.example\r\n", "sec-fetch-site: cross-site\r\n"] {
        let answer = revoke(foreign).await;
        assert!(answer.starts_with("HTTP/1.1 403") && answer.contains("another site"), "{answer}");
    }
    assert!(revoke("sec-fetch-site: same-origin\r\n").await.starts_with("HTTP/1.1 200"));
    assert!(revoke("").await.starts_with("HTTP/1.1 200"));
    let log = client_of(&plane, &operator).audit(0).await.unwrap();
    let outcomes: Vec<_> = log.entries.iter().map(|entry| entry.outcome.as_str()).collect();
    assert_eq!(outcomes, ["forbidden", "forbidden", "ok", "ok"]);
    plane.stop().await;

    let mut config = patient_config();
    config.token = None;
    let plane = Plane::start(config).await;
    let ask = async |host: &str| {
        let request =
            format!("GET /v1/status HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n");
        raw(plane.addr, request.as_bytes()).await
    };
    let answer = ask("evil.example").await;
    assert!(answer.starts_with("HTTP/1.1 403") && answer.contains("header Host"), "{answer}");
    assert!(ask("localhost:7070").await.starts_with("HTTP/1.1 200"));
    assert!(ask(&plane.addr.to_string()).await.starts_with("HTTP/1.1 200"));
    plane.stop().await;
}

/// A client's report about a server reaches terminals and logs.
#[tokio::test]
async fn reports_with_control_characters_are_refused_or_escaped_before() {
    let plane = Plane::start(patient_config()).await;
    let client = plane.client();
    let member = serve(&client, "a", 1).await;
    for bad in ["\\u001b[2J", "\\u0007", "\\u009b", "\\u202e", "line\\nhealth: healthy"] {
        for body in [
            format!(r#"{{"reporter": "x", "reason": "{bad}"}}"#),
            format!(r#"{{"reporter": "{bad}", "reason": "x"}}"#),
        ] {
            let request = format!(
                "POST /v1/members/{member}/suspect HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {TOKEN}\r\n\
                 content-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
                body.len()
            );
            let answer = raw(plane.addr, request.as_bytes()).await;
            assert!(answer.starts_with("HTTP/1.1 400"), "{bad}: {answer}");
            assert!(answer.contains("control characters"), "{answer}");
        }
    }
    // An honest client quotes a peer.
    let report = SuspectRequest {
        reporter: "engine".to_owned(),
        reason: "it sent \u{1b}[2J\n".to_owned(),
        incarnation: None,
    };
    client.suspect(&member, &report).await.unwrap();
    let reports = &client.members().await.unwrap()[0].reports;
    assert_eq!(reports.len(), 1);
    assert_eq!(reports[0].reason, "it sent \\u001b[2J\\u000a");
    plane.stop().await;
}

/// A request with the first bytes of a body of `announced` bytes.
async fn begin_body(plane: &Plane, path: &str, token: &str, announced: usize) -> TcpStream {
    let mut stream = TcpStream::connect(plane.addr).await.unwrap();
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {token}\r\n\
         content-type: application/json\r\ncontent-length: {announced}\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    // The control plane may refuse the head and close.
    let _ = stream.write_all(&b" ".repeat(announced / 2)).await;
    stream
}

#[tokio::test]
async fn slow_bodies_of_one_identity_leave_memory_for_the_others() {
    let tokens = Tokens::new();
    let (greedy, modest) = (tokens.add("gpu-1", Role::Server), tokens.add("gpu-2", Role::Server));
    let mut config = tokens.config();
    config.limits.max_bodies_bytes = 100_000;
    config.limits.request_timeout = Duration::from_secs(60);
    let plane = Plane::start(config).await;

    // Half of the memory is five half bodies. With parts of bodies, a sixth one may find room.
    let mut bodies = tokio::task::JoinSet::new();
    for _ in 0..20 {
        let mut stream = begin_body(&plane, "/v1/members", &greedy, 20_000).await;
        bodies.spawn(async move {
            let mut answer = [0; 12];
            stream.read_exact(&mut answer).await.unwrap();
            answer
        });
    }
    for _ in 0..14 {
        let answer = tokio::time::timeout(BOUND, bodies.join_next()).await.expect("more are read");
        assert_eq!(&answer.unwrap().unwrap(), b"HTTP/1.1 429");
    }
    serve(&client_of(&plane, &modest), "b", 1).await;
    // The end of its connections frees the memory.
    bodies.shutdown().await;
    eventually(async || client_of(&plane, &greedy).register(&request("a", 1)).await.ok()).await;

    // A ticket needs no such body.
    let mut stream = begin_body(&plane, "/v1/tickets", &greedy, 20_000).await;
    let mut answer = [0; 12];
    stream.read_exact(&mut answer).await.unwrap();
    assert_eq!(&answer, b"HTTP/1.1 413");
    plane.stop().await;
}
