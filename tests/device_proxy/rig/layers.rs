//! Tests for every path from kernels to servers.

use rand::SeedableRng;
use test_support::printed_seed;

use super::*;

/// Rows of the largest requests.
pub const MANY: usize = 40;

/// Layers are bit for bit what they are over direct stores.
pub fn layers(dtype: WireDtype) {
    let mut rng = StdRng::seed_from_u64(printed_seed());
    // Every expert is at one of two servers.
    let Some(servers) = Servers::start(2, 1, dtype) else { return };
    let mut clients = [servers.caller(Way::Network), servers.caller(Way::Network)];
    let mut direct = servers.caller(Way::Memory);
    let mut num_layers = 0;
    for round in 0..6 {
        let num_tokens = [1, MANY, 0, 7][round % 4];
        let requests = [(); 2].map(|()| Request::random(&mut rng, &servers.model, num_tokens));
        // Both are under way at once, so that servers gather them as they like.
        let found: Vec<_> = std::thread::scope(|scope| {
            let calls: Vec<_> = clients
                .iter_mut()
                .zip(&requests)
                .map(|(client, request)| scope.spawn(|| client.forward(request)))
                .collect();
            calls.into_iter().map(|call| call.join().expect("a client")).collect()
        });
        for (request, (found, timing)) in requests.iter().zip(found) {
            let (expected, _) = direct.forward(request);
            assert!(found == expected, "round {round}: other than over direct stores");
            assert_eq!(timing.failovers, 0);
            num_layers += 1;
        }
    }
    for client in &clients {
        client.nothing_lost();
        // A frame to each server, with its flags, at least.
        let num_carried = client.num_carried();
        assert!(num_carried > num_layers, "{num_carried} carried: they went another way");
    }
    assert_eq!(direct.num_carried(), 0);
}

/// Tokens of a server that is killed go to a replica.
pub fn after_a_death() {
    let mut rng = StdRng::seed_from_u64(printed_seed());
    for dtype in [WireDtype::F8E4m3, WireDtype::Bf16] {
        let Some(mut servers) = Servers::start(2, 2, dtype) else { return };
        let (mut client, mut direct) = (servers.caller(Way::Network), servers.caller(Way::Memory));
        let request = Request::random(&mut rng, &servers.model, MANY);
        assert!(client.forward(&request).0 == direct.forward(&request).0, "with both servers");
        // A server that stands still has certainly not answered when it dies.
        let request = Request::random(&mut rng, &servers.model, MANY);
        servers.signal(0, Signal::STOP);
        let begun = client.begin(&request);
        std::thread::sleep(Duration::from_millis(50));
        servers.signal(0, Signal::KILL);
        let (found, timing) = client.finish(begun, &request);
        assert_eq!(timing.failovers, 1, "{timing:?}");
        let num_pairs = request.num_pairs();
        assert!(timing.resent_pairs > 0 && timing.resent_pairs < num_pairs, "{timing:?}");
        // Sums of one server's parts are rounded elsewhere than those of two.
        let (expected, _) = direct.forward(&request);
        let off = difference(&found, &expected, &request);
        assert!(off < 0.03, "after the death: off by {off}");
        for _ in 0..4 {
            let request = Request::random(&mut rng, &servers.model, MANY);
            let (found, timing) = client.forward(&request);
            assert!(found == direct.forward(&request).0, "with the server that is left");
            assert_eq!((timing.failovers, timing.num_servers), (0, 1));
        }
        client.nothing_lost();
        direct.nothing_lost();
    }
}

/// A server that stands still costs the client's deadline, and not what its way waits for acknowledgements.
pub fn beside_one_that_stands_still(stall_limit: Duration) {
    let mut rng = StdRng::seed_from_u64(printed_seed());
    let Some(mut servers) = Servers::start(2, 2, WireDtype::Bf16) else { return };
    let mut client = servers.caller_within(stall_limit / 10);
    let mut direct = servers.caller(Way::Memory);
    let request = Request::random(&mut rng, &servers.model, MANY);
    // Where processors are scarce, a call may miss so short a deadline with both of them.
    let with_both = (0..8).find_map(|_| {
        client.wait_for(&servers, 2);
        let (found, timing) = client.forward(&request);
        (timing.failovers == 0).then_some(found)
    });
    assert!(with_both.expect("no call is in time") == direct.forward(&request).0, "with both");
    // A call that waits for its way never takes less; one that does not may take as long where processors are
    // scarce, though not each of several.
    let mut took = Vec::new();
    while took.iter().all(|took| *took >= stall_limit * 4 / 5) {
        assert!(took.len() < 4, "{took:?}, where a way waits for {stall_limit:?}");
        client.wait_for(&servers, 2);
        let num_connects = client.num_connects();
        servers.signal(0, Signal::STOP);
        let begin = Instant::now();
        let (found, timing) = client.forward(&request);
        took.push(begin.elapsed());
        servers.signal(0, Signal::CONT);
        assert!(timing.failovers > 0, "{timing:?}");
        let off = difference(&found, &direct.forward(&request).0, &request);
        assert!(off < 0.03, "beside the frozen one: off by {off}");
        // A server that was given up may count as connected until it is connected anew.
        client.wait_for_connects(num_connects + 1);
    }
}

/// A server that comes back is reached anew.
pub fn with_successors() {
    let mut rng = StdRng::seed_from_u64(printed_seed());
    let Some(mut servers) = Servers::start(2, 2, WireDtype::F8E4m3) else { return };
    let mut client = servers.caller(Way::Network);
    for turn in 0..3 {
        let num_tokens = rng.random_range(1..=MANY);
        let request = Request::random(&mut rng, &servers.model, num_tokens);
        let (expected, timing) = client.forward(&request);
        assert_eq!(timing.failovers, 0, "turn {turn}");
        servers.restart(1);
        client.wait_for(&servers, 2);
        let (found, timing) = client.forward(&request);
        assert!(found == expected, "turn {turn}: the successor computes something else");
        assert_eq!(timing.failovers, 0, "turn {turn}");
    }
    client.nothing_lost();
}
