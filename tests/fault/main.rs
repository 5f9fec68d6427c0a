//! Faults of real processes. Every test prints its seed; `SWITCHYARD_SEED` replays it.

mod crowd;
mod deaths;
mod half_open;
mod hostile;
mod mutants;
mod namespaces;
mod rig;
mod support;

test_support::child_processes! {
    "lost-host" => half_open::lose_host,
    "cut-links" => namespaces::cut_links,
    "lose-packets" => namespaces::lose_packets,
}
