//! Geometry, checks and launch sizes: the C++ launchers and Rust decide alike.

use bytemuck::Zeroable;
use kernels::abi::{
    ClientPeer, CombineParams, DEVICE_ABI_VERSION, DevicePtr, DispatchParams, EchoParams,
    ExpertComputeParams, ExpertRecvParams, ExpertSendParams, FrameGeometry, Link, ServerPeer,
};
use kernels::check::{CheckError, check_clients, check_servers};
use kernels::plan::KernelParams;
use rand::rngs::StdRng;
use rand::{Rng, RngExt};

use crate::fresh;
use crate::library::library;

#[test]
fn geometry_is_the_same_for_any_shape() {
    let (Some(library), mut rng) = (library(), fresh()) else { return };
    let (mut num_good, mut num_bad) = (0, 0);
    for round in 0..8_000 {
        let shape = any_shape(&mut rng);
        let [hidden, top_k, dtype, max_tokens, num_frames] = shape;
        let mine = FrameGeometry::new(hidden, top_k, dtype, max_tokens, num_frames);
        assert_eq!(mine.map_err(CheckError::code), library.geometry(shape), "{shape:?}");
        let Ok(geometry) = mine else {
            num_bad += 1;
            continue;
        };
        num_good += 1;
        let (num_experts, max_rows) = (rng.random_range(1..1024), rng.random_range(1..1 << 20));
        let base = DevicePtr(rng.random_range(0..1 << 40) * 256);
        assert_eq!(
            geometry.lists_at(base, num_experts, max_rows),
            library.lists(base, &geometry, num_experts, max_rows)
        );
        if round % 20 == 0 {
            let most = 1u64 << rng.random_range(12..34);
            let bytes = rng.random_range(0..most);
            let fits = FrameGeometry::tokens_for_slot(hidden, top_k, dtype, num_frames, bytes);
            let theirs = library.tokens_for_slot([hidden, top_k, dtype, num_frames], bytes);
            assert_eq!(fits, theirs, "{shape:?} in {bytes} bytes");
        }
    }
    assert!(num_good > 500 && num_bad > 500, "{num_good} good, {num_bad} bad shapes");
}

#[test]
fn parameters_are_judged_and_sized_alike() {
    let (Some(_), mut rng) = (library(), fresh()) else { return };
    let mut seen = std::collections::BTreeSet::new();
    for _ in 0..20_000 {
        seen.extend([
            compare(&mut rng, good_dispatch),
            compare(&mut rng, good_combine),
            compare(&mut rng, good_recv),
            compare(&mut rng, good_send),
            compare(&mut rng, good_compute),
            compare(&mut rng, good_echo),
        ]);
    }
    // Every code but those of tables of peers and of a failed driver.
    assert_eq!(seen.into_iter().collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14]);
}

#[test]
fn tables_of_peers_are_judged_alike() {
    let (Some(library), mut rng) = (library(), fresh()) else { return };
    let mut seen = std::collections::BTreeSet::new();
    for _ in 0..5_000 {
        let num_peers = rng.random_range(0..35);
        let mut servers = vec![ServerPeer::zeroed(); num_peers];
        let mut clients = vec![ClientPeer::zeroed(); num_peers];
        for at in 0..num_peers {
            let path = rng.random_range(1..=3);
            let link = Link { window: DevicePtr(4096), context: 64, path, reserved: 0 };
            servers[at] = ServerPeer { request: link, response: DevicePtr(64), ..servers[at] };
            clients[at] = ClientPeer { request: DevicePtr(64), response: link, ..clients[at] };
        }
        damage(&mut rng, bytemuck::cast_slice_mut(&mut servers), 8);
        damage(&mut rng, bytemuck::cast_slice_mut(&mut clients), 8);
        let mine = check_servers(&servers).map_or_else(CheckError::code, |()| 0);
        assert_eq!(mine, library.check_servers(&servers), "{servers:?}");
        seen.insert(mine);
        let mine = check_clients(&clients).map_or_else(CheckError::code, |()| 0);
        assert_eq!(mine, library.check_clients(&clients), "{clients:?}");
        seen.insert(mine);
    }
    assert_eq!(seen.into_iter().collect::<Vec<_>>(), [0, 2, 3, 7, 11]);
}

fn compare<P: KernelParams + std::fmt::Debug>(rng: &mut StdRng, good: fn(&mut StdRng) -> P) -> i32 {
    let library = library().expect("asked before");
    let mut params = good(rng);
    if rng.random_range(0..4) != 0 {
        damage(rng, bytemuck::bytes_of_mut(&mut params), 4);
    }
    let mine = params.check().map_or_else(CheckError::code, |()| 0);
    let (theirs, size) = library.plan(&params);
    assert_eq!(mine, theirs, "{params:?}");
    if mine == 0 {
        let plan = params.plan();
        let kind = [plan.is_tuned.into(), plan.is_few.into()];
        assert_eq!([&[plan.num_blocks, plan.num_threads], &kind[..]].concat(), size, "{params:?}");
        assert_eq!(plan.is_few, plan.entry.contains("9FewBlocks"));
    }
    mine
}

/// Overwrites one aligned word of `word_bytes` with something that is likely to matter.
fn damage(rng: &mut StdRng, bytes: &mut [u8], word_bytes: usize) {
    if bytes.is_empty() {
        return;
    }
    let at = rng.random_range(0..bytes.len() / word_bytes) * word_bytes;
    let value = match rng.random_range(0..4) {
        0 => 0,
        1 => rng.random_range(0..64),
        2 => rng.next_u64(),
        _ => u64::from_le_bytes([bytes[at], 0, 0, 0, 0, 0, 0, 0]) ^ 1 << rng.random_range(0..8),
    };
    bytes[at..at + word_bytes].copy_from_slice(&value.to_le_bytes()[..word_bytes]);
}

fn any_shape(rng: &mut StdRng) -> [u32; 5] {
    let odd = |rng: &mut StdRng, good: u32| match rng.random_range(0..10) {
        0 => rng.next_u32(),
        1 => 0,
        _ => good,
    };
    let hidden = rng.random_range(1..130) * 128;
    let tokens = 1 << rng.random_range(0..13);
    let shape = [
        hidden,
        rng.random_range(1..17),
        rng.random_range(3..5),
        rng.random_range(1..=tokens),
        1 << rng.random_range(0..4),
    ];
    shape.map(|good| odd(rng, good))
}

fn good_geometry(rng: &mut StdRng) -> FrameGeometry {
    let hidden = if rng.random() { 7168 } else { rng.random_range(1..70) * 128 };
    let top_k = if rng.random() { 8 } else { rng.random_range(1..17) };
    FrameGeometry::new(hidden, top_k, rng.random_range(3..5), rng.random_range(1..5000), 2)
        .expect("in range")
}

fn pointer(rng: &mut StdRng) -> DevicePtr {
    DevicePtr(rng.random_range(1..1 << 40) * 16)
}

fn blocks(rng: &mut StdRng) -> u32 {
    if rng.random() { 0 } else { rng.random_range(1..300) }
}

fn good_dispatch(rng: &mut StdRng) -> DispatchParams {
    let geometry = good_geometry(rng);
    DispatchParams {
        version: DEVICE_ABI_VERSION,
        flags: rng.random_range(0..8),
        geometry,
        hidden_states: pointer(rng),
        topk_idx: pointer(rng),
        topk_weights: pointer(rng),
        num_tokens: pointer(rng).add(4),
        placement: pointer(rng),
        state: pointer(rng),
        handle: pointer(rng),
        trace: DevicePtr::NULL,
        client_id: rng.next_u64(),
        trace_len: 0,
        capacity: rng.random_range(1..=geometry.max_tokens),
        layer: rng.next_u32(),
        num_experts: rng.random_range(1..1025),
        num_servers: rng.random_range(1..33),
        num_blocks: blocks(rng),
        servers: pointer(rng),
    }
}

fn good_combine(rng: &mut StdRng) -> CombineParams {
    let geometry = good_geometry(rng);
    CombineParams {
        version: DEVICE_ABI_VERSION,
        flags: 0,
        geometry,
        handle: pointer(rng),
        state: pointer(rng),
        out: pointer(rng),
        token_missing: DevicePtr::NULL,
        abort_mask: DevicePtr::NULL,
        timeout_ns: rng.random_range(1..1 << 31),
        capacity: rng.random_range(1..=geometry.max_tokens),
        num_servers: rng.random_range(1..33),
        num_blocks: blocks(rng),
        trace_len: 0,
        servers: pointer(rng),
        trace: DevicePtr::NULL,
    }
}

fn good_recv(rng: &mut StdRng) -> ExpertRecvParams {
    let geometry = good_geometry(rng);
    let num_experts = rng.random_range(1..1025);
    let base = DevicePtr(rng.random_range(1..1 << 40) * 256);
    let max_rows = geometry.max_tokens * rng.random_range(1..5);
    ExpertRecvParams {
        version: DEVICE_ABI_VERSION,
        flags: 0,
        geometry,
        state: pointer(rng),
        lists: geometry.lists_at(base, num_experts, max_rows).0,
        local_expert: pointer(rng),
        abort_mask: DevicePtr::NULL,
        min_epoch: DevicePtr::NULL,
        timeout_ns: rng.random_range(1..1 << 31),
        min_ready: rng.random_range(1..40),
        num_experts,
        num_local_experts: rng.random_range(1..=num_experts),
        num_layers: rng.random_range(0..70),
        num_clients: rng.random_range(1..33),
        gather_ns: 0,
        gather: if rng.random() { DevicePtr::NULL } else { pointer(rng) },
        clients: pointer(rng),
    }
}

fn good_send(rng: &mut StdRng) -> ExpertSendParams {
    let recv = good_recv(rng);
    ExpertSendParams {
        version: DEVICE_ABI_VERSION,
        flags: 0,
        geometry: recv.geometry,
        lists: recv.lists,
        expert_out: if rng.random() { DevicePtr::NULL } else { pointer(rng) },
        max_rows: rng.random_range(1..=recv.lists.max_rows),
        num_clients: recv.num_clients,
        num_blocks: blocks(rng),
        reserved: 0,
        clients: recv.clients,
    }
}

fn good_compute(rng: &mut StdRng) -> ExpertComputeParams {
    let recv = good_recv(rng);
    ExpertComputeParams {
        version: DEVICE_ABI_VERSION,
        flags: 0,
        geometry: recv.geometry,
        lists: recv.lists,
        rows: pointer(rng),
        activation: pointer(rng),
        expert_out: pointer(rng),
        layers: DevicePtr(rng.random_range(1..1 << 40) * 64),
        inter: rng.random_range(1..40) * 64,
        num_local_experts: recv.num_local_experts,
        num_layers: rng.random_range(1..70),
        num_clients: recv.num_clients,
        num_blocks: blocks(rng),
        weights_dtype: rng.random_range(3..5),
        timeout_ns: rng.random_range(1..1 << 31),
        trapped: DevicePtr::NULL,
        clients: recv.clients,
        tile_arrivals: if rng.random() { DevicePtr::NULL } else { pointer(rng) },
    }
}

fn good_echo(rng: &mut StdRng) -> EchoParams {
    let geometry = good_geometry(rng);
    EchoParams {
        version: DEVICE_ABI_VERSION,
        flags: 0,
        geometry,
        state: pointer(rng),
        abort_mask: DevicePtr::NULL,
        timeout_ns: rng.random_range(1..1 << 31),
        capacity: rng.random_range(1..=geometry.max_tokens),
        num_clients: rng.random_range(1..33),
        num_blocks: blocks(rng),
        reserved: 0,
        clients: pointer(rng),
    }
}
