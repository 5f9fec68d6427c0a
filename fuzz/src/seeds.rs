//! Writes the seed corpus, made from valid frames, into the folder `SWITCHYARD_FUZZ_SEEDS`.
//!
//! Shaped like a fuzz target, because instrumented code links only with libFuzzer's run time. It
//! ends before the first input.

#![no_main]

use std::path::Path;
use std::{env, fs, io};

use ibgda_network::detail::Detail;
use libfabric_transport::fuzzing as libfabric;
use message_engine::fabric;
use p2p_core::TransportKind;
use p2p_core::bootstrap::wire::{
    DeviceDescription, Hello, Welcome, encode_go, encode_goodbye, encode_hello, encode_ready,
    encode_reject, encode_ticket, encode_welcome,
};
use p2p_core::bootstrap::{PeerHello, Reject, RejectCode, ShownTicket};
use p2p_core::host::HostIdentity;
use p2p_core::network::{Offer, SideDescription};
use protocol::{
    ClientHello, CombineMeta, DispatchMeta, Entry, ErrorCode, ModelShape, ServerHello, ServerTimes,
    TokenRef, WireDtype, encode_combine, encode_dispatch, encode_error,
};
use switchyard_fuzz::codec::{NUM_DTYPES, compressed};
use switchyard_fuzz::{GuardedMemory, HIDDEN, MAX_INPUT, RESPONSE_TOKENS, id};
use verbs_transport::fuzzing as verbs;

libfuzzer_sys::fuzz_target!(init: write_and_exit(), |_input: &[u8]| {});

fn write_and_exit() {
    let code = match write_seeds() {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("seeds: {error}");
            1
        }
    };
    std::process::exit(code)
}

fn write_seeds() -> io::Result<()> {
    let Some(corpus) = env::var_os("SWITCHYARD_FUZZ_SEEDS") else {
        return Err(io::Error::other("SWITCHYARD_FUZZ_SEEDS must name a folder"));
    };
    let corpus = Path::new(&corpus);
    for target in [
        "dispatch_frame",
        "response_frame",
        "hello",
        "handshake",
        "detail",
        "transport",
        "checkpoint",
        "floats",
    ] {
        fs::create_dir_all(corpus.join(target))?;
    }
    for (name, seed) in checkpoints() {
        fs::write(corpus.join("checkpoint").join(name), seed)?;
    }
    for (name, seed) in arrays() {
        fs::write(corpus.join("floats").join(name), seed)?;
    }
    let x: Vec<f32> = (0..HIDDEN * RESPONSE_TOKENS).map(|i| (i as f32).sin()).collect();
    for dtype in WireDtype::ALL {
        for payload_checksum in [false, true] {
            let name = format!("{dtype}-{payload_checksum}");
            let frame = dispatch(dtype, payload_checksum, &x);
            fs::write(corpus.join("dispatch_frame").join(&name), frame)?;
            let times = ServerTimes { queue_ns: 10, compute_ns: 20 };
            let meta = CombineMeta { id: id(), hidden: HIDDEN, dtype, payload_checksum, times };
            let frame = written(|view| encode_combine(view, &meta, &x));
            fs::write(corpus.join("response_frame").join(&name), frame)?;
        }
    }
    let frame =
        written(|view| encode_error(view, &id(), ErrorCode::NotMyExpert, [1, 2], "not mine"));
    fs::write(corpus.join("response_frame").join("error"), frame)?;

    let model = ModelShape {
        fingerprint: [7; 32],
        hidden: 2048,
        num_layers: 48,
        num_experts: 128,
        top_k: 8,
    };
    let client = ClientHello {
        model,
        client_id: 5,
        dtype: WireDtype::Bf16,
        response_dtype: WireDtype::F32,
        name: "client".into(),
    };
    fs::write(corpus.join("hello").join("client"), client.encode())?;
    let server = ServerHello {
        model,
        incarnation: 6,
        epoch: 7,
        generation: 8,
        progress_interval_us: 2000,
        name: "server".into(),
    };
    fs::write(corpus.join("hello").join("server"), server.encode())?;
    for (target, messages) in
        [("handshake", handshakes()), ("detail", details()), ("transport", transports())]
    {
        for (idx, message) in messages.into_iter().enumerate() {
            fs::write(corpus.join(target).join(idx.to_string()), message)?;
        }
    }
    Ok(())
}

/// The description of each network in a handshake.
fn details() -> Vec<Vec<u8>> {
    let hosts = [libfabric::detail_samples(), verbs::detail_samples()].concat();
    let queues = ibgda::peer::description_samples();
    // The queues of kernels and that of the host, on the same link.
    let above = hosts.iter().flat_map(|inner| {
        queues.chunks_exact(2).flat_map(move |queues| {
            let [host, all] = queues else { unreachable!("one queue and all") };
            [host, all].map(|peer| Detail { inner, peer, host }.encode())
        })
    });
    // All queues leave no room beside some networks.
    let above: Vec<_> = above.filter_map(Result::ok).collect();
    [above, hosts, queues, fabric::fuzzing::detail_samples()].concat()
}

/// Messages of peers after the join, behind the byte with their kind.
fn transports() -> Vec<Vec<u8>> {
    let messages = libfabric::message_samples();
    // Number, sum, number again, length, message.
    let mails = messages.iter().map(|message| {
        let len = (message.len() as u16).to_le_bytes();
        [[0; 22].as_slice(), &len, message].concat()
    });
    // Writes, messages and mails in and out of order; a key, and the region that it opens.
    let order = [[0, 0, 0, 0], [2, 5, 129, 1], [1, 4, 128, 1], [0, 0, 0, 0], [3, 3, 255, 9]];
    let entry = |address: u64| [1, 1, address, 64, 2].map(u64::to_le_bytes).as_flattened().to_vec();
    let all = [
        messages.clone(),
        mails.collect(),
        vec![[&[8], order.as_flattened()].concat()],
        fabric::fuzzing::tcp_samples(),
        vec![entry(4096), entry(u64::MAX - 8)],
    ];
    let tagged = all.into_iter().zip(0u8..).flat_map(|(samples, kind)| {
        samples.into_iter().map(move |sample| [&[kind], sample.as_slice()].concat())
    });
    tagged.collect()
}

/// One message of each kind, of the slots' handshake and of the engine's.
fn handshakes() -> Vec<Vec<u8>> {
    let offer = Offer { kind: TransportKind::Libfabric, flavour: "tcp;ofi_rxm".to_owned() };
    let side =
        SideDescription { bytes: 1 << 20, address: 4096, remote_key: 7, detail: vec![9; 40] };
    let device = DeviceDescription { own_bytes: 1 << 16, peer_bytes: 1 << 17, shape: vec![3; 24] };
    let hello = Hello {
        slot_bytes: 1 << 20,
        num_frames: 2,
        host: HostIdentity { boot_id: [1; 16], net_namespace: [2, 3], process: [4, 5] },
        offers: vec![offer.clone(), offer.clone()],
        secret: b"secret".to_vec(),
        peer: PeerHello { peer_id: 6, generation: 7, payload: vec![8; 30] },
        left_out: "verbs:roce2: no way".to_owned(),
        device: Some(device),
    };
    let welcome = Welcome {
        offer,
        side: side.clone(),
        nonce: [1; 16],
        rendezvous: [2; 16],
        payload: vec![3; 20],
    };
    let mut all = message_engine::engine::fuzzing::handshake_samples();
    all.extend([
        encode_hello(&hello),
        encode_ticket(&ShownTicket { ticket: "v4.public.AA".into(), proof: "v4.BB".into() }),
        encode_welcome(&welcome),
        encode_ready(&side),
        encode_reject(&Reject::new(RejectCode(3), "no")),
        encode_go(),
        encode_goodbye(),
    ]);
    all
}

fn dispatch(dtype: WireDtype, payload_checksum: bool, x: &[f32]) -> Vec<u8> {
    let meta = DispatchMeta {
        id: id(),
        hidden: HIDDEN,
        dtype,
        response_dtype: WireDtype::Bf16,
        payload_checksum,
    };
    let tokens: Vec<TokenRef> = (0..RESPONSE_TOKENS as u32)
        .map(|token| TokenRef { token, entry_begin: token * 2, entry_count: 2 })
        .collect();
    let entries: Vec<Entry> = (0..2 * RESPONSE_TOKENS as u32)
        .map(|i| Entry { expert: i * 3 % 16, weight: 0.25 })
        .collect();
    written(|view| encode_dispatch(view, &meta, x, &tokens, &entries))
}

fn written(
    encode: impl FnOnce(&mut p2p_core::WriteView<'_>) -> Result<usize, protocol::EncodeError>,
) -> Vec<u8> {
    let mut memory = GuardedMemory::new(MAX_INPUT);
    let capacity = memory.capacity();
    let used = encode(&mut memory.write(capacity)).expect("seeds fit");
    let mut frame = vec![0; used];
    memory.read(capacity).copy_to(0, &mut frame).expect("used bytes lie in the memory");
    frame
}

/// Checkpoints of one layer with two experts (hidden 64, width 32) in several layouts and formats.
fn checkpoints() -> Vec<(&'static str, Vec<u8>)> {
    let config = |model_type: &str, more: &str| {
        format!(
            "{{\"model_type\":\"{model_type}\",\"hidden_size\":64,\"moe_intermediate_size\":32,\
             \"intermediate_size\":32,\"num_hidden_layers\":1,\"num_experts\":2,\
             \"num_experts_per_tok\":1,\"first_k_dense_replace\":0{more}}}"
        )
    };
    let experts = |parts: &[(&str, &'static str, [&'static str; 2], usize)]| {
        let mut tensors: Vec<(String, &'static str, &'static str, usize)> = Vec::new();
        for expert in 0..2 {
            for (matrix, is_down) in [("gate_proj", false), ("up_proj", false), ("down_proj", true)]
            {
                for (suffix, dtype, shapes, bytes) in parts {
                    let name = format!("model.layers.0.mlp.experts.{expert}.{matrix}.{suffix}");
                    tensors.push((name, *dtype, shapes[usize::from(is_down)], *bytes));
                }
            }
        }
        tensors
    };
    let fused = |name: &str, dtype: &'static str, shape: &'static str, bytes: usize| {
        (format!("model.layers.0.mlp.experts.{name}"), dtype, shape, bytes)
    };
    let quantised =
        |method: &str| format!(",\"quantization_config\":{{\"quant_method\":\"{method}\"}}");
    let plain = experts(&[("weight", "BF16", ["[32,64]", "[64,32]"], 4096)]);
    let fp8 = experts(&[
        ("weight", "F8_E4M3", ["[32,64]", "[64,32]"], 2048),
        ("weight_scale_inv", "F32", ["[1,1]", "[1,1]"], 4),
    ]);
    let awq = experts(&[
        ("qweight", "I32", ["[64,4]", "[32,8]"], 1024),
        ("qzeros", "I32", ["[1,4]", "[1,8]"], 0),
        ("scales", "F16", ["[1,32]", "[1,64]"], 0),
    ]);
    let packed = experts(&[
        ("weight_packed", "I32", ["[32,8]", "[64,4]"], 1024),
        ("weight_scale", "BF16", ["[32,2]", "[64,1]"], 128),
    ]);
    let mxfp4 = vec![
        fused("gate_up_proj_blocks", "U8", "[2,64,2,16]", 4096),
        fused("gate_up_proj_scales", "U8", "[2,64,2]", 256),
        fused("down_proj_blocks", "U8", "[2,64,1,16]", 2048),
        fused("down_proj_scales", "U8", "[2,64,1]", 128),
        fused("gate_up_proj_bias", "F32", "[2,64]", 512),
        fused("down_proj_bias", "F32", "[2,64]", 512),
    ];
    vec![
        ("plain", folder(&config("qwen3_moe", ""), &plain)),
        ("fp8", folder(&config("deepseek_v3", &quantised("fp8")), &fp8)),
        ("awq", folder(&config("qwen3_moe", &quantised("awq")), &awq)),
        ("packed", folder(&config("qwen3_moe", &quantised("compressed-tensors")), &packed)),
        ("mxfp4", folder(&config("gpt_oss", &quantised("mxfp4")), &mxfp4)),
        ("gguf", b"GGUF\x03\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0".to_vec()),
    ]
}

/// A configuration and a weight file of zeros as the target `checkpoint` takes them. A length of 0 is computed for
/// AWQ's small tensors.
fn folder(config: &str, tensors: &[(String, &'static str, &'static str, usize)]) -> Vec<u8> {
    let mut entries = Vec::new();
    let mut start = 0;
    for (name, dtype, shape, bytes) in tensors {
        let elements: usize = shape
            .trim_matches(['[', ']'])
            .split(',')
            .filter_map(|dim| dim.parse::<usize>().ok())
            .product();
        let size = match *dtype {
            "I32" | "F32" => 4,
            "F16" | "BF16" => 2,
            _ => 1,
        };
        let end = start + if *bytes == 0 { elements * size } else { *bytes };
        entries.push(format!(
            "\"{name}\":{{\"dtype\":\"{dtype}\",\"shape\":{shape},\"data_offsets\":[{start},{end}]}}"
        ));
        start = end;
    }
    let header = format!("{{{}}}", entries.join(","));
    let mut out = config.as_bytes().to_vec();
    out.extend([0xff, 0xff]);
    out.extend((header.len() as u64).to_le_bytes());
    out.extend(header.as_bytes());
    out.resize(out.len() + start, 0);
    out
}

/// Arrays and their frames: of few exponents, so that the entropy coder takes them, and of as many as there are.
fn arrays() -> Vec<(String, Vec<u8>)> {
    let mut seeds = Vec::new();
    for dtype in 0..NUM_DTYPES {
        let like_weights = (0..1500u32).flat_map(|i| ((i as f32).sin() * 0.02).to_le_bytes());
        let like_noise = (0..700u32).flat_map(|i| i.wrapping_mul(0x9e37_79b9).to_be_bytes());
        let mut odd: Vec<u8> = (0..301u32).flat_map(|_| 0.25f32.to_le_bytes()).collect();
        odd.truncate(odd.len() - 1);
        for (name, array) in
            [("weights", like_weights.collect()), ("noise", like_noise.collect()), ("odd", odd)]
        {
            let frame = compressed(dtype, &array);
            for (form, mark, bytes) in [("array", 0, array), ("frame", 0x80, frame)] {
                let kind = mark | dtype as u8;
                seeds.push((format!("{name}-{dtype}-{form}"), [vec![kind], bytes].concat()));
            }
        }
    }
    seeds
}
