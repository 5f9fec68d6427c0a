//! One suite for every transport. Two threads run it over local memory, and over staged memory with and without
//! disorder. Two processes run it over shared memory, over shared memory by put only, and over networks.
#![cfg(not(loom))]

mod parties;
mod suite;
#[cfg(feature = "verbs")]
mod verbs;

use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::time::Duration;

use p2p_core::backend::local;
use p2p_core::backend::staged::{Disorder, StagedEndpoint};
use p2p_core::bootstrap::CloseReason;
use p2p_core::{Channel, Connection, SlotConfig, TransportKind};
use parties::{
    TransportSetup, child_command, fresh_seed, in_processes, in_threads, meet, runtime, serve, var,
};
use test_support::{bounded, skip};

test_support::child_processes! { "peer" => child_process }

#[test]
fn local_threads() {
    in_threads(|config| local::pair(config).unwrap());
}

#[test]
fn staged_threads() {
    in_threads(|config| local::staged_pair(config, None).unwrap());
}

#[test]
fn staged_threads_in_disorder() {
    let mut seed = fresh_seed();
    in_threads(move |config| {
        seed += 1;
        let disorder = Disorder { seed, max_delay: Duration::from_micros(20) };
        local::staged_pair(config, Some(disorder)).unwrap()
    });
}

#[test]
fn two_processes_over_shared_memory() {
    in_processes(&TransportSetup::plain(TransportKind::Shm).with("KIND", "shm"), |_| true);
}

#[test]
fn two_processes_over_staged_memory() {
    in_processes(&TransportSetup::plain(TransportKind::Staged).with("KIND", "staged"), |_| true);
}

#[test]
fn two_processes_over_libfabric_tcp() {
    over_libfabric("tcp;ofi_rxm");
}

#[test]
fn two_processes_over_libfabric_shm() {
    over_libfabric("shm");
}

/// `SWITCHYARD_TEST_PROVIDER` names providers that few hosts have.
#[test]
fn two_processes_over_another_provider() {
    let Ok(provider) = std::env::var("SWITCHYARD_TEST_PROVIDER") else {
        return skip("provider", "SWITCHYARD_TEST_PROVIDER names none");
    };
    over_libfabric(&provider);
}

fn over_libfabric(provider: &str) {
    match libfabric_transport::FabricNetwork::open(provider) {
        Ok(network) => {
            let setup = TransportSetup::over(std::sync::Arc::new(network));
            let setup = setup.with("KIND", "libfabric").with("PROVIDER", provider);
            in_processes(&setup, |connection| connection.transport.flavour == provider);
        }
        Err(error) => skip("libfabric", &error.to_string()),
    }
}

/// The transport path of a child, from its environment.
fn setup_of_child() -> TransportSetup {
    match var("KIND").expect("a kind").as_str() {
        "shm" => TransportSetup::plain(TransportKind::Shm),
        "staged" => TransportSetup::plain(TransportKind::Staged),
        "libfabric" => {
            let provider = var("PROVIDER").expect("a provider");
            let network = libfabric_transport::FabricNetwork::open(&provider).unwrap();
            TransportSetup::over(std::sync::Arc::new(network))
        }
        #[cfg(feature = "verbs")]
        "verbs" => TransportSetup::over(verbs::network()),
        other => panic!("no transport is called {other}"),
    }
}

#[test]
fn the_death_of_a_process_is_noticed_at_once() {
    let config = SlotConfig { slot_bytes: 64 << 10, num_frames: 2 };
    let setup = TransportSetup::plain(TransportKind::Shm).with("KIND", "shm").with("HANG", 1);
    let (connections, mut child) = parties::serve_one_child(config, &setup);
    let connection = connections.recv_timeout(Duration::from_secs(30)).expect("peer");
    assert_eq!(connection.liveness.closed_now(), None);
    let runtime = runtime();
    let waiting = runtime.spawn(async move {
        let closed = tokio::time::timeout(bounded::LIMIT, connection.liveness.closed());
        let reason = closed.await.expect("the death is noticed in time");
        (reason, connection.liveness.closed_now())
    });
    let start = std::time::Instant::now();
    child.kill().unwrap();
    let (reason, again) = runtime.block_on(waiting).unwrap();
    println!("noticed after {:?}", start.elapsed());
    child.wait().unwrap();
    assert!(matches!(reason, CloseReason::Lost | CloseReason::Reset), "{reason}");
    assert_eq!(again, Some(reason));
}

#[test]
fn another_user_is_refused_by_name() {
    let this_user = std::fs::metadata("/proc/self").unwrap().uid();
    if this_user != 0 {
        skip("root", "a process of another user is started by root only");
        return;
    }
    let slot = SlotConfig { slot_bytes: 64 << 10, num_frames: 2 };
    let setup = TransportSetup::plain(TransportKind::Shm).with("KIND", "shm").with("REFUSED", 1);
    let (connections, addr) = serve(slot, &setup);
    let mut command = child_command(addr, slot, &setup);
    match command.uid(65534).gid(65534).spawn() {
        Ok(mut child) => {
            let status = bounded::status_of(&mut child, "the refused process", bounded::LIMIT);
            assert!(status.success(), "see the child's message");
        }
        Err(error) => skip("root", &format!("another user cannot execute this: {error}")),
    }
    assert!(connections.try_recv().is_err());
}

/// The other half of the tests with two processes.
fn child_process() {
    let setup = setup_of_child();
    if var("REFUSED").is_some() {
        let error = meet(&runtime(), &setup).unwrap_err().to_string();
        assert!(error.contains("uid 65534") && error.contains("uid 0"), "{error}");
    } else if var("HANG").is_some() {
        let runtime = runtime();
        let _connection = meet(&runtime, &setup).unwrap();
        std::thread::sleep(Duration::from_secs(60));
    } else {
        parties::perform_all(&setup);
    }
}

const _: fn() = || {
    fn is_send<T: Send>() {}
    is_send::<Channel<StagedEndpoint>>();
    is_send::<Connection>();
};
