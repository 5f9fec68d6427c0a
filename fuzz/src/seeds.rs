//! Writes the seed corpus, made from valid frames, into the folder `SWITCHYARD_FUZZ_SEEDS`.
//!
//! Shaped like a fuzz target, because instrumented code links only with libFuzzer's run time. It
//! ends before the first input.

#![no_main]

use std::path::Path;
use std::{env, fs, io};

use protocol::{
    ClientHello, CombineMeta, DispatchMeta, Entry, ErrorCode, ModelShape, ServerHello, ServerTimes,
    TokenRef, WireDtype, encode_combine, encode_dispatch, encode_error,
};
use switchyard_fuzz::{Guarded, HIDDEN, MAX_INPUT, RESPONSE_TOKENS, id};

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
    for target in ["dispatch_frame", "response_frame", "hello"] {
        fs::create_dir_all(corpus.join(target))?;
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
    fs::write(corpus.join("hello").join("server"), server.encode())
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
    let mut memory = Guarded::new(MAX_INPUT);
    let capacity = memory.capacity();
    let used = encode(&mut memory.write(capacity)).expect("seeds fit");
    let mut frame = vec![0; used];
    memory.read(capacity).copy_to(0, &mut frame).expect("used bytes lie in the memory");
    frame
}
