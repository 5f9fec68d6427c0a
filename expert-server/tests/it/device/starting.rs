//! Settings that cannot work are reported in one line, before any batch is launched.

use checkpoint::{MakeOptions, Preset, make_checkpoint};
use cuda_ipc::GpuMemory;
use kernels::gpu::{DeviceName, Gpu};
use kernels::slots::DeviceSide;
use p2p_core::bootstrap::{ConnectConfig, connect};
use p2p_core::{RejectCode, SlotConfig};
use protocol::WireDtype;
use switchyard_expert_server::device::{DeviceError, DeviceOptions};
use switchyard_expert_server::{
    ExpertSelection, ExpertServer, Placement, ServerConfig, StartError,
};

use crate::common::{Reference, reference_format, tiny_moe};
use crate::device::client::{HOST_SLOT, config_for, geometry_of, hello};
use crate::device::{SLOT, devices, server_on};

/// The error of a server that cannot start, in one line.
pub async fn refusal(tweak: impl FnOnce(&mut ServerConfig)) -> String {
    let placement = Placement::Static(ExpertSelection::All);
    let mut config = ServerConfig::new(tiny_moe(), "refused", placement);
    config.device = Some(DeviceOptions::new(DeviceName::Emulated(0)));
    config.slot = SLOT;
    tweak(&mut config);
    let error = ExpertServer::start(config, |_| {}).await.expect_err("it cannot start");
    assert!(matches!(error, StartError::Device(_)), "{error:?}");
    let text = error.to_string();
    assert!(!text.contains('\n'), "{text}");
    text
}

#[tokio::test]
async fn settings_that_cannot_work_are_named() {
    let set =
        |name| move |config: &mut ServerConfig| config.device = Some(DeviceOptions::new(name));
    let said = refusal(set(DeviceName::Emulated(99))).await;
    assert!(said.starts_with("cannot use emulated:99: there is no GPU 99"), "{said}");
    let said = refusal(|config| {
        let options = DeviceOptions::new(DeviceName::Emulated(0));
        config.device = Some(DeviceOptions { dtype: WireDtype::F32, ..options });
    })
    .await;
    assert!(said.contains("cannot be f32: expected bf16 or fp8"), "{said}");
    for slot in [
        SlotConfig { slot_bytes: 16 << 10, num_frames: 4 },
        SlotConfig { slot_bytes: 64 << 10, num_frames: 3 },
    ] {
        let said = refusal(|config| config.slot = slot).await;
        assert!(said.contains(&format!("{} frames", slot.num_frames)), "{said}");
    }
    let dir = tempfile::tempdir().expect("a directory");
    let options = MakeOptions::new(Preset::TinyDeepseekV3, 2);
    make_checkpoint(dir.path(), &options, &mut |_, _| {}).expect("a checkpoint");
    let said = refusal(|config| config.model_dir = dir.path().to_owned()).await;
    assert!(said.contains("hidden size: expected a positive multiple of 128"), "{said}");
    assert!(said.contains("--device cpu"), "{said}");
}

#[tokio::test]
async fn arithmetic_that_the_kernels_lack_is_named() {
    let dir = tempfile::tempdir().expect("a directory");
    let source = reference_format("ct-int4-g32");
    let config = std::fs::read_to_string(source.join("config.json")).expect("a configuration");
    std::fs::copy(source.join("model.safetensors"), dir.path().join("model.safetensors"))
        .expect("copied");
    let changed = config.replace(r#""hidden_act": "silu""#, r#""hidden_act": "gelu""#);
    assert_ne!(config, changed);
    std::fs::write(dir.path().join("config.json"), changed).expect("written");
    let said = refusal(|config| config.model_dir = dir.path().to_owned()).await;
    let expected = "the GPU kernels have no activation gelu, only silu; \
                    serve this model on the CPU (`--device cpu`)";
    assert_eq!(said, expected);
}

#[tokio::test]
async fn a_gpu_that_is_not_there_is_named_with_the_remedy() {
    if Gpu::count().is_ok_and(|count| count > 0) {
        test_support::skip("no-gpu", "this host has a GPU");
        return;
    }
    let said = refusal(|config| {
        config.device = Some(DeviceOptions::new(DeviceName::Cuda(0)));
    })
    .await;
    let remedy = if cfg!(feature = "cuda") { "libcuda.so.1" } else { "--features cuda" };
    assert!(said.contains("cuda:0") && said.contains(remedy), "{said}");
}

#[test]
fn a_lack_of_memory_says_how_much_is_missing() {
    let error = DeviceError::Memory {
        what: "the experts and the batches",
        needed_bytes: 200 << 30,
        device: DeviceName::Cuda(0),
        free_bytes: 140 << 30,
    };
    let text = error.to_string();
    assert!(text.contains("need 200.00 GiB, cuda:0 has 140.00 GiB free"), "{text}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refusals_of_clients_without_shared_memory_name_the_reason() {
    let Some((device, gpu)) = devices() else { return };
    let reference = Reference::open();
    let shape = reference.shape;
    let dtype = WireDtype::F8E4m3;
    let server = server_on(device, dtype, ExpertSelection::All, |_| {}).await;
    let geometry = geometry_of(&shape, dtype, SLOT);
    let said = async |dtype, config| {
        let refused = connect(server.data_addr(), hello(shape, 1, dtype), config).await;
        let error = refused.expect_err("refused");
        let reject = error.reject().unwrap_or_else(|| panic!("a rejection, not {error}"));
        assert_eq!(reject.code, RejectCode::DEVICE, "{reject}");
        reject.message.clone()
    };
    let without = ConnectConfig { slot: HOST_SLOT, ..ConnectConfig::default() };
    assert!(said(dtype, without).await.contains("brings no GPU"));
    let bf16 = geometry_of(&shape, WireDtype::Bf16, SLOT);
    let message = said(WireDtype::Bf16, config_for(&gpu, &bf16)).await;
    assert!(message.contains("fp8") && message.contains("bf16"), "{message}");
    // The slots match, but the hello does not.
    let message = said(WireDtype::Bf16, config_for(&gpu, &geometry)).await;
    assert!(message.contains("requests in fp8"), "{message}");
    if let DeviceName::Emulated(_) = device {
        let far = Gpu::open_emulated(9).expect("another island");
        let side = DeviceSide {
            gpu: far,
            own_slot_bytes: geometry.response_slot_bytes,
            peer_slot_bytes: geometry.slot_bytes,
            shape: geometry.describe().into_bytes(),
        };
        let config = ConnectConfig {
            slot: HOST_SLOT,
            device: Some(GpuMemory::offer(side)),
            ..Default::default()
        };
        let message = said(dtype, config).await;
        assert!(message.contains("GPU 0 has no access to memory of GPU 9"), "{message}");
    }
    server.shutdown().await;
}
