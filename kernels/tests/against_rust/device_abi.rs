//! `device_abi.h` compiled by the C and C++ compilers of this machine says the same as `abi.rs`.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::mem::offset_of;
use std::process::Command;

use switchyard_kernels::abi::{
    self, Batch, ClientPeer, ClientState, CombineParams, DispatchParams, EchoParams, ErrorWord,
    ExpertComputeParams, ExpertLists, ExpertRecvParams, ExpertSendParams, FrameGeometry, Gather,
    Handle, LayerWeights, Link, MaskCache, Placement, ReplicaSet, ServerPeer, ServerState,
};
use switchyard_kernels::gpu::LayerShape;

/// Bytes of the field that `_` picks.
fn field_bytes<S, F>(_: fn(&S) -> &F) -> usize {
    size_of::<F>()
}

macro_rules! fields {
    ($($rust:ty as $c:literal: $($field:ident),*;)*) => {{
        let mut expected = BTreeMap::new();
        $(
            expected.insert(format!("sizeof {}", $c), size_of::<$rust>() as u64);
            $(
                let field = format!("{}.{}", $c, stringify!($field));
                let bytes = field_bytes(|s: &$rust| &s.$field);
                expected.insert(format!("offset {field}"), offset_of!($rust, $field) as u64);
                expected.insert(format!("bytes {field}"), bytes as u64);
            )*
        )*
        expected
    }};
}

#[test]
fn header_and_rust_agree_field_by_field() {
    let mut expected = fields! {
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
            expected, waited_ns;
        Gather as "sy_gather": clients, within_ns;
        DispatchParams as "sy_dispatch_params": version, flags, geometry, hidden_states, topk_idx,
            topk_weights, num_tokens, placement, state, handle, trace, client_id, trace_len,
            capacity, layer, num_experts, num_servers, num_blocks, servers;
        CombineParams as "sy_combine_params": version, flags, geometry, handle, state, out,
            token_missing, abort_mask, timeout_ns, capacity, num_servers, num_blocks, reserved,
            servers;
        ExpertLists as "sy_expert_lists": batch, expert_begin, list_row, list_weight, row_source,
            row_position, max_rows, reserved;
        ExpertRecvParams as "sy_expert_recv_params": version, flags, geometry, state, lists,
            local_expert, abort_mask, min_epoch, timeout_ns, min_ready, num_experts,
            num_local_experts, num_layers, num_clients, gather_ns, gather, clients;
        ExpertSendParams as "sy_expert_send_params": version, flags, geometry, lists, expert_out,
            max_rows, num_clients, num_blocks, reserved, clients;
        LayerWeights as "sy_layer_weights": gate_up, down, gate_up_scale, down_scale, dtype, reserved,
            gate_up_map, down_map;
        ExpertComputeParams as "sy_expert_compute_params": version, flags, geometry, lists, rows,
            activation, expert_out, layers, inter, num_local_experts, num_layers, num_clients,
            num_blocks, weights_dtype, timeout_ns, trapped, clients;
        EchoParams as "sy_echo_params": version, flags, geometry, state, abort_mask, timeout_ns,
            capacity, num_clients, num_blocks, reserved, clients;
    };
    let layout: Vec<String> = expected.keys().cloned().collect();
    expected.extend(maps());
    expected.extend(constants().into_iter().map(|(name, value)| (format!("value {name}"), value)));

    let program = program(&layout);
    let compilers = [("cc", "-std=c11", "c", true), ("g++", "-std=c++17", "cpp", false)];
    for (compiler, standard, extension, required) in compilers {
        let Some(found) = compile_and_run(compiler, standard, extension, &program) else {
            assert!(!required, "no {compiler}, which building this project needs");
            test_support::skip(
                "cxx",
                &format!("device_abi.h as {standard}: there is no {compiler}"),
            );
            continue;
        };
        assert_eq!(found, expected, "{compiler} {standard}");
    }
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
            let call = format!("value {call}(384, 192, 5, {name})");
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
        ("SY_DISPATCH_FLAG_CONTACT_ALL", abi::FLAG_CONTACT_ALL.into()),
        ("SY_CONTROL_BYTES", abi::CONTROL_BYTES),
        ("SY_TAG_NONE", abi::TAG_NONE.into()),
        ("SY_TAG_PRODUCT", abi::TAG_PRODUCT.into()),
        ("sizeof(sy_frame_header)", switchyard_kernels::geometry::HEADER_BYTES),
        ("sizeof(sy_entry)", switchyard_kernels::geometry::ENTRY_BYTES),
    ]
}

fn program(layout: &[String]) -> String {
    let mut body = String::new();
    for key in layout {
        let (what, name) = key.split_once(' ').expect("keys have two words");
        let value = match (what, name.split_once('.')) {
            ("sizeof", _) => format!("sizeof({name})"),
            ("offset", Some((ty, field))) => format!("offsetof({ty}, {field})"),
            ("bytes", Some((ty, field))) => format!("sizeof((({ty} *)0)->{field})"),
            _ => unreachable!("no other keys are made"),
        };
        writeln!(body, "    show(\"{key}\", {value});").expect("String");
    }
    for (key, _) in maps() {
        let value = key.strip_prefix("value ").unwrap_or_default();
        writeln!(body, "    show(\"{key}\", {value});").expect("String");
    }
    for (name, _) in constants() {
        writeln!(body, "    show(\"value {name}\", {name});").expect("String");
    }
    format!(
        "#include <stdio.h>\n#include <switchyard/layout/geometry.h>\n\n\
         static void show(const char *name, unsigned long long value) {{\n    \
         printf(\"%s %llu\\n\", name, value);\n}}\n\nint main(void) {{\n{body}    return 0;\n}}\n"
    )
}

/// Output of the program, or `None` without the compiler.
fn compile_and_run(
    compiler: &str,
    standard: &str,
    extension: &str,
    program: &str,
) -> Option<BTreeMap<String, u64>> {
    let folder = tempfile::tempdir().expect("temporary folder");
    let source = folder.path().join(format!("layout.{extension}"));
    let binary = folder.path().join("layout");
    std::fs::write(&source, program).expect("source");
    let compiled = Command::new(compiler)
        .args([
            standard,
            "-Wall",
            "-Wextra",
            "-Wpedantic",
            "-Werror",
            "-I",
            switchyard_kernels::INCLUDE_DIR,
        ])
        .arg("-o")
        .arg(&binary)
        .arg(&source)
        .output();
    let compiled = match compiled {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return None,
        other => other.expect("compiler starts"),
    };
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let output = Command::new(&binary).output().expect("program starts");
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).expect("names and numbers");
    let pairs = text.lines().map(|line| {
        let (name, value) = line.rsplit_once(' ').expect("name and value");
        (name.to_owned(), value.parse().expect("number"))
    });
    Some(pairs.collect())
}
