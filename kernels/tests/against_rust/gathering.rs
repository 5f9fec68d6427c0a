//! For whom a batch waits.

use kernels::abi::{Batch, DTYPE_F8_E4M3, FrameGeometry, Gather, ServerState};
use rand::rngs::StdRng;

use crate::fresh;
use crate::runner::Runner;
use crate::world::{Input, Memory, World};

const NUM_EXPERTS: u32 = 8;

pub fn who_was_in_the_last_batch_is_waited_for_within_the_bound(runner: &Runner) {
    let mut rng = fresh();
    let geometry = FrameGeometry::new(256, 3, DTYPE_F8_E4M3, 6, 2).expect("in range");
    let world = World::new(runner, &mut rng, geometry, NUM_EXPERTS, 3, 1);
    let expected_of = |gather: Gather, senders: &[usize], rng: &mut StdRng| {
        senders.iter().for_each(|client| send(runner, rng, &world, *client));
        let batch = receive(runner, &world, gather);
        let came = senders.iter().fold(0, |mask, client| mask | 1 << client);
        assert_eq!(batch.clients, came, "everybody who came is in");
        let state: ServerState = world.servers[0].state.one(0);
        assert_eq!(state.last_clients, came);
        assert_eq!(state.error.tag, 0, "whoever stays away is to blame for nothing");
        batch
    };
    let within_ns = 3_000_000;
    let gather = |clients| Gather { clients, within_ns };
    // No client was there before.
    assert_eq!(expected_of(gather(0b111), &[0, 2], &mut rng).expected, 0);
    // One of two comes back: the other is waited for up to the limit.
    let batch = expected_of(gather(0b111), &[2], &mut rng);
    assert_eq!(batch.expected, 0b101);
    assert!(batch.waited_ns[2] >= within_ns - MARGIN_NS, "{} ns", batch.waited_ns[2]);
    // It is not waited for again. The one that came is, and no other may be.
    assert_eq!(expected_of(gather(0b011), &[1, 2], &mut rng).expected, 0);
    assert_eq!(expected_of(gather(0b110), &[2, 1], &mut rng).expected, 0b110);
    // All expected clients are there together here, in whatever order they come.
    let endless = Gather { clients: 0b110, within_ns: u32::MAX };
    assert_eq!(expected_of(endless, &[1, 2], &mut rng).expected, 0b110);
    assert_eq!(expected_of(endless, &[0, 1, 2], &mut rng).expected, 0b110);
    // A kernel without clients clears the set of those that were there.
    let batch = receive(runner, &world, endless);
    assert_eq!((batch.clients, batch.expected), (0, 0b110));
    assert_eq!(expected_of(endless, &[0], &mut rng).expected, 0);
}

fn send(runner: &Runner, rng: &mut StdRng, world: &World, client: usize) {
    let input = Input::random(rng, &world.geometry, NUM_EXPERTS, 6);
    world.load(client, &input);
    // SAFETY: the world's memory is as large as its geometry says.
    assert_eq!(unsafe { runner.launch(&world.dispatch_params(client, 1)) }, 0);
}

fn receive(runner: &Runner, world: &World, gather: Gather) -> Batch {
    let memory = Memory::of(runner, &[gather]);
    let mut params = world.recv_params(0, 1);
    params.gather = memory.address();
    // SAFETY: as above, and the kernel has ended when this returns.
    assert_eq!(unsafe { runner.launch(&params) }, 0);
    world.servers[0].list_memory.one(0)
}

/// The kernel's begin, from which the bound counts, is a little before its first poll.
const MARGIN_NS: u32 = 1_000_000;
