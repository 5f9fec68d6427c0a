//! Kernels for few blocks: their results must equal those of the kernels for many.

use kernels::abi::{DTYPE_BF16, DevicePtr, FLAG_ADD, FLAG_ANY_PATH, FrameGeometry};
use kernels::plan::KernelParams;
use rand::RngExt;

use crate::fresh;
use crate::runner::Runner;
use crate::world::{Input, World};

/// The last server does not answer. Of two and of four all parts of a token are loaded ahead, of six there are
/// parts behind them. Also sums that begin with existing values.
pub fn few_blocks_sum_what_many_do(runner: &Runner) {
    for num_servers in [2, 4, 6] {
        few_blocks_of_servers(runner, num_servers);
    }
}

fn few_blocks_of_servers(runner: &Runner, num_servers: usize) {
    let mut rng = fresh();
    let (tokens, num_answering) = (24, num_servers - 1);
    let geometry = FrameGeometry::new(7168, 8, DTYPE_BF16, tokens, 2).expect("in range");
    // A random placement may leave a server without experts.
    let drawn = (0..20).find_map(|_| {
        let world = World::new(runner, &mut rng, geometry, 16, 1, num_servers);
        let input = Input::random(&mut rng, &geometry, 16, tokens);
        let goes_to_all = |token| world.servers_of(&input, token).len() == num_servers;
        (0..tokens).any(goes_to_all).then_some((world, input))
    });
    let (world, mut input) = drawn.expect("a token that goes to all of them");
    world.poison();
    input.hidden_states.fill_with(|| half::bf16::from_f32(rng.random_range(-4.0..4.0)).to_bits());
    world.load(0, &input);
    // SAFETY: the world's memory is as large as its geometry says.
    unsafe {
        assert_eq!(runner.launch(&world.dispatch_params(0, 0)), 0);
        for server in 0..num_answering {
            assert_eq!(runner.launch(&world.recv_params(server, 1)), 0);
        }
    }
    let sums = |flags: u32| {
        let out = &world.clients[0].out;
        out.fill(0, u64::from(tokens) * 7168 * 2, u8::MAX);
        let mut found = Vec::new();
        for flags in [flags, flags | FLAG_ADD] {
            let params = kernels::abi::CombineParams { flags, ..world.combine_params(0) };
            assert_eq!(params.plan().is_few, flags & FLAG_ANY_PATH == 0);
            // Summed rows are no longer in the slot.
            for server in 0..num_answering {
                let params = world.send_params(server, DevicePtr::NULL);
                // SAFETY: as above.
                assert_eq!(unsafe { runner.launch(&params) }, 0);
            }
            // SAFETY: as above.
            assert_eq!(unsafe { runner.launch(&params) }, 0);
            found.push(out.read::<u16>(0, u64::from(tokens) * 7168));
        }
        (found, world.clients[0].token_missing.read::<u32>(0, tokens.into()))
    };
    // The kernels for links of any path are not for few blocks.
    let (few, many) = (sums(0), sums(FLAG_ANY_PATH));
    assert!(few == many);
    assert_ne!(few.0[0], few.0[1], "nothing was added");
    assert!(few.1.contains(&(1 << num_answering)));
    assert!(few.0[1].iter().all(|bits| !half::bf16::from_bits(*bits).is_nan()));
}
