//! Settings of a client, and its connection with the control plane.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use attention_client::device::{DeviceBuildError, DeviceName, Gpu, GpuError};
use attention_client::trust::tls::{ClientCertificates, Security, Tls, TlsFiles};
use attention_client::{
    Checkpoint, ClientModel, DeviceClient, DeviceOptions, ModelError, ModelShape, MoeClient,
    OnMissingExpert, Recorder, SlotConfig, WireDtype,
};
use p2p_core::{OpenNetworks, TransportSpec};
use pyo3::prelude::*;

use super::Backend;
use super::gpu::{GpuClient, Limits};
use crate::errors::{self, Kind, error};
use crate::interrupt::Interrupt;

/// Settings of a client, checked one by one.
#[derive(Debug)]
pub struct Settings {
    pub control_plane: String,
    pub token: Option<String>,
    /// File that the token was read from. It is read again when the control plane refuses the token.
    pub token_file: Option<PathBuf>,
    pub model: Option<PathBuf>,
    /// GPU of the client's arrays. `None`: they are in host memory.
    pub device: Option<DeviceName>,
    pub wire_dtype: Option<WireDtype>,
    pub response_dtype: Option<WireDtype>,
    pub transports: TransportSpec,
    pub max_lanes: NonZeroUsize,
    pub timeout: Duration,
    pub deadline: Duration,
    pub work_limit: Duration,
    pub on_missing: OnMissingExpert,
    pub name: String,
    pub slot_bytes: Option<usize>,
    pub slot_frames: Option<usize>,
    pub hedge_budget: f64,
    pub security: Security,
    pub recorder: Option<Recorder>,
}

/// A failure before there is a client.
enum Failure {
    Model(ModelError),
    Build(attention_client::BuildError),
    Gpu(DeviceName, GpuError),
    DeviceBuild(DeviceName, DeviceBuildError),
    Other(Kind, String),
}

/// Asks the control plane for its model, compares it with the caller's, and starts a client. Blocks for
/// `settings.timeout` at most, beside the time to read a checkpoint.
pub fn connect(py: Python<'_>, settings: Settings) -> PyResult<Backend> {
    let (result, interrupt) = py.detach(move || {
        let interrupt = Interrupt::new();
        let result = start(settings, &interrupt);
        (result, interrupt)
    });
    interrupt.check()?;
    result.map_err(|failure| match failure {
        Failure::Model(failure) => errors::of_model(py, &failure),
        Failure::Build(failure) => errors::of_build(py, &failure),
        Failure::Gpu(device, failure) => errors::of_gpu(py, device, &failure),
        Failure::DeviceBuild(device, failure) => errors::of_device_build(py, device, &failure),
        Failure::Other(kind, text) => error(py, kind, text),
    })
}

fn start(settings: Settings, interrupt: &Interrupt) -> Result<Backend, Failure> {
    // First, since no wait changes a failure of the GPU.
    let gpu = match settings.device {
        Some(device) => {
            let gpu = Gpu::open_named(device).map_err(|failure| Failure::Gpu(device, failure))?;
            Some((device, gpu, device_options(device, &settings)?))
        }
        None => None,
    };
    let own = match &settings.model {
        Some(dir) => {
            let unusable = |failure: &dyn std::error::Error| {
                Failure::Other(Kind::Config, format!("model {}: {failure}", dir.display()))
            };
            let checkpoint =
                Checkpoint::open_without_experts(dir).map_err(|failure| unusable(&failure))?;
            Some(if checkpoint.has_experts() {
                ClientModel::with_weights_of(&checkpoint).map_err(|failure| unusable(&failure))?
            } else {
                ClientModel::of(&checkpoint)
            })
        }
        None => None,
    };
    let served = fetch(&settings, interrupt)?;
    let model = match own {
        Some(own) => {
            if let Some(difference) = own.difference(&served.descriptor()) {
                let dir = settings.model.unwrap_or_default();
                let text = format!(
                    "the servers at {} serve another model than {}: {difference}",
                    settings.control_plane,
                    dir.display()
                );
                return Err(Failure::Other(Kind::ModelMismatch, text));
            }
            own
        }
        None => served,
    };
    let networks = OpenNetworks::default();
    #[cfg(feature = "libfabric")]
    let networks = networks.with(libfabric_transport::opener());
    let mut networks = networks;
    let transports = networks
        .open(&settings.transports)
        .map_err(|failure| Failure::Other(Kind::Config, format!("transports: {failure}")))?;
    let Some((device, gpu, options)) = gpu else {
        let wire_dtype = settings.wire_dtype.unwrap_or(WireDtype::F32);
        let response_dtype = settings.response_dtype.unwrap_or(match wire_dtype {
            WireDtype::F8E4m3 => WireDtype::Bf16,
            other => other,
        });
        let builder = MoeClient::builder(model)
            .wire_dtype(wire_dtype)
            .response_dtype(response_dtype)
            .max_lanes(settings.max_lanes)
            .hedge_budget(settings.hedge_budget);
        let built = configured!(builder, settings, transports).build();
        return built.map(Backend::Host).map_err(Failure::Build);
    };
    let limits = Limits {
        num_frames: settings.slot_frames.unwrap_or(SlotConfig::default().num_frames),
        turn: settings.timeout,
        work: settings.work_limit,
    };
    let builder = DeviceClient::builder(model).hedge_budget(settings.hedge_budget);
    let client = configured!(builder, settings, transports)
        .build(gpu, options)
        .map_err(|failure| Failure::DeviceBuild(device, failure))?;
    let client = GpuClient::new(client, limits).map_err(|failure| Failure::Gpu(device, failure))?;
    Ok(Backend::Gpu(Arc::new(client)))
}

/// The number formats of a client on a GPU.
fn device_options(device: DeviceName, settings: &Settings) -> Result<DeviceOptions, Failure> {
    let mut options = DeviceOptions::default();
    for (setting, found, expected) in [
        ("wire_dtype", settings.wire_dtype, &[WireDtype::Bf16, WireDtype::F8E4m3][..]),
        ("response_dtype", settings.response_dtype, &[WireDtype::Bf16]),
    ] {
        if let Some(found) = found.filter(|found| !expected.contains(found)) {
            let names: Vec<_> = expected.iter().map(|dtype| dtype.name()).collect();
            let text = format!(
                "{setting} is {}, expected {} with device {device}",
                found.name(),
                names.join(" or ")
            );
            return Err(Failure::Other(Kind::Config, text));
        }
    }
    options.dtype = settings.wire_dtype.unwrap_or(WireDtype::Bf16);
    Ok(options)
}

/// Settings that the builders of both clients have.
macro_rules! configured {
    ($builder:expr, $settings:expr, $transports:expr) => {{
        let defaults = SlotConfig::default();
        let builder = $builder
            .control_plane($settings.control_plane, $settings.token.clone())
            .token_file($settings.token_file)
            .secret($settings.token)
            .security($settings.security)
            .transports($transports)
            .replica_wait($settings.timeout)
            .deadline($settings.deadline)
            .work_limit($settings.work_limit)
            .on_missing_expert($settings.on_missing)
            .name($settings.name)
            .slot(SlotConfig {
                slot_bytes: $settings.slot_bytes.unwrap_or(defaults.slot_bytes),
                num_frames: $settings.slot_frames.unwrap_or(defaults.num_frames),
            });
        match $settings.recorder {
            Some(recorder) => builder.recorder(recorder),
            None => builder,
        }
    }};
}
use configured;

/// The model of the cluster. Retries as long as the control plane is not reachable or has no model yet.
fn fetch(settings: &Settings, interrupt: &Interrupt) -> Result<ClientModel, Failure> {
    let until = Instant::now() + settings.timeout;
    loop {
        let left = until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        let result = ClientModel::fetch_with(
            &settings.control_plane,
            settings.token.clone(),
            settings.security.clone(),
            ModelShape::UNKNOWN_LAYERS,
            left.min(LONGEST_REQUEST),
        );
        let failure = match result {
            Ok(model) => return Ok(model),
            Err(failure) => failure,
        };
        let may_pass = match &failure {
            ModelError::Control(failure) => failure.is_transient(),
            other => matches!(other, ModelError::NoModel),
        };
        if !may_pass || Instant::now() + RETRY_PAUSE >= until || interrupt.is_due() {
            return Err(Failure::Model(failure));
        }
        std::thread::sleep(RETRY_PAUSE);
    }
}

/// The certificates in the folder `tls`. A thread follows its files.
pub fn security(py: Python<'_>, tls: Option<&Path>, insecure: bool) -> PyResult<Security> {
    let open = |dir| Tls::open(TlsFiles::in_folder(dir)?, ClientCertificates::Optional);
    match tls.map(open).transpose() {
        Ok(tls) => Ok(Security { tls, insecure }),
        Err(failure) => Err(error(py, Kind::Config, format!("tls: {failure}"))),
    }
}

pub fn dtype(py: Python<'_>, setting: &str, name: &str) -> PyResult<WireDtype> {
    name.parse().map_err(|failure| error(py, Kind::Config, format!("{setting}: {failure}")))
}

/// The GPU of a device's name; `None` for `cpu`.
pub fn device(py: Python<'_>, name: &str) -> PyResult<Option<DeviceName>> {
    match (name, name.parse()) {
        ("cpu", _) => Ok(None),
        (_, Ok(device @ DeviceName::Cuda(_))) => Ok(Some(device)),
        _ => {
            let text =
                format!("device is {name:?}, expected \"cpu\" or \"cuda:N\", such as \"cuda:0\"");
            Err(error(py, Kind::Config, text))
        }
    }
}

pub fn transports(py: Python<'_>, list: &str) -> PyResult<TransportSpec> {
    list.parse().map_err(|failure| error(py, Kind::Config, format!("transports: {failure}")))
}

pub fn lanes(py: Python<'_>, max_lanes: i64) -> PyResult<NonZeroUsize> {
    usize::try_from(max_lanes).ok().and_then(NonZeroUsize::new).ok_or_else(|| {
        error(py, Kind::Config, format!("max_lanes is {max_lanes}, expected 1 to 1024"))
    })
}

pub fn size(py: Python<'_>, setting: &str, size: Option<i64>) -> PyResult<Option<usize>> {
    size.map(usize::try_from).transpose().map_err(|_| {
        let found = size.unwrap_or_default();
        error(py, Kind::Config, format!("{setting} is {found}, expected a positive number"))
    })
}

pub fn seconds(py: Python<'_>, setting: &str, seconds: f64) -> PyResult<Duration> {
    match Duration::try_from_secs_f64(seconds) {
        Ok(duration) if duration <= LONGEST_TIME => Ok(duration),
        _ => {
            let text =
                format!("{setting} is {seconds} s, expected 0 to {} s", LONGEST_TIME.as_secs());
            Err(error(py, Kind::Config, text))
        }
    }
}

pub fn share(py: Python<'_>, setting: &str, share: f64) -> PyResult<f64> {
    if (0.0..=1.0).contains(&share) {
        return Ok(share);
    }
    Err(error(py, Kind::Config, format!("{setting} is {share}, expected 0 to 1")))
}

pub fn on_missing(py: Python<'_>, policy: &str) -> PyResult<OnMissingExpert> {
    match policy {
        "fail" => Ok(OnMissingExpert::Fail),
        "drop" => Ok(OnMissingExpert::DropAndRenormalise),
        other => {
            let text = format!("on_missing is {other:?}, expected \"fail\" or \"drop\"");
            Err(error(py, Kind::Config, text))
        }
    }
}

/// A request that is not answered within this time is repeated, so that signals end the wait.
const LONGEST_REQUEST: Duration = Duration::from_secs(1);
const RETRY_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_TIME: Duration = Duration::from_secs(3600);
