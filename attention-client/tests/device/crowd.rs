//! Several clients and several servers come and go.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use protocol::WireDtype;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rustix::process::Signal;
use tokio::sync::watch;

use crate::client_common::seeded;
use crate::faults::metric;
use crate::order::Play;
use crate::rig::{Guest, Replicas, builder};

const NUM_CLIENTS: usize = 3;
const NUM_SERVERS: usize = 3;
/// Far longer than anything takes, so a server that fails for its silence is a defect.
const LIMIT: Duration = Duration::from_secs(30);

#[test]
fn clients_and_servers_that_come_and_go_give_the_right_rows() {
    let mut rng = seeded("clients_and_servers_that_come_and_go_give_the_right_rows");
    let Some(mut replicas) = Replicas::of(WireDtype::F8E4m3, NUM_SERVERS, 2) else { return };
    replicas.max_servers = NUM_SERVERS;
    let (tables, watched) = watch::channel(Arc::new(replicas.table()));
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..NUM_CLIENTS)
            .map(|_| {
                let (guest, rng) = (replicas.guest(), StdRng::from_rng(&mut rng));
                let (is_over, watched) = (&is_over, &watched);
                scope.spawn(move || come_and_go(&guest, rng, watched, is_over))
            })
            .collect();
        for _ in 0..40 {
            std::thread::sleep(Duration::from_millis(rng.random_range(0..200)));
            let server = rng.random_range(0..NUM_SERVERS);
            if !replicas.lives(server) {
                tables.send(Arc::new(replicas.restart(server))).expect("watched");
            } else if (0..NUM_SERVERS).any(|other| other != server && replicas.lives(other)) {
                if rng.random() {
                    replicas.server(server).signal(Signal::STOP);
                    std::thread::sleep(Duration::from_millis(20));
                }
                replicas.kill(server);
            }
        }
        is_over.store(true, Ordering::Relaxed);
        for client in clients {
            client.join().expect("a client");
        }
    });
}

/// One client after the other. Some are dropped with calls outstanding.
fn come_and_go(
    guest: &Guest,
    mut rng: StdRng,
    watched: &watch::Receiver<Arc<control_api::PlacementTable>>,
    is_over: &AtomicBool,
) {
    while !is_over.load(Ordering::Relaxed) {
        let settings = builder(&guest.model).deadline(LIMIT).work_limit(LIMIT).replica_wait(LIMIT);
        let client = guest.connect_by(settings.placement_watch(watched.clone()));
        let own = StdRng::from_rng(&mut rng);
        let mut play = Play::new(own, client, guest.local(), guest.slot.num_frames);
        while !is_over.load(Ordering::Relaxed) && rng.random_range(0..60) > 0 {
            play.step();
        }
        for reason in ["silent", "stuck"] {
            let name = "switchyard_client_failovers_total";
            assert_eq!(metric(&play.client, name, Some(reason)), 0.0, "{reason}");
        }
        if rng.random() { play.end() } else { play.leave() }
    }
}
