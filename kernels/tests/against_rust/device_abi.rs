//! `device_abi.h` compiled by the C and C++ compilers of this machine says the same as `abi.rs`.

use std::collections::BTreeMap;
use std::path::Path;

use switchyard_kernels::abi::{
    self, Batch, ClientPeer, ClientState, CombineParams, DispatchParams, EchoParams, ErrorWord,
    ExpertComputeParams, ExpertLists, ExpertRecvParams, ExpertSendParams, FrameGeometry, Gather,
    Handle, LayerWeights, Link, MaskCache, Placement, ReplicaSet, ServerPeer, ServerState,
};
use switchyard_kernels::gpu::LayerShape;
use switchyard_kernels::starts::{BUCKETS, LayerSize};
use test_support::c_fields;
use test_support::c_header::check_c_header;

#[test]
fn header_and_rust_agree_field_by_field() {
    let fields = c_fields! {
        ErrorWord as "sy_error_word": tag, peer, reason, reserved, observed, expected;
        FrameGeometry as "sy_frame_geometry": hidden, top_k, dtype, num_frames, max_tokens,
            row_stride_bytes, scales_per_row, response_stride_bytes, flags_offset, entries_offset,
            scales_offset, payload_offset, frame_bytes, slot_bytes, control_offset,
            response_flags_offset, response_payload_offset, response_frame_bytes,
            response_slot_bytes, response_control_offset;
        Link as "sy_link": window, context, path, reserved;
        ReplicaSet as "sy_replica_set": num_replicas, server;
        Placement as "sy_placement": epoch, num_experts, reserved, experts;
        ServerPeer as "sy_server_peer": request, response, generation, reserved;
        ClientPeer as "sy_client_peer": request, response, client_id, generation, reserved;
        ClientState as "sy_client_state": sequence, arrivals, reserved, posted, awaited, lost, summed, mask_cache, error;
        MaskCache as "sy_mask_cache": read_at, reserved, mask;
        Handle as "sy_handle": sequence, num_tokens, contacted, missing, refused, frame_number,
            num_rows;
        ServerState as "sy_server_state": arrivals, last_clients, taken, num_refused, num_batches,
            next_client, reserved2, error, refusals;
        Batch as "sy_batch": num_rows, num_entries, layer, clients, frame_number, row_begin,
            expected, waited_ns, received_ns;
        Gather as "sy_gather": clients, within_ns;
        DispatchParams as "sy_dispatch_params": version, flags, geometry, hidden_states, topk_idx,
            topk_weights, num_tokens, placement, state, handle, trace, client_id, trace_len,
            capacity, layer, num_experts, num_servers, num_blocks, servers;
        CombineParams as "sy_combine_params": version, flags, geometry, handle, state, out,
            token_missing, abort_mask, timeout_ns, capacity, num_servers, num_blocks, trace_len,
            servers, trace;
        ExpertLists as "sy_expert_lists": batch, expert_begin, list_row, list_weight, row_source,
            row_position, max_rows, usual_rows, stamps;
        ExpertRecvParams as "sy_expert_recv_params": version, flags, geometry, state, lists,
            local_expert, abort_mask, min_epoch, timeout_ns, min_ready, num_experts,
            num_local_experts, num_layers, num_clients, gather_ns, gather, clients;
        ExpertSendParams as "sy_expert_send_params": version, flags, geometry, lists, expert_out,
            max_rows, num_clients, num_blocks, reserved, clients;
        LayerWeights as "sy_layer_weights": gate_up, down, gate_up_scale, down_scale, dtype, reserved,
            gate_up_map, down_map;
        ExpertComputeParams as "sy_expert_compute_params": version, flags, geometry, lists, rows,
            activation, expert_out, layers, inter, num_local_experts, num_layers, num_clients,
            num_blocks, weights_dtype, timeout_ns, trapped, clients, tile_arrivals;
        EchoParams as "sy_echo_params": version, flags, geometry, state, abort_mask, timeout_ns,
            capacity, num_clients, num_blocks, reserved, clients;
    };
    let mut values = maps();
    values.extend(constants().into_iter().map(|(name, value)| (name.to_owned(), value)));
    let include = Path::new(switchyard_kernels::INCLUDE_DIR);
    check_c_header(include, "switchyard/layout/geometry.h", fields, values);
}

#[test]
fn the_table_of_starts_is_the_same_in_c() {
    let tokens = [
        1, 2, 4, 8, 16, 23, 24, 32, 47, 48, 64, 95, 96, 128, 129, 160, 223, 224, 256, 257, 384,
        512, 1023, 1024, 2048, 2049, 4096,
    ];
    let mut values = Vec::new();
    for (num_clients, num_servers) in [(1, 1), (2, 2), (1, 3), (3, 1), (4, 4), (2, 3)] {
        for num_tokens in tokens {
            for (is_colocated, makes_lists) in
                [(false, false), (false, true), (true, false), (true, true)]
            {
                let size =
                    LayerSize { num_tokens, num_clients, num_servers, is_colocated, makes_lists };
                let starts = size.starts();
                let (beside, lists) = (u8::from(is_colocated), u8::from(makes_lists));
                let call = format!(
                    "sy_starts_for(sy_make_layer_size({num_tokens}, {num_clients}, {num_servers}, {beside}, {lists}))"
                );
                values.push((format!("{call}.start"), starts.start.into()));
                values.push((format!("{call}.dispatch_blocks"), starts.dispatch_blocks.into()));
                values.push((format!("{call}.answer_blocks"), starts.answer_blocks.into()));
                values.push((format!("{call}.combine_blocks"), starts.combine_blocks.into()));
                values.push((format!("sy_flags_of_start({call}.start)"), starts.flags().into()));
            }
        }
    }
    values.extend(
        BUCKETS.iter().enumerate().map(|(i, rows)| (format!("sy_buckets[{i}]"), (*rows).into())),
    );
    values.push(("SY_NUM_BUCKETS".to_owned(), BUCKETS.len() as u64));
    let include = Path::new(switchyard_kernels::INCLUDE_DIR);
    check_c_header(include, "switchyard/starts.h", BTreeMap::new(), values);
}

/// Each number of the descriptors of a layer's matrices for the copy engine.
fn maps() -> Vec<(String, u64)> {
    let mut all = Vec::new();
    for (dtype, name) in
        [(abi::DTYPE_BF16, "SY_DTYPE_BF16"), (abi::DTYPE_F8_E4M3, "SY_DTYPE_F8_E4M3")]
    {
        let shape = LayerShape { hidden: 384, inter: 192, num_local_experts: 5, dtype };
        for (map, call) in
            [(shape.gate_up_map(), "sy_gate_up_map"), (shape.down_map(), "sy_down_map")]
        {
            let call = format!("{call}(384, 192, 5, {name})");
            all.push((format!("{call}.rank"), map.rank.into()));
            for i in 0..5 {
                all.push((format!("{call}.extent[{i}]"), map.extent[i].into()));
                all.push((format!("{call}.dims[{i}]"), map.dims[i]));
            }
            for (i, stride) in map.strides.into_iter().enumerate() {
                all.push((format!("{call}.strides[{i}]"), stride));
            }
        }
    }
    all
}

/// Every constant of the header that Rust has, too.
fn constants() -> Vec<(&'static str, u64)> {
    vec![
        ("SY_DEVICE_ABI_VERSION", abi::DEVICE_ABI_VERSION.into()),
        ("SY_DEVICE_FRAME_MAGIC", abi::DEVICE_FRAME_MAGIC.into()),
        ("SY_MAX_PEERS", abi::MAX_PEERS as u64),
        ("SY_MAX_FRAMES", abi::MAX_FRAMES.into()),
        ("SY_MAX_EXPERTS", abi::MAX_EXPERTS as u64),
        ("SY_MAX_DEVICE_TOP_K", abi::MAX_TOP_K.into()),
        ("SY_MAX_REPLICAS", abi::MAX_REPLICAS as u64),
        ("SY_MAX_FRAME_TOKENS", abi::MAX_FRAME_TOKENS.into()),
        ("SY_MAX_HIDDEN", abi::MAX_HIDDEN.into()),
        ("SY_SCALE_BLOCK", abi::SCALE_BLOCK.into()),
        ("SY_NO_EXPERT", abi::NO_EXPERT.into()),
        ("SY_NO_ROUTE", abi::NO_ROUTE.into()),
        ("SY_ANSWER_HOLE", abi::ANSWER_HOLE.into()),
        ("SY_ROUTE_SHIFT", abi::ROUTE_SHIFT.into()),
        ("SY_RANK_BITS", abi::RANK_BITS.into()),
        ("SY_COMPUTE_THREADS", abi::COMPUTE_THREADS.into()),
        ("SY_PRODUCT_THREADS", abi::PRODUCT_THREADS.into()),
        ("SY_PRODUCT_SHARED_BYTES", abi::PRODUCT_SHARED_BYTES.into()),
        ("SY_TILE_ARRIVALS", abi::TILE_ARRIVALS.into()),
        ("SY_RECV_BLOCKS", abi::RECV_BLOCKS.into()),
        ("SY_RECV_THREADS", abi::RECV_THREADS.into()),
        ("SY_DTYPE_BF16", abi::DTYPE_BF16.into()),
        ("SY_DTYPE_F8_E4M3", abi::DTYPE_F8_E4M3.into()),
        ("SY_PATH_DIRECT", abi::PATH_DIRECT.into()),
        ("SY_PATH_IBGDA", abi::PATH_IBGDA.into()),
        ("SY_PATH_PROXY", abi::PATH_PROXY.into()),
        ("SY_LAUNCH_FLAG_ANY_PATH", abi::FLAG_ANY_PATH.into()),
        ("SY_LAUNCH_FLAG_PDL", abi::FLAG_PDL.into()),
        ("SY_LAUNCH_FLAG_EARLY", abi::FLAG_EARLY.into()),
        ("SY_LAUNCH_FLAG_AHEAD", abi::FLAG_AHEAD.into()),
        ("SY_RECV_FLAG_CHOSEN", abi::FLAG_CHOSEN.into()),
        ("SY_DISPATCH_FLAG_CONTACT_ALL", abi::FLAG_CONTACT_ALL.into()),
        ("SY_CONTROL_BYTES", abi::CONTROL_BYTES),
        ("SY_GATHER_NONE", abi::GATHER_NONE.into()),
        ("SY_CALL_STAMPS", abi::CALL_STAMPS as u64),
        ("SY_CALL_COMBINE_END", abi::CallStamp::CombineEnd as u64),
        ("SY_STAMPS_OFFSET", abi::STAMPS_OFFSET),
        ("SY_BATCH_STAMPS", abi::BATCH_STAMPS as u64),
        ("SY_BATCH_SEND_END", abi::BatchStamp::SendEnd as u64),
        ("SY_TAG_NONE", abi::TAG_NONE.into()),
        ("SY_TAG_PRODUCT", abi::TAG_PRODUCT.into()),
        ("sizeof(sy_frame_header)", switchyard_kernels::geometry::HEADER_BYTES),
        ("sizeof(sy_entry)", switchyard_kernels::geometry::ENTRY_BYTES),
    ]
}
