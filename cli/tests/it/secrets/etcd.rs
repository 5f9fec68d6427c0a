//! Control planes on an etcd that asks for a user.

use test_support::etcd::EtcdCluster;

use super::*;

const PREFIX: &str = "/fleet/";

#[test]
fn what_control_planes_know_of_etcd_and_each_other_shows_up_nowhere() {
    let etcd = EtcdCluster::start(1);
    let [password, wrong, cluster_token] = ["password", "wrong", "cluster"]
        .map(|name| format!("{name}{:032x}", rand::random::<u128>()));
    for args in [
        &["user", "add", "root:root"][..],
        &["user", "grant-role", "root", "root"],
        &["user", "add", &format!("fleet:{password}")],
        &["role", "add", "fleet"],
        &["role", "grant-permission", "fleet", "--prefix=true", "readwrite", PREFIX],
        &["user", "grant-role", "fleet", "fleet"],
        &["auth", "enable"],
    ] {
        etcd.control(args);
    }
    let (endpoint, answers_of_etcd) = taps::relay(&etcd.endpoints()[0]);

    let mut fleet = Fleet::new();
    let operator = fleet.new_token("operator");
    let given = |name: &str, secret: &str| {
        let path = fleet.path("given").join(name);
        std::fs::write(&path, format!("{secret}\n")).expect("secret");
        text(&path).to_owned()
    };
    let (password_file, token_file) =
        (given("password", &password), given("cluster", &cluster_token));
    let tokens = fleet.path("tokens");
    let control = [
        &["control-plane", "--listen", "127.0.0.1:0", "--etcd-lease-s", "2", "--store", "etcd"][..],
        &["--etcd-user", "fleet", "--etcd-prefix", PREFIX, "--token-file", &token_file],
        &["--tokens", text(&tokens), "--etcd-endpoints"],
    ]
    .concat();
    let by_file =
        [&control[..], &[endpoint.as_str(), "--etcd-password-file", &password_file]].concat();
    let by_variable = [&control[..], &[endpoint.as_str()]].concat();
    let mut addr_of = |args: &[&str], env: &[(&str, &str)], name: &str| {
        let event = fleet.start_with(args, env, name, "listening");
        event["addr"].as_str().expect("addr").to_owned()
    };
    let planes = [
        addr_of(&by_file, &[], "control"),
        addr_of(&by_variable, &[("SWITCHYARD_ETCD_PASSWORD", &password)], "second"),
    ];
    // A wrong password, and the right one where it does not belong.
    let inside = format!("http://fleet:{password}@127.0.0.1:1");
    for (name, secret, endpoint, more) in [
        ("wrong", &wrong, &endpoint, &[][..]),
        ("inside", &password, &inside, &[]),
        ("advertised", &password, &endpoint, &["--advertise", inside.as_str()]),
    ] {
        let env = [("SWITCHYARD_ETCD_PASSWORD", secret.as_str())];
        let args = [&control[..], &[endpoint.as_str()], more].concat();
        assert!(!fleet.run(&args, &env, name), "{name}");
    }

    let header = format!("Authorization: Bearer {operator}\r\n");
    let mut answers = String::new();
    for addr in &planes {
        // One of them follows, and passes requests on.
        let begin = Instant::now();
        loop {
            let answer = ask(addr, "GET", "/v1/members", &header, "");
            if answer.starts_with("HTTP/1.1 200") {
                break;
            }
            assert!(begin.elapsed() < LIMIT, "no control plane leads: {answer}");
            std::thread::sleep(Duration::from_millis(50));
        }
        for path in ["/v1/status", "/v1/members", "/v1/audit", "/v1/leader", "/metrics", "/readyz"]
        {
            answers += &ask(addr, "GET", path, &header, "");
        }
        answers +=
            &ask(addr, "PUT", "/v1/goals", &header, &format!("{{\"password\":\"{password}\"}}"));
    }
    let urls = planes.map(|addr| format!("http://{addr}")).join(",");
    let env = [("SWITCHYARD_TOKEN", operator.as_str())];
    fleet.run(&["doctor", "--control-plane", &urls], &env, "doctor");
    // A leader learns of its followers a moment after it leads.
    let begin = Instant::now();
    loop {
        fleet.run(&["status", "--control-plane", &urls], &env, "status");
        let shown = std::fs::read_to_string(fleet.path("status.out")).expect("status");
        if shown.contains("followers") {
            break;
        }
        assert!(begin.elapsed() < LIMIT, "status does not show the followers: {shown}");
        std::thread::sleep(Duration::from_millis(50));
    }

    let mut searched = fleet.written();
    searched.push(("answers".to_owned(), answers));
    let answers_of_etcd = answers_of_etcd.text();
    let tokens_of_etcd: Vec<&str> = answers_of_etcd
        .split("\"token\":\"")
        .skip(1)
        .filter_map(|rest| rest.split('"').next())
        .collect();
    assert!(!tokens_of_etcd.is_empty(), "etcd gave no tokens: {answers_of_etcd}");
    let ours =
        [&password, &wrong, &cluster_token, &operator].map(|secret| &secret[secret.len() - 16..]);
    expect_absent(&searched, ours.into_iter().chain(tokens_of_etcd));
    // Keys of tickets are in etcd, since all control planes need them. Tokens are there as hashes at most.
    let stored = etcd.control(&["--user", "root:root", "get", "", "--prefix"]);
    assert!(stored.contains(PREFIX), "{stored}");
    expect_absent(&[("etcd".to_owned(), stored)], ours);
}
