//! Clients that look up control planes: with a resolver of the test's own, and from an API server in this process.

mod support;
mod tls;

use std::io;
use std::time::Duration;

use super::*;
use crate::client::ControlClient;
use support::{Plane, ScriptedResolver, TIMEOUT, client_of};

fn parse(text: &str) -> Result<ControlPlanes, ConfigError> {
    ControlPlanes::parse(text, "http", |text| {
        let reason = "scheme".to_owned();
        let malformed = || ConfigError::Url { url: text.to_owned(), reason };
        if text.starts_with("http://") { Ok(Url::parse(text).unwrap()) } else { Err(malformed()) }
    })
}

#[test]
fn locators_are_shown_as_they_were_given() {
    for text in [
        "http://h:1",
        "dns://control.experts.svc:7070",
        "dns://127.0.0.1:65535",
        "dns://[::1]:7070",
        "http://h:1,dns://h:2,http://h:3",
    ] {
        let planes = parse(text).unwrap();
        assert_eq!(planes.known.borrow().text(), text);
        assert_eq!(planes.is_fixed(), text == "http://h:1", "{text}");
    }
    assert_eq!(
        parse(" dns://h:1/ , http://h:1").unwrap().known.borrow().text(),
        "dns://h:1,http://h:1"
    );
}

#[test]
fn locators_that_cannot_work_are_named() {
    for (text, reason) in [
        ("dns://", "no port"),
        ("dns://h", "no port"),
        ("dns://h:", "port \"\""),
        ("dns://h:0", "port \"0\""),
        ("dns://h:+1", "port \"+1\""),
        ("dns://h:65536", "port \"65536\""),
        ("dns://h:http", "port \"http\""),
        ("dns://:1", "no host"),
        ("dns://a b:1", "host \"a b\""),
        ("dns://u@h:1", "user name or password inside: pass a token instead"),
        ("dns://h/path:1", "host \"h/path\""),
        ("dns://[::1]", "no port"),
        ("dns://[::g]:1", "host \"[::g]\""),
        ("dns:h:1", "scheme"),
        ("consul://h:1", "scheme"),
        ("http://h:1,dns://h", "no port"),
        ("dns://h:1,,", "scheme"),
    ] {
        let err = parse(text).unwrap_err().to_string();
        assert!(err.contains(&format!("({reason})")), "{text}: {err}");
        assert!(err.contains("dns://HOST:PORT") && !err.contains('\n'), "{text}: {err}");
    }
}

#[cfg(not(feature = "kubernetes"))]
#[test]
fn a_build_without_kubernetes_says_so() {
    let err = parse("k8s://experts/control").unwrap_err().to_string();
    assert!(err.contains("no feature `kubernetes`"), "{err}");
}

#[tokio::test]
async fn every_address_of_a_name_is_a_control_plane() {
    let [a, b] = Plane::start_pair().await;
    let resolver = ScriptedResolver::new(vec![b.addr.ip(), a.addr.ip(), a.addr.ip()]);
    let client = client_of(&format!("dns://control.test:{}", a.addr.port()), &resolver);
    assert_eq!(client.base_url(), format!("dns://control.test:{}", a.addr.port()));
    client.leader().await.unwrap();
    let urls = client.planes().known.borrow().urls.clone();
    let texts: Vec<&str> = urls.iter().map(text_of).collect();
    assert_eq!(texts, [a.url(), b.url()]);
    assert_eq!(client.planes().name_of(a.addr.ip()).as_deref(), Some("control.test"));
    assert_eq!(client.planes().name_of([192, 0, 2, 1].into()), None);
    // One dies: requests go to the other one.
    a.stop();
    for _ in 0..3 {
        assert_eq!(client.leader().await.unwrap().url, Some(b.url()));
    }
    assert_eq!(client.base_url(), b.url());
}

/// The pod of a control plane has another address after a restart.
#[tokio::test]
async fn a_request_that_no_known_control_plane_answers_looks_the_name_up_again() {
    let [a, b] = Plane::start_pair().await;
    let resolver = ScriptedResolver::new(vec![a.addr.ip()]);
    let client = client_of(&format!("dns://control.test:{}", a.addr.port()), &resolver);
    assert_eq!(client.leader().await.unwrap().url, Some(a.url()));
    a.stop();
    resolver.answer(Ok(vec![b.addr.ip()]));
    assert_eq!(client.leader().await.unwrap().url, Some(b.url()));
    // A clone on another runtime uses the same list.
    let url = client.isolated().unwrap().leader().await.unwrap().url;
    assert_eq!(url, Some(b.url()));
}

/// A control plane that takes connections and never answers leaves time to look for another one.
#[tokio::test]
async fn a_silent_control_plane_leaves_time_for_a_lookup() {
    let [a, b] = Plane::start_pair().await;
    let silent = a.silence().await;
    let resolver = ScriptedResolver::new(vec![silent.ip()]);
    let client = client_of(&format!("dns://control.test:{}", silent.port()), &resolver)
        .with_timeout(Duration::from_secs(8));
    client.planes().list(TIMEOUT).await.unwrap();
    resolver.answer(Ok(vec![b.addr.ip()]));
    assert_eq!(client.leader().await.unwrap().url, Some(b.url()));
}

#[tokio::test]
async fn addresses_stay_in_force_while_lookups_fail() {
    let [a, b] = Plane::start_pair().await;
    let resolver = ScriptedResolver::new(vec![a.addr.ip()]);
    let client = client_of(&format!("dns://control.test:{}", a.addr.port()), &resolver);
    client.leader().await.unwrap();
    let failures: [io::Result<Vec<IpAddr>>; 2] =
        [Err(io::Error::other("SERVFAIL")), Ok(Vec::new())];
    for failure in failures {
        resolver.answer(failure);
        let snapshot = client.planes().list_again(TIMEOUT).await.unwrap();
        assert_eq!(snapshot.urls.len(), 1);
        assert_eq!(client.leader().await.unwrap().url, Some(a.url()));
    }
    drop(b);
}

#[tokio::test]
async fn a_name_without_an_address_is_one_clear_line() {
    for (answer, reason) in [
        (Err(io::Error::other("NXDOMAIN")), "control.test: NXDOMAIN"),
        (Ok(Vec::new()), "control.test has no address"),
    ] {
        let resolver = ScriptedResolver::new(Vec::new());
        resolver.answer(answer);
        let client = client_of("dns://control.test:7070", &resolver);
        let err = client.leader().await.unwrap_err();
        assert!(err.is_transient(), "{err}");
        let expected = format!("no control plane found by dns://control.test:7070 ({reason})");
        assert_eq!(err.to_string(), expected);
    }
}

#[tokio::test]
async fn a_resolver_that_hangs_costs_a_request_its_timeout_and_no_more() {
    let resolver = ScriptedResolver::new(Vec::new());
    resolver.hang();
    let client =
        client_of("dns://control.test:7070", &resolver).with_timeout(Duration::from_millis(300));
    let err = client.leader().await.unwrap_err().to_string();
    assert!(err.contains("no answer within 300 ms"), "{err}");
    // A fixed control plane is asked without waiting for the name.
    let [a, _b] = Plane::start_pair().await;
    let both = client_of(&format!("{},dns://control.test:7070", a.url()), &resolver);
    assert_eq!(both.leader().await.unwrap().url, Some(a.url()));
}

/// The thread ends with the last clone of the client.
#[tokio::test]
async fn the_search_ends_with_its_last_client() {
    let [a, _b] = Plane::start_pair().await;
    let resolver = ScriptedResolver::new(vec![a.addr.ip()]);
    let client = client_of(&format!("dns://control.test:{}", a.addr.port()), &resolver);
    let clone = client.isolated().unwrap();
    client.leader().await.unwrap();
    drop(client);
    assert!(resolver.num_users() > 1);
    drop(clone);
    support::eventually(|| resolver.num_users() == 1).await;
}

#[cfg(feature = "kubernetes")]
mod kubernetes;
