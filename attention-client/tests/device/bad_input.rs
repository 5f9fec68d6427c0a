//! Unusable input is refused by one clear error, before anything is launched.

use std::time::Duration;

use kernels::abi::DevicePtr;
use kernels::gpu::{DeviceName, Gpu, GpuBuffer, GpuError};
use protocol::WireDtype;
use rand::RngExt;
use switchyard_attention_client::{
    ClientError, DeviceClient, DeviceError, DeviceInput, DeviceTensor, MoeClient, TensorType,
};

use crate::client_common::{Request, seeded};
use crate::rig::{Fleet, SLOT, Tensors, check, forward, options};

#[test]
fn tensors_that_cannot_be_used() {
    let mut rng = seeded("tensors_that_cannot_be_used");
    let dtype = WireDtype::F8E4m3;
    let Some(fleet) = Fleet::start(1, 1, dtype) else { return };
    let mut client = fleet.client();
    let tensors = Tensors::new(&client);
    let stream = client.gpu().stream().expect("stream");
    let request = Request::random(&mut rng, &fleet.model, 5, 4);
    let good = tensors.load(&request);
    let unknown = vec![0u128; 64];
    let far = DevicePtr(unknown.as_ptr() as u64);
    let at = |ptr: DevicePtr, tensor: DeviceTensor| DeviceTensor { ptr, ..tensor };
    let odd = at(good.topk_weights.ptr.add(4), good.topk_weights);
    let null = |tensor| at(DevicePtr::NULL, tensor);
    let half = at(good.num_tokens.ptr.add(2), good.num_tokens);
    let cases: [(DeviceInput, &str); 10] = [
        (DeviceInput { hidden_states: null(good.hidden_states), ..good }, "hidden_states is null"),
        (DeviceInput { topk_idx: null(good.topk_idx), ..good }, "topk_idx is null"),
        (DeviceInput { topk_weights: null(good.topk_weights), ..good }, "topk_weights is null"),
        (DeviceInput { num_tokens: null(good.num_tokens), ..good }, "num_tokens is null"),
        (DeviceInput { num_tokens: half, ..good }, "expected a multiple of 4 bytes"),
        (DeviceInput { topk_idx: at(far, good.topk_idx), ..good }, "topk_idx"),
        (DeviceInput { topk_weights: odd, ..good }, "topk_weights begins at"),
        (DeviceInput { num_tokens: at(far, good.num_tokens), ..good }, "num_tokens"),
        (DeviceInput { capacity: 0, ..good }, "capacity"),
        (DeviceInput { capacity: client.max_tokens() + 1, ..good }, "slot_bytes"),
    ];
    for (input, words) in cases {
        // SAFETY: refused before anything is launched.
        let error = unsafe { client.dispatch(&stream, request.layer, &input) }.unwrap_err();
        let text = error.to_string();
        assert!(text.contains(words) && !text.contains('\n'), "{text}");
    }
    if let DeviceName::Emulated(own) = client.gpu().name() {
        // Of a GPU whose memory kernels of this one do not reach, and shorter than it should be.
        let other = Gpu::open_emulated(own + 1).expect("a GPU").alloc(1 << 20).expect("memory");
        let short = client.gpu().alloc(64).expect("memory");
        let states = |memory: &GpuBuffer| at(memory.ptr(), good.hidden_states);
        let weights = at(other.ptr(), good.topk_weights);
        for (input, words) in [
            (DeviceInput { hidden_states: states(&other), ..good }, "hidden_states is"),
            (DeviceInput { topk_weights: weights, ..good }, "topk_weights is"),
            (DeviceInput { hidden_states: states(&short), ..good }, "hidden_states at"),
        ] {
            // SAFETY: as above.
            let error = unsafe { client.dispatch(&stream, request.layer, &input) }.unwrap_err();
            let text = error.to_string();
            assert!(text.contains(words) && !text.contains('\n'), "{text}");
            assert_eq!(
                text.contains("which is memory of GPU"),
                input.hidden_states.ptr != short.ptr(),
                "{text}"
            );
        }
    }
    // SAFETY: as above.
    let error = unsafe { client.dispatch(&stream, 4711, &good) }.unwrap_err();
    assert!(matches!(error, DeviceError::Client(ClientError::UnknownLayer { .. })), "{error}");
    // SAFETY: the tensors are right; only the output is not.
    let error = unsafe {
        let handle = client.dispatch(&stream, request.layer, &good).expect("dispatch");
        client.combine(&stream, handle, at(far, tensors.out())).unwrap_err()
    };
    let is_unregistered = |e: &DeviceError| {
        matches!(e, DeviceError::Gpu(GpuError::Unregistered { pointer: "out", .. }))
    };
    assert!(is_unregistered(&error), "{error}");
    for (out, words) in [
        (null(tensors.out()), "out is null"),
        (at(tensors.out().ptr.add(8), tensors.out()), "out begins at"),
    ] {
        // SAFETY: as above.
        let error = unsafe { client.forward(&stream, request.layer, &good, out) }.unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
    }
    // Errors that only the kernels can see.
    let mut local = fleet.local();
    tensors.write(&tensors.num_tokens, &[client.max_tokens() + 7]);
    // SAFETY: the tensors have these sizes.
    let error = unsafe { client.forward(&stream, request.layer, &good, tensors.out()) };
    let error = error.unwrap_err();
    assert!(matches!(error, DeviceError::Tokens { .. }), "{error}");
    for bad in [-2, 16, i32::MAX, i32::MIN] {
        let mut request = request.clone();
        let at = rng.random_range(0..request.idx.len());
        request.idx[at] = bad;
        let input = tensors.load(&request);
        // SAFETY: as above.
        let error = unsafe { client.forward(&stream, request.layer, &input, tensors.out()) };
        match error.unwrap_err() {
            DeviceError::Client(ClientError::ExpertIndex { token, found, .. }) => {
                assert_eq!((token, found), (at / 4, bad));
            }
            other => panic!("{other}"),
        }
    }
    // None of it harmed the client.
    forward(&mut client, &stream, &tensors, &request, &mut local, dtype);
}

#[test]
fn tensors_that_were_freed_since_the_last_call() {
    let mut rng = seeded("tensors_that_were_freed_since_the_last_call");
    let dtype = WireDtype::Bf16;
    let Some(fleet) = Fleet::start(1, 1, dtype) else { return };
    let mut client = fleet.client();
    if matches!(client.gpu().name(), DeviceName::Cuda(_)) {
        println!("SKIPPED: whether a driver forgets small memory at once is not known");
        return;
    }
    let (tensors, mut local) = (Tensors::new(&client), fleet.local());
    let stream = client.gpu().stream().expect("stream");
    let request = Request::random(&mut rng, &fleet.model, 5, 4);
    let good = tensors.load(&request);
    let other = Tensors::with_capacity(&client, 2 * client.max_tokens() + 3);
    let large = other.load(&request);
    // Twice, so that nothing of it is new; then all that a call has is freed, one after the other.
    let bytes = |tensor: &GpuBuffer| client.gpu().alloc(tensor.len()).expect("memory");
    let mut mine =
        [&tensors.hidden_states, &tensors.topk_idx, &tensors.topk_weights, &tensors.num_tokens]
            .map(|tensor| Some(bytes(tensor)));
    let [states, idx, weights, count] =
        mine.each_ref().map(|tensor| tensor.as_ref().expect("there").ptr());
    let freed = DeviceInput::new(states, idx, weights, count, good.capacity);
    let freed_count =
        DeviceInput { num_tokens: DeviceTensor { ptr: count, ..large.num_tokens }, ..large };
    let out = bytes(&tensors.out);
    let freed_out = DeviceTensor { ptr: out.ptr(), ..tensors.out() };
    for _ in 0..2 {
        // SAFETY: the tensors have these sizes and outlive the calls.
        unsafe {
            client.forward(&stream, request.layer, &freed, freed_out).expect("forward");
            client.forward(&stream, request.layer, &freed_count, other.out()).expect("forward");
        }
    }
    let is_unregistered = |error: &DeviceError, name: &str| matches!(error, DeviceError::Gpu(GpuError::Unregistered { pointer, .. }) if *pointer == name);
    drop(out);
    // SAFETY: refused before anything is launched that needs what is gone.
    let error = unsafe {
        let handle = client.dispatch(&stream, request.layer, &good).expect("dispatch");
        client.combine(&stream, handle, freed_out).unwrap_err()
    };
    assert!(is_unregistered(&error, "out"), "{error}");
    let names = ["hidden_states", "topk_idx", "topk_weights", "num_tokens"];
    for (place, name) in names.into_iter().enumerate().rev() {
        mine[place] = None;
        // SAFETY: as above.
        let error = unsafe { client.dispatch(&stream, request.layer, &freed) }.unwrap_err();
        assert!(is_unregistered(&error, name), "{name}: {error}");
    }
    // SAFETY: as above.
    let error =
        unsafe { client.forward(&stream, request.layer, &freed_count, other.out()) }.unwrap_err();
    assert!(is_unregistered(&error, "num_tokens"), "{error}");
    forward(&mut client, &stream, &tensors, &request, &mut local, dtype);
}

#[test]
fn tensors_of_types_that_kernels_do_not_read() {
    let mut rng = seeded("tensors_of_types_that_kernels_do_not_read");
    let dtype = WireDtype::Bf16;
    let Some(fleet) = Fleet::start(1, 1, dtype) else { return };
    let mut client = fleet.client();
    let (tensors, mut local) = (Tensors::new(&client), fleet.local());
    let stream = client.gpu().stream().expect("stream");
    let request = Request::random(&mut rng, &fleet.model, 5, 4);
    let good = tensors.load(&request);
    let of = |dtype: TensorType, tensor: DeviceTensor| DeviceTensor { dtype, ..tensor };
    let states = |dtype| DeviceInput { hidden_states: of(dtype, good.hidden_states), ..good };
    let idx = |dtype| DeviceInput { topk_idx: of(dtype, good.topk_idx), ..good };
    let weights = |dtype| DeviceInput { topk_weights: of(dtype, good.topk_weights), ..good };
    let count = |dtype| DeviceInput { num_tokens: of(dtype, good.num_tokens), ..good };
    let num_ahead = client.max_tokens() + 1;
    let refused = |error: DeviceError, words: &str| {
        assert!(matches!(error, DeviceError::Dtype { .. }), "{error}");
        let text = error.to_string();
        assert!(text.starts_with(words) && !text.contains('\n'), "{text}");
    };
    // Whatever waits for the GPU would wait here.
    let (holding, hold) = std::sync::mpsc::channel::<()>();
    stream.then(move || _ = hold.recv()).expect("held");
    for (input, words) in [
        (states(TensorType::F16), "hidden_states holds f16, expected bf16"),
        (states(TensorType::F32), "hidden_states holds f32, expected bf16"),
        (idx(TensorType::I64), "topk_idx holds i64, expected i32"),
        (weights(TensorType::Bf16), "topk_weights holds bf16, expected f32"),
        (count(TensorType::I64), "num_tokens holds i64, expected u32"),
    ] {
        let large = DeviceInput { capacity: num_ahead, ..input };
        // SAFETY: refused before anything is launched.
        unsafe {
            refused(client.dispatch(&stream, request.layer, &input).unwrap_err(), words);
            let out = tensors.out();
            refused(client.forward(&stream, request.layer, &large, out).unwrap_err(), words);
        }
    }
    for wrong in [TensorType::F16, TensorType::F32, TensorType::I16] {
        let out = of(wrong, tensors.out());
        let words = format!("out holds {wrong}, expected bf16");
        // SAFETY: as above.
        let error = unsafe { client.forward(&stream, request.layer, &good, out) };
        refused(error.unwrap_err(), &words);
        let recorded = stream.capture(|stream| {
            // SAFETY: the tensors outlive the graph, which is never launched.
            unsafe {
                let handle = client.dispatch(stream, request.layer, &good).expect("dispatch");
                refused(client.combine(stream, handle, out).unwrap_err(), &words);
            }
            Ok(())
        });
        drop(recorded.expect("a graph"));
    }
    drop(holding);
    // SAFETY: the tensors are right; only the output's type is not.
    let error = unsafe {
        let handle = client.dispatch(&stream, request.layer, &good).expect("dispatch");
        client.combine(&stream, handle, of(TensorType::F32, tensors.out())).unwrap_err()
    };
    refused(error, "out holds f32");
    // A count that engines have as i32 is as good, and none of it harmed the client.
    let timing =
        // SAFETY: the tensors have these sizes and outlive the call.
        unsafe { client.forward(&stream, request.layer, &count(TensorType::I32), tensors.out()) };
    timing.expect("forward");
    check(&request, &tensors.read(request.num_tokens), &mut local, dtype);
}

#[test]
fn streams_that_cannot_be_used() {
    let mut rng = seeded("streams_that_cannot_be_used");
    let dtype = WireDtype::Bf16;
    let Some(fleet) = Fleet::start(1, 1, dtype) else { return };
    let mut client = fleet.client();
    let (tensors, mut local) = (Tensors::new(&client), fleet.local());
    let stream = client.gpu().stream().expect("stream");
    let request = Request::random(&mut rng, &fleet.model, 5, 4);
    let input = tensors.load(&request);
    // Of another GPU: nothing is launched there.
    let far = Gpu::open_emulated(9).expect("a GPU").stream().expect("stream");
    let large = DeviceInput { capacity: client.max_tokens() + 1, ..input };
    let is_device = |error: &DeviceError| {
        let text = error.to_string();
        assert!(text.contains("emulated:9") && !text.contains('\n'), "{text}");
        matches!(error, DeviceError::Device { found: DeviceName::Emulated(9), .. })
    };
    // SAFETY: refused before anything is launched, and what is launched is finished.
    unsafe {
        let error = client.dispatch(&far, request.layer, &input).unwrap_err();
        assert!(is_device(&error), "{error}");
        let error = client.forward(&far, request.layer, &large, tensors.out()).unwrap_err();
        assert!(is_device(&error), "{error}");
        let handle = client.dispatch(&stream, request.layer, &input).expect("dispatch");
        let error = client.combine(&far, handle, tensors.out()).unwrap_err();
        assert!(is_device(&error), "{error}");
        let handle = client.dispatch(&stream, request.layer, &input).expect("dispatch");
        let pending = client.combine(&stream, handle, tensors.out()).expect("combine");
        let error = client.finish(&far, pending).unwrap_err();
        assert!(is_device(&error), "{error}");
        assert!(is_device(&client.begin_replay(&far).unwrap_err()));
    }
    assert!(far.is_done().expect("it works"));
    forward(&mut client, &stream, &tensors, &request, &mut local, dtype);
    // Of this GPU, but not the call's: that it is done says nothing. The call is not over yet.
    let (holding, hold) = std::sync::mpsc::channel::<()>();
    let other = client.gpu().stream().expect("stream");
    let wanted = (other.raw(), stream.raw());
    let is_stream = |error: &DeviceError| matches!(error, DeviceError::Stream { found, expected } if (*found, *expected) == wanted);
    stream.then(move || _ = hold.recv()).expect("held");
    // SAFETY: as above.
    let error = unsafe {
        let handle = client.dispatch(&stream, request.layer, &input).expect("dispatch");
        let pending = client.combine(&stream, handle, tensors.out()).expect("combine");
        client.finish(&other, pending).unwrap_err()
    };
    assert!(is_stream(&error), "{error}");
    let error = client.begin_replay(&other).unwrap_err();
    assert!(is_stream(&error), "{error}");
    drop(holding);
    forward(&mut client, &stream, &tensors, &request, &mut local, dtype);
    // A graph's, too.
    client.begin_replay(&stream).expect("begun");
    let error = client.finish_replay(&other).unwrap_err();
    assert!(is_stream(&error), "{error}");
    // SAFETY: refused before anything is launched.
    let error = unsafe { client.dispatch(&stream, request.layer, &input) }.unwrap_err();
    assert!(matches!(error, DeviceError::Replaying), "{error}");
    assert!(matches!(client.begin_replay(&stream), Err(DeviceError::Replaying)));
    client.finish_replay(&stream).expect("finished");
    forward(&mut client, &stream, &tensors, &request, &mut local, dtype);
}

#[test]
fn settings_that_cannot_be_used() {
    let Some(fleet) = Fleet::start(1, 1, WireDtype::Bf16) else { return };
    let build = |tweak: &dyn Fn(&mut switchyard_attention_client::DeviceOptions)| {
        let mut options = options(WireDtype::Bf16);
        tweak(&mut options);
        let built = fleet.builder().build(fleet.gpu(), options);
        built.map(|_| ()).unwrap_err().to_string()
    };
    let text = build(&|options| options.dtype = WireDtype::F32);
    assert!(text.contains("f32") && text.contains("dtype"), "{text}");
    let text = build(&|options| options.max_servers = 33);
    assert!(text.contains("max_servers 33"), "{text}");
    let mut odd = fleet.model.clone();
    odd.shape.hidden = 200;
    let built = DeviceClient::builder(odd)
        .placement(fleet.table(1))
        .build(fleet.gpu(), options(WireDtype::Bf16));
    let text = built.map(|_| ()).unwrap_err().to_string();
    assert!(text.contains("hidden size 200") && text.contains("128"), "{text}");
}

#[test]
fn servers_that_do_not_suit_say_why() {
    let Some(fleet) = Fleet::start(1, 1, WireDtype::Bf16) else { return };
    let refused =
        |gpu: Gpu, dtype: WireDtype, builder: switchyard_attention_client::DeviceClientBuilder| {
            let built = builder.replica_wait(Duration::from_secs(5)).build(gpu, options(dtype));
            let error = built.expect("client").wait_ready(Duration::from_secs(5)).unwrap_err();
            assert!(matches!(error, DeviceError::Client(ClientError::NoReplica { .. })), "{error}");
            error.to_string()
        };
    // Another element type.
    let text = refused(fleet.gpu(), WireDtype::F8E4m3, fleet.builder());
    assert!(text.contains("fp8") && text.contains("bf16"), "{text}");
    // Other slots.
    let slot = p2p_core::SlotConfig { slot_bytes: 128 << 10, num_frames: 2 };
    let text = refused(fleet.gpu(), WireDtype::Bf16, fleet.builder().slot(slot));
    assert!(text.contains("device slots"), "{text}");
    // A client on the processor.
    let client = MoeClient::builder(fleet.model.clone()).slot(SLOT).placement(fleet.table(1));
    let client = client.replica_wait(Duration::from_secs(20)).build().expect("client");
    let text = client.wait_ready(Duration::from_secs(5)).unwrap_err().to_string();
    assert!(text.contains("GPU") || text.contains("slot"), "{text}");
    // A GPU that cannot reach the server's.
    if matches!(fleet.gpu().name(), DeviceName::Emulated(_)) {
        let island = Gpu::open_emulated(8).expect("a GPU");
        let text = refused(island, WireDtype::Bf16, fleet.builder());
        assert!(text.contains("no access to memory of GPU"), "{text}");
    }
}
